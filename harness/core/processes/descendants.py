"""Finds the processes that a process has started, directly and indirectly."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

LISTED = Path("/proc/thread-self/children").exists()
"""True if the system lists the children of each thread."""


def descendants(pid: int) -> list[psutil.Process]:
    """Returns the running descendants of a process.

    The system's lists of the children of each thread are read if they exist. psutil reads every process of the system,
    which takes ten times as long.
    """
    import psutil

    processes: list[psutil.Process] = []
    if not LISTED:
        with contextlib.suppress(psutil.Error):
            processes = psutil.Process(pid).children(recursive=True)
        return processes
    pids = _children(pid)
    while pids:
        child = pids.pop()
        pids += _children(child)
        with contextlib.suppress(psutil.Error):
            processes.append(psutil.Process(child))
    return processes


def _children(pid: int) -> list[int]:
    """Returns the process ids of the children of all threads of a Linux process; none if it has ended."""
    pids: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended, or a thread in the loop below
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                pids += map(int, (thread / "children").read_text().split())
    return pids
