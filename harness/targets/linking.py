"""From object files to a shared library: with the system's C compiler, or without one, with the linker of `ziglang`."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

COMPILERS = ("c++", "g++", "clang++", "cc", "gcc", "clang")
MACOS_TRIPLE = "arm64-apple-macos"


def linker(for_macos: bool = False) -> list[str] | None:
    """Returns the command that links a shared library, without files; None where there is nothing to link with.

    CXX or CC, if set, otherwise the system's compiler, otherwise Zig's, which comes as a Python package and can also
    link for macOS on Linux.

    Args:
        for_macos: Whether the objects are for macOS.
    """
    at_home = for_macos == (platform.system() == "Darwin")
    native = ["-dynamiclib", "-undefined", "dynamic_lookup"] if for_macos else ["-shared", "-fPIC"]
    if at_home:
        named = os.environ.get("CXX") or os.environ.get("CC")
        compiler = named or next(filter(None, map(shutil.which, COMPILERS)), None)
        if compiler:
            return [compiler, *native]
    if find_spec("ziglang") is None:
        return None
    zig = [sys.executable, "-m", "ziglang", "cc"]
    if for_macos:
        return [*zig, "-target", "aarch64-macos", "-shared", "-Wl,-undefined,dynamic_lookup"]
    return [*zig, "-shared", "-fPIC"]


def link_problem(for_macos: bool = False) -> str | None:
    """Returns why this machine cannot link a library, or None."""
    if linker(for_macos) is not None:
        return None
    remedy = "pip install ziglang" if for_macos else "install a C compiler, or pip install ziglang"
    return f"there is nothing to link {'a macOS' if for_macos else 'a'} library with: {remedy}"


def link(output: str, objects: Sequence[str], for_macos: bool = False, **_options: Any) -> None:
    """Links object files into the shared library `output`; TVM's `export_library` takes this as its `fcompile`.

    Raises:
        RuntimeError: There is no linker, or it fails.
    """
    command = linker(for_macos)
    if command is None:
        raise RuntimeError(link_problem(for_macos))
    done = subprocess.run([*command, "-o", output, *objects], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} could not link {output}: {done.stdout}{done.stderr}")
