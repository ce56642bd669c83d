"""Measures the parallel loops of a compiled program part by part, on one thread.

Seconds are those of the thread's processor time, and the least of some rounds: what other processes take is not
counted. Each loop is really run in so many parts, as by so many threads of TVM's pool (`perf/launching.py`), so that
nothing is divided by a number of tasks, which may differ, and what every thread does for itself, such as packing, is
counted for each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.runtime.loading import VirtualMachine
from perf.launching import Loop, launched_by
from perf.profiling import BUILTIN, argument_bytes
from perf.scaling import CUTS, Call, Program

_EMPTY_RUNS = 5


@dataclass
class _Measured:
    """One run with loops cut in `cut` parts: of each call its name, bytes, seconds alone, and seconds of the parts."""

    cut: int
    calls: list[tuple[str, int, float, list[list[float]]]] = field(default_factory=list)
    loops: list[list[float]] = field(default_factory=list)
    launched: float = 0.0
    began: float = 0.0
    within: float = 0.0

    def instrument(self, _function: Any, name: str, before: bool, _result: Any, *arguments: Any) -> None:
        """Is told of each call before and after it."""
        if name.startswith(BUILTIN):
            return
        if before:
            self.loops, self.launched, self.began = [], 0.0, time.thread_time()
            return
        seconds = time.thread_time() - self.began
        self.within += seconds
        self.calls.append((name, sum(map(argument_bytes, arguments)), max(0.0, seconds - self.launched), self.loops))

    def launch(self, loop: Loop) -> None:
        """Runs a loop and notes the seconds of its parts."""
        start = time.thread_time()
        run = loop.parts(self.cut)

        def timed(number: int) -> float:
            begun = time.thread_time()
            run(number)
            return time.thread_time() - begun

        # The part behind the last one has nothing to do; what is left is the cost of asking.
        empty = min(timed(self.cut) for _ in range(_EMPTY_RUNS))
        self.loops.append([max(0.0, timed(number) - empty) for number in range(self.cut)])
        self.launched += time.thread_time() - start


def measured_program(
    library: Path, machine: VirtualMachine, run: Callable[[], object], rounds: int, name: str = ""
) -> Program:
    """Measures every loop of one run in each of `CUTS` numbers of parts.

    Args:
        library: The library that the machine loaded.
        machine: Runs the program.
        run: Runs it once.
        rounds: Runs for each number of parts.
        name: Of the program; where it is one kernel, which the machine does not tell of, it is that kernel's.
    """
    runs: dict[int, list[_Measured]] = {}
    between = math.inf
    for _ in range(rounds):
        for cut in CUTS:
            measured = _Measured(cut)
            machine["set_instrument"](measured.instrument)
            with launched_by(library, measured.launch):
                start = time.thread_time()
                run()
                seconds = time.thread_time() - start
            if not measured.calls:
                measured.calls.append((name, 0, max(0.0, seconds - measured.launched), measured.loops))
                measured.within = seconds
            between = min(between, seconds - measured.within)
            runs.setdefault(cut, []).append(measured)
    machine["set_instrument"](lambda *_: None)
    return Program(tuple(_call(runs, number) for number in range(len(runs[1][0].calls))), max(0.0, between))


def _call(runs: dict[int, list[_Measured]], number: int) -> Call:
    name, moved, _, loops = runs[1][0].calls[number]
    serial = min(run.calls[number][2] for of_cut in runs.values() for run in of_cut)

    def least(cut: int, loop: int) -> tuple[float, ...]:
        return tuple(map(min, zip(*(run.calls[number][3][loop] for run in runs[cut]), strict=True)))

    return Call(name, serial, tuple({cut: least(cut, n) for cut in runs} for n in range(len(loops))), moved)
