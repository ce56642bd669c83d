"""Runs clang on any machine: the clang inside the `ziglang` package, otherwise the system's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

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
