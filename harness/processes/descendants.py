"""The processes that a process has started, and those that these have started."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

LISTED = Path("/proc/thread-self/children").exists()
"""Whether this system lists the children of each thread."""


def descendants(pid: int) -> list[psutil.Process]:
    """Returns the descendants of a process that are there now.

    Where the system lists the children of each thread, these lists are read: psutil reads every process of the system,
    which takes ten times as long.
    """
    import psutil

    found: list[psutil.Process] = []
    if not LISTED:
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(pid).children(recursive=True)
        return found
    pending = _children(pid)
    while pending:
        child = pending.pop()
        pending += _children(child)
        with contextlib.suppress(psutil.Error):
            found.append(psutil.Process(child))
    return found


def _children(pid: int) -> list[int]:
    """Returns the process ids of the children of all threads of a process of Linux; none if it has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended, or in the loop a thread
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return found
