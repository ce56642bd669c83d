"""From object files to a shared library: with the system's C compiler, or without one, with the linker of `ziglang`.

That linker also makes libraries for the platforms of `_ZIG_TARGETS`, wherever it runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from harness.runtime.cpu import Platform, this_platform

COMPILERS = ("c++", "g++", "clang++", "cc", "gcc", "clang")
MACOS_TRIPLE = "arm64-apple-macos"

MACOS: Platform = ("macOS", "aarch64")
_ZIG_TARGETS: dict[Platform, str] = {
    MACOS: "aarch64-macos",
    ("Linux", "aarch64"): "aarch64-linux-gnu",
    ("Linux", "x86_64"): "x86_64-linux-gnu",
}


def linker(to: Platform | None = None) -> list[str] | None:
    """Returns the command that links a shared library, without files; None where there is nothing to link with.

    CXX or CC, if set, otherwise the system's compiler, otherwise Zig's, which comes as a Python package and is the one
    that links for other platforms.

    Args:
        to: What the objects are for; None for this machine.
    """
    here = this_platform()
    to = to or here
    for_macos = to[0] == "macOS"
    if to == here:
        native = ["-dynamiclib", "-undefined", "dynamic_lookup"] if for_macos else ["-shared", "-fPIC"]
        named = os.environ.get("CXX") or os.environ.get("CC")
        compiler = named or next(filter(None, map(shutil.which, COMPILERS)), None)
        if compiler:
            return [compiler, *native]
    if find_spec("ziglang") is None or (to != here and to not in _ZIG_TARGETS):
        return None
    zig = [sys.executable, "-P", "-m", "ziglang", "cc"]
    chosen = zig if to == here and not for_macos else [*zig, "-target", _ZIG_TARGETS[to]]
    return [*chosen, "-shared", "-Wl,-undefined,dynamic_lookup" if for_macos else "-fPIC"]


def link_problem(to: Platform | None = None) -> str | None:
    """Returns why this machine cannot link a library for a platform, None for its own; or None."""
    if linker(to) is not None:
        return None
    if to is None or to == this_platform():
        return "there is nothing to link a library with: install a C compiler, or pip install ziglang"
    return f"there is nothing to link a library for {to[0]} on {to[1]} with: pip install ziglang"


def link(output: str, objects: Sequence[str], to: Platform | None = None, **_options: Any) -> None:
    """Links object files into the shared library `output`; TVM's `export_library` takes this as its `fcompile`.

    Raises:
        RuntimeError: There is no linker, or it fails.
    """
    command = linker(to)
    if command is None:
        raise RuntimeError(link_problem(to))
    done = subprocess.run([*command, "-o", output, *objects], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} could not link {output}: {done.stdout}{done.stderr}")
