"""Files to which lines are appended, and whose last line may be cut off where a process was killed."""

from __future__ import annotations

from pathlib import Path

from harness.core.errors import HarnessError


def read_lines(path: Path) -> tuple[list[bytes], bytes]:
    """The complete lines of a file, and what stands after them; nothing if there is no file.

    Raises:
        HarnessError: It cannot be read.
    """
    try:
        *lines, torn = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], b""
    except OSError as error:
        raise HarnessError(f"cannot read {path}: {error.strerror}; choose another folder with --db") from error
    return lines, torn


def unwritable(path: Path, reason: str) -> HarnessError:
    """The error of a file that cannot be appended to."""
    return HarnessError(
        f"cannot write {path}: {reason}; free some space or make it writable, then tune again to resume"
    )
