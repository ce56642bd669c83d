"""Reads the system's facts about the machine: Linux has them in files, macOS in the output of `sysctl`."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

ROOT = Path("/")
"""The folder with `proc` and `sys`, except in tests."""


def read_text(path: Path) -> str:
    """Returns the text of a file without blanks at its ends; empty if the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def sysctl(*arguments: str) -> str:
    """Returns the output of macOS's `sysctl`, without blanks at its ends; empty on other systems."""
    if platform.system() != "Darwin":
        return ""
    process = subprocess.run(["/usr/sbin/sysctl", *arguments], capture_output=True, text=True, check=False)
    return process.stdout.strip()
