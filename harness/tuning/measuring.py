"""Measuring: a compiled task as plain data, and the timing of several of them side by side.

A program lists the functions of a library that are called, one after the other, and their tensors. It needs no virtual
machine of TVM, so the same few calls work in this process and over RPC.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import tvm

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Step:
    """One call of a compiled function, which adds its result to the values.

    Attributes:
        function: Name of the function in the library; its last argument is its result.
        arguments: Numbers of the values that the function reads.
        shape: Shape of the result.
        dtype: Element type of the result.
    """

    function: str
    arguments: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Program:
    """A compiled task.

    The values are numbered: first the arrays that the program is given, then the results of `load`, then of `run`.

    Attributes:
        library: The shared library.
        load: The calls that depend on weights alone; they are made once and are not timed.
        run: The calls that are timed.
        result: Number of the value that is the program's result.
    """

    library: Path
    load: tuple[Step, ...]
    run: tuple[Step, ...]
    result: int


@dataclass(frozen=True)
class Rounds:
    """The rounds of a measurement; each program takes a turn in each round.

    Attributes:
        count: Number of rounds.
        least_seconds: Least duration of a turn; a turn has one call at least.
        give_up: Once all other programs take this many times as long as the first one, no further round begins.
    """

    count: int = 3
    least_seconds: float = 0.02
    give_up: float = math.inf


@dataclass(frozen=True)
class RunResult:
    """The times and the result of one program.

    Attributes:
        seconds: Time of one call, in each round.
        result: The result that the program computed.
    """

    seconds: tuple[float, ...]
    result: Array

    @property
    def median(self) -> float:
        """Median time of the rounds."""
        return float(np.median(self.seconds))


_MOST_CALLS = 10_000
"""Largest number of calls in one turn."""
_LONG_SECONDS = 0.1
"""Calls that take longer are timed with the clock of this process, also over RPC, because an evaluator calls twice."""


class RunError(Exception):
    """A program that crashed, hung or raised an error; the message is one sentence."""


class Runner(Protocol):
    """Runs compiled programs on this machine or on others; it builds nothing."""

    def run(self, programs: Sequence[Program], arrays: Sequence[Path], rounds: Rounds) -> list[RunResult]:
        """Runs programs side by side; they take turns, in an order that rotates from round to round.

        Args:
            programs: Programs that take the same arrays.
            arrays: Files of NumPy (.npy) with the values that each program begins with, in order.
            rounds: The rounds of the measurement.

        Raises:
            RunError: A program crashed, hung or raised an error; the runner can be used again.
            HarnessError: There is no machine to run on.
        """


def run_interleaved(
    libraries: Sequence[Any],
    device: tvm.runtime.Device,
    programs: Sequence[Program],
    arrays: Sequence[Array],
    rounds: Rounds,
) -> list[RunResult]:
    """Runs programs whose libraries are loaded, in this process or in the process of an RPC server.

    Args:
        libraries: The loaded module of each program.
        device: The device of the tensors.
        programs: The programs.
        arrays: The values that each program begins with.
        rounds: The rounds of the measurement.
    """
    import tvm

    given = [tvm.runtime.tensor(array, device) for array in arrays]
    turns = [
        _turn(library, device, program, list(given), rounds)
        for library, program in zip(libraries, programs, strict=True)
    ]
    seconds: list[list[float]] = [[] for _ in turns]
    for n in range(rounds.count):
        for m in range(len(turns)):
            at = (n + m) % len(turns)
            seconds[at].append(turns[at][0]())
        if all(times[-1] > rounds.give_up * seconds[0][-1] for times in seconds[1:]) and len(turns) > 1:
            break
    return [RunResult(tuple(times), result()) for times, (_, result) in zip(seconds, turns, strict=True)]


def _turn(
    library: Any, device: tvm.runtime.Device, program: Program, values: list[Any], rounds: Rounds
) -> tuple[Callable[[], float], Callable[[], Array]]:
    """Runs a program once; returns a function that times one turn of it, and one that fetches its result."""
    import tvm

    def call(step: Step) -> tuple[Any, ...]:
        result = tvm.runtime.empty(step.shape, step.dtype, device)
        arguments = (*(values[number] for number in step.arguments), result)
        library[step.function](*arguments)
        values.append(result)
        return arguments

    for step in program.load:
        call(step)
    start = time.perf_counter()
    steps = [(step, call(step)) for step in program.run]
    device.sync()
    first = time.perf_counter() - start

    def fetch() -> Array:
        return np.array(values[program.result].numpy())

    if first >= _LONG_SECONDS:

        def once_again() -> float:
            start = time.perf_counter()
            for step, arguments in steps:
                library[step.function](*arguments)
            device.sync()
            return time.perf_counter() - start

        return once_again, fetch
    number = 1
    # Each use of an evaluator begins with a call that is not timed.
    if first < rounds.least_seconds:
        once = [library.time_evaluator(step.function, device, number=1)(*arguments).mean for step, arguments in steps]
        number = max(1, math.ceil(rounds.least_seconds / max(sum(once), 1e-9)))
    timed = [
        (library.time_evaluator(step.function, device, number=min(number, _MOST_CALLS)), arguments)
        for step, arguments in steps
    ]
    return lambda: sum(float(evaluate(*arguments).mean) for evaluate, arguments in timed), fetch
