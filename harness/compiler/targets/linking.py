"""Compiles C source, links shared libraries and runs clang, with the system's tools or with `ziglang`.

The linker of `ziglang` also makes libraries for the platforms of `_ZIG_TARGETS`, on any machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
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


def linker(platform: Platform | None = None) -> list[str] | None:
    """Returns the command that links a shared library, without files; None if there is no linker.

    The command is CXX or CC if set, otherwise the system's compiler, otherwise Zig's. Zig's compiler is a Python
    package and the only linker for other platforms.

    Args:
        platform: Platform of the objects; None for this machine.
    """
    host = this_platform()
    platform = platform or host
    for_macos = platform[0] == "macOS"
    if platform == host:
        native = ["-dynamiclib", "-undefined", "dynamic_lookup"] if for_macos else ["-shared", "-fPIC"]
        requested = os.environ.get("CXX") or os.environ.get("CC")
        compiler = requested or next(filter(None, map(shutil.which, COMPILERS)), None)
        if compiler:
            return [compiler, *native]
    if find_spec("ziglang") is None or (platform != host and platform not in _ZIG_TARGETS):
        return None
    zig = [sys.executable, "-P", "-m", "ziglang", "cc"]
    command = zig if platform == host and not for_macos else [*zig, "-target", _ZIG_TARGETS[platform]]
    return [*command, "-shared", "-Wl,-undefined,dynamic_lookup" if for_macos else "-fPIC"]


def link_problem(platform: Platform | None = None) -> str | None:
    """Returns why this machine cannot link a library for a platform (None for its own), or None if it can."""
    if linker(platform) is not None:
        return None
    if platform is None or platform == this_platform():
        return "there is nothing to link a library with: install a C compiler, or pip install ziglang"
    return f"there is nothing to link a library for {platform[0]} on {platform[1]} with: pip install ziglang"


def link(output: str, objects: Sequence[str], platform: Platform | None = None, **_options: Any) -> None:
    """Links object files into the shared library `output`; the `fcompile` of TVM's `export_library`.

    Raises:
        RuntimeError: There is no linker, or it fails.
    """
    _run("link", platform, output, objects)


def compile_source(output: str, source: str, platform: Platform | None = None) -> None:
    """Compiles a C source file into the object file `output`.

    Raises:
        RuntimeError: There is no compiler, or it fails.
    """
    _run("compile", platform, output, ["-c", source])


def _run(purpose: str, platform: Platform | None, output: str, arguments: Sequence[str]) -> None:
    command = linker(platform)
    if command is None:
        raise RuntimeError(link_problem(platform))
    result = subprocess.run([*command, "-o", output, *arguments], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} could not {purpose} {output}: {result.stdout}{result.stderr}")


HEADERS = Path(__file__).parent / "headers"
"""Folder of the headers that generated GPU source includes, for clang."""


def clang() -> list[str] | None:
    """Returns the command that runs clang, without arguments; None if there is no clang."""
    if find_spec("ziglang") is not None:
        return [sys.executable, "-P", "-m", "ziglang", "clang"]
    installed = shutil.which("clang")
    return [installed] if installed else None


def run_clang(arguments: Sequence[str]) -> str:
    """Runs clang on C++17 without library headers, and returns its messages, which are empty on success.

    Raises:
        RuntimeError: There is no clang.
    """
    command = clang()
    if command is None:
        raise RuntimeError("there is no clang to read GPU source with: pip install ziglang")
    options = [
        "-x",
        "c++",
        "-std=c++17",
        "-nostdinc",
        f"-I{HEADERS}",
        "-w",
        "-fno-caret-diagnostics",
        "-fno-exceptions",
    ]
    result = subprocess.run([*command, *options, *arguments], capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return ""
    return result.stderr.strip() or f"clang ended with {result.returncode}"
