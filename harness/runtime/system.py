"""Where systems tell about the machine: Linux in files, macOS in what `sysctl` prints."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

ROOT = Path("/")
"""Where `proc` and `sys` are, except in tests."""


def read_text(path: Path) -> str:
    """Returns a file's text without blanks at its ends; empty if it is not there."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def sysctl(*arguments: str) -> str:
    """Returns what macOS's `sysctl` prints, without blanks at its ends; empty on other systems."""
    if platform.system() != "Darwin":
        return ""
    answer = subprocess.run(["/usr/sbin/sysctl", *arguments], capture_output=True, text=True, check=False)
    return answer.stdout.strip()
