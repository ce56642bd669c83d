"""Measures the resident memory of this process, for sides that have a process of their own (`perf/processes.py`).

Libraries, the model around a component and the inputs are in memory before the measurement. Memory that an allocator
keeps for later counts, because the process has it: TVM's pool, a packed weight beside its original.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from harness.core.processes.memory import give_back_freed_memory


@dataclass(frozen=True)
class Memory:
    """Bytes of resident memory.

    Attributes:
        weights: What loading added, the packing of weights done.
        run: How far the peak of the runs is above that.
    """

    weights: int
    run: int


@dataclass
class Meter:
    """Measures what loading and running add to a process.

    Attributes:
        before: Resident bytes before loading; None where the system does not tell.
        loaded: Resident bytes after loading.
        peak: The largest resident bytes seen while something ran.
    """

    before: int | None = None
    loaded: int | None = None
    peak: int = 0

    def start(self) -> None:
        """Notes what is resident before loading."""
        self.before = resident()

    def note_loaded(self) -> None:
        """Notes what is resident once everything is loaded."""
        self.loaded = resident() if self.before is not None else None
        self.resume()

    def pause(self) -> None:
        """Stops counting what the process does, until `resume`."""
        if self.loaded is not None:
            self.peak = max(self.peak, _status("VmHWM"))

    def resume(self) -> None:
        """Counts again, from what is resident now."""
        if self.loaded is None or resident() is None or not _forget_peak():
            self.loaded = None

    def memory(self) -> Memory | None:
        """Returns what was found so far; None where the system does not tell."""
        self.pause()
        if self.before is None or self.loaded is None:
            return None
        return Memory(self.loaded - self.before, max(0, self.peak - self.loaded))


def resident() -> int | None:
    """Gives back all memory that is free and returns the resident bytes; None where the system does not tell."""
    give_back_freed_memory()
    try:
        return _status("VmRSS")
    except OSError:  # not Linux
        return None


def _forget_peak() -> bool:
    """Resets the kernel's record of the peak (proc(5), clear_refs) and returns whether that succeeded."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(name: str) -> int:
    """Reads a size in /proc/self/status."""
    text = Path("/proc/self/status").read_text()
    match = re.search(rf"^{name}:\s*(\d+) kB$", text, re.M)
    if match is None:
        raise OSError(f"/proc/self/status has no {name}")
    return int(match.group(1)) * 1024
