"""Measuring: a compiled task as plain data, how to time several of them side by side, and where.

A program says which functions of a library to call, one after the other, on which tensors. Without TVM's virtual
machine the same few calls work in this process and over RPC alike.
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
    """One call of a compiled function; it adds its result to the values.

    Attributes:
        function: Name of the function in the library; its last argument is its result.
        arguments: Numbers of the values that it reads.
        shape, dtype: Of its result.
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
        load: What depends on weights alone; done once and not timed.
        run: What is timed.
        result: Number of the value that is the program's result.
    """

    library: Path
    load: tuple[Step, ...]
    run: tuple[Step, ...]
    result: int


@dataclass(frozen=True)
class Rounds:
    """How to time: `count` rounds, in each of which every program takes its turn of `least_seconds` or one call.

    Once all programs take `give_up` times as long as the first one, no further round begins.
    """

    count: int = 3
    least_seconds: float = 0.02
    give_up: float = math.inf


@dataclass(frozen=True)
class Ran:
    """What became of one program.

    Attributes:
        seconds: Of one call, by round.
        result: What the program computes.
    """

    seconds: tuple[float, ...]
    result: Array

    @property
    def median(self) -> float:
        """Median of the rounds."""
        return float(np.median(self.seconds))


_MOST_CALLS = 10_000
"""Calls of one turn at most."""
_LONG_SECONDS = 0.1
"""From which on the clock of this process will do, also for a call over RPC: an evaluator would run it twice."""


class RunError(Exception):
    """A program that crashed, hung or raised; the message is one sentence."""


class Runner(Protocol):
    """Runs compiled programs somewhere; it builds nothing."""

    def run(self, programs: Sequence[Program], arrays: Sequence[Path], rounds: Rounds) -> list[Ran]:
        """Runs programs side by side, their rounds interleaved and the order rotated.

        Args:
            programs: Alternatives that take the same arrays.
            arrays: Files of NumPy (.npy) with the values that each program begins with, in order.
            rounds: How to time.

        Raises:
            RunError: A program crashed, hung or raised; the runner can be used again.
            HarnessError: There is nothing to run on.
        """


def interleaved(
    libraries: Sequence[Any],
    device: tvm.runtime.Device,
    programs: Sequence[Program],
    arrays: Sequence[Array],
    rounds: Rounds,
) -> list[Ran]:
    """Runs programs whose libraries are loaded, in this process or in that of an RPC server.

    Args:
        libraries: The loaded module of each program.
        device: Where the tensors go.
        programs: The programs.
        arrays: What each begins with.
        rounds: How to time.
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
    return [Ran(tuple(times), result()) for times, (_, result) in zip(seconds, turns, strict=True)]


def _turn(
    library: Any, device: tvm.runtime.Device, program: Program, values: list[Any], rounds: Rounds
) -> tuple[Callable[[], float], Callable[[], Array]]:
    """What times one turn of a program, which has been run once, and what fetches its result."""
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
