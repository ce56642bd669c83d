"""A model of how a compiled program scales: what was measured on one thread, replayed on any number of them.

A call of a kernel is what it does alone (`serial`) and its parallel loops. The seconds of each part of a loop are
measured (`perf/parts.py`) for the loop cut in as many parts as it would be cut in. Dynamic distribution is what
libraries do (`harness/compiler/targets/parallel.py`): each part of a long loop goes to the thread that is free first,
and a short loop runs on as many threads as make it shorter. Static distribution, for comparison, is what TVM's pool
does by itself: each thread has one part, and the longest counts. What is assumed, because one machine cannot tell:
every core is as fast as the one that measured, and its caches too; a kernel moves each of its operands through memory
once; memory serves so many bytes a second for each core (`Machine`); and a loop costs what `launch_nanoseconds` says.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.compiler.targets.parallel import (
    LAUNCH_NANOSECONDS,
    LAUNCH_NANOSECONDS_PER_THREAD,
    LEAST_PARTS,
    LONG_SECONDS,
    PARTS_PER_THREAD,
)

THREADS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of threads that programs are replayed on."""


def parts_of_loop(threads: int) -> int:
    """Returns the number of parts of a long loop; one thread runs a loop as a whole."""
    return 1 if threads == 1 else max(LEAST_PARTS, PARTS_PER_THREAD * threads)


def launch_nanoseconds(threads: int) -> int:
    """Returns the cost of launching a loop on threads; one thread runs the loop itself."""
    return 0 if threads == 1 else LAUNCH_NANOSECONDS + LAUNCH_NANOSECONDS_PER_THREAD * threads


def threads_for(work: int, threads: int) -> int:
    """Returns the number of a pool's threads for a short loop, doubled as long as that saves time.

    It is the function of the same name in `parallel.c`.

    Args:
        work: Nanoseconds of all threads in the last run.
        threads: Threads of the pool.
    """
    count = 1
    while count < threads:
        doubled = min(2 * count, threads)
        if work // count - work // doubled <= launch_nanoseconds(doubled) - launch_nanoseconds(count):
            break
        count = doubled
    return count


CUTS = tuple(sorted({*THREADS, *map(parts_of_loop, THREADS)}))
"""Numbers of parts that every loop is measured in."""

Distribution = Literal["static", "dynamic"]
DISTRIBUTIONS: tuple[Distribution, ...] = ("dynamic", "static")


def static_seconds(parts: Sequence[float]) -> float:
    """Returns the seconds of a loop whose parts run on a thread each; nothing for no parts."""
    return max(parts, default=0.0)


def dynamic_seconds(tasks: Iterable[float], threads: int) -> float:
    """Returns the seconds of tasks that are handed out in order, each to the thread that is free first."""
    free = [0.0] * threads
    for seconds in tasks:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def shared_seconds(parts: Sequence[float], cpus: int) -> float:
    """Returns the seconds of parts on a thread each, of which `cpus` run at a time and all get the same share."""
    return max(sum(parts) / cpus, static_seconds(parts))


BANDWIDTH_PER_CORE = 5e9
"""Assumed byte/s of memory for each core where all are busy: 12 channels of DDR5-4800 give 96 cores 4.8e9 each."""


@dataclass(frozen=True)
class Machine:
    """What the memory of a machine gives.

    Attributes:
        least: Byte/s in any case: what this machine has.
        per_core: Byte/s for each core.
    """

    least: float
    per_core: float = BANDWIDTH_PER_CORE

    def seconds(self, moved: int, threads: int) -> float:
        """Returns how long so many bytes take at least."""
        return moved / max(self.least, self.per_core * threads)


Loop = Mapping[int, Sequence[float]]
"""Number of parts → seconds of each."""


def loop_seconds(loop: Loop, threads: int, how: Distribution) -> tuple[float, float]:
    """Returns how long a loop computes on threads, and what handing it out costs."""
    seconds = static_seconds(loop[threads])
    if how == "dynamic" and seconds >= LONG_SECONDS:
        seconds = dynamic_seconds(loop[parts_of_loop(threads)], threads)
    elif how == "dynamic":
        threads = threads_for(round(sum(loop[threads]) * 1e9), threads)
        seconds = static_seconds(loop[threads])
    return seconds, launch_nanoseconds(threads) / 1e9


@dataclass(frozen=True)
class Call:
    """A call of a compiled function.

    Attributes:
        name: Of the function.
        serial: Seconds outside of its parallel loops.
        loops: Its parallel loops, in the order in which they ran.
        moved: Bytes of its arguments.
    """

    name: str
    serial: float
    loops: tuple[Loop, ...]
    moved: int

    def seconds(self, threads: int, machine: Machine, how: Distribution = "dynamic") -> float:
        """Returns how long it takes: never longer for its memory than on one thread, whose time was measured."""
        alone = self.serial + sum(static_seconds(loop[1]) for loop in self.loops)
        if threads == 1:
            return alone
        loops = [loop_seconds(loop, threads, how) for loop in self.loops]
        computing = self.serial + sum(seconds for seconds, _ in loops)
        memory = min(machine.seconds(self.moved, threads), alone)
        return max(computing, memory) + sum(launching for _, launching in loops)


@dataclass(frozen=True)
class Program:
    """One run of a compiled program.

    Attributes:
        calls: Its calls, in order.
        between: Seconds between them, of the virtual machine.
    """

    calls: tuple[Call, ...]
    between: float = 0.0

    def seconds(self, threads: int, machine: Machine, how: Distribution = "dynamic") -> float:
        """Returns how long a run takes."""
        return self.between + sum(call.seconds(threads, machine, how) for call in self.calls)

    def speedup(self, threads: int, machine: Machine, how: Distribution = "dynamic") -> float:
        """Returns the seconds on one thread over those on several."""
        return self.seconds(1, machine) / self.seconds(threads, machine, how)

    def efficiency(self, threads: int, machine: Machine, how: Distribution = "dynamic") -> float:
        """Returns the share of the threads' time that is needed."""
        return self.speedup(threads, machine, how) / threads

    def shared(self, threads: int, cpus: int) -> float:
        """Returns how long a run takes on more threads than there are CPUs, memory and launches left aside."""
        loops = sum(shared_seconds(loop[threads], cpus) for call in self.calls for loop in call.loops)
        return self.between + sum(call.serial for call in self.calls) + loops

    def busy(self, cut: int) -> float:
        """Returns the seconds of all threads together if loops are cut in so many parts."""
        alone = self.between + sum(call.serial for call in self.calls)
        return alone + sum(sum(loop[cut]) for call in self.calls for loop in call.loops)

    def by_function(self) -> dict[str, Program]:
        """Returns the calls of each function by name, the longest on one thread first."""
        found: dict[str, list[Call]] = {}
        for call in self.calls:
            found.setdefault(call.name, []).append(call)
        programs = {name: Program(tuple(calls)) for name, calls in found.items()}
        return dict(sorted(programs.items(), key=lambda item: -item[1].busy(1)))


def together(programs: Iterable[Program]) -> Program:
    """Returns programs that run one after the other as one."""
    kept = tuple(programs)
    return Program(tuple(call for program in kept for call in program.calls), sum(p.between for p in kept))
