"""Measuring candidates of MetaSchedule: how fast, and whether right; hopeless ones are not timed twice."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from harness.core.outcome import VerdictKind
from harness.parity.metrics import ATOL, RTOL
from harness.parity.verdict import judge
from harness.tuning.measuring import Program, Ran, Rounds, RunError, Runner
from harness.tuning.worker import Worker

Array = npt.NDArray[Any]

_ROUNDS = Rounds(3, 0.02)
_HOPELESS = 1.2
"""A candidate that takes so much longer than the best one is not timed again."""


@dataclass(frozen=True)
class Measured:
    """What became of a candidate.

    Attributes:
        seconds: Of one call, by round; empty if it did not run to its end.
        failure: Why it did not run, in one line.
        fault: Why its result is wrong, in one line.
    """

    seconds: tuple[float, ...] = ()
    failure: str = ""
    fault: str = ""

    @property
    def median(self) -> float:
        """Median of the rounds; infinite unless it ran and was right."""
        return float(np.median(self.seconds)) if self.seconds and not self.fault else math.inf


class Measurer(Protocol):
    """Runs candidates of one task somewhere."""

    def measure(
        self, programs: Sequence[Program], arrays: Sequence[Path], expected: Path, best: float
    ) -> Iterator[Measured]:
        """Measures programs, in order.

        Args:
            programs: The candidates.
            arrays: Files of NumPy with their inputs.
            expected: File of NumPy with the right result.
            best: Seconds of the best candidate so far; infinite before the first.
        """

    def close(self) -> None:
        """Ends its workers."""


class LocalMeasurer:
    """Runs candidates in a worker process, with every thread, one after the other."""

    def __init__(self) -> None:
        self._worker = Worker()

    def measure(
        self, programs: Sequence[Program], arrays: Sequence[Path], expected: Path, best: float
    ) -> Iterator[Measured]:
        """See `Measurer`."""
        for program in programs:
            measured = self._measure(program, arrays, expected, best)
            best = min(best, measured.median)
            yield measured

    def reference(self, program: Program, arrays: Sequence[Path], expected: Path, seconds: float) -> float:
        """Writes a program's result to a file; its time, seconds.

        Raises:
            RunError: It failed.
        """
        paths = [str(path) for path in arrays]
        taken: float = self._worker.run(_write_result, program, paths, str(expected), seconds=seconds)
        return taken

    def _measure(self, program: Program, arrays: Sequence[Path], expected: Path, best: float) -> Measured:
        limit = 5.0 + (10 * best if math.isfinite(best) else 15.0)
        try:
            measured: Measured = self._worker.run(
                _measure, program, tuple(str(path) for path in arrays), str(expected), best, seconds=limit
            )
        except RunError as error:
            return Measured(failure=str(error))
        return measured

    def close(self) -> None:
        """Ends the worker."""
        self._worker.close()


class RemoteMeasurer:
    """Runs candidates with a runner that several threads may use at once, for instance on several machines."""

    def __init__(self, runner: Runner, at_once: int) -> None:
        """Make a measurer.

        Args:
            runner: Where they run.
            at_once: How many at the same time.
        """
        self._runner = runner
        self._pool = ThreadPoolExecutor(at_once)

    def measure(
        self, programs: Sequence[Program], arrays: Sequence[Path], expected: Path, best: float
    ) -> Iterator[Measured]:
        """See `Measurer`."""

        def one(program: Program) -> Measured:
            try:
                ran: Ran = self._runner.run([program], arrays, _ROUNDS)[0]
            except RunError as error:
                return Measured(failure=str(error))
            return Measured(ran.seconds, fault=fault(ran.result, np.load(expected, mmap_mode="r")))

        yield from self._pool.map(one, programs)

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(cancel_futures=True)


def fault(result: Array, expected: Array) -> str:
    """Why a result fails the strict gate against the expected one; empty if it passes."""
    if result.shape == expected.shape and result.dtype == expected.dtype == np.float32:
        # Most results pass: decide that without float64, a little more strictly than the gate.
        flat, right = result.reshape(-1), np.asarray(expected).reshape(-1)
        step = 1 << 16
        parts = (slice(start, start + step) for start in range(0, flat.size, step))
        if all(np.all(np.abs(flat[p] - right[p]) <= 0.99 * (ATOL + RTOL * np.abs(right[p]))) for p in parts):
            return ""
    oracle = expected.astype(np.float64) if expected.dtype.kind == "f" else np.asarray(expected)
    verdict = judge({"result": result}, {"result": np.asarray(expected)}, {"result": oracle}, max_r_rms=math.inf)[0]
    return "" if verdict.kind is VerdictKind.STRICT else verdict.reason


@lru_cache(maxsize=1)
def _tensors(arrays: tuple[str, ...]) -> tuple[Any, ...]:
    import tvm

    return tuple(tvm.runtime.tensor(np.load(path)) for path in arrays)


def _prepared(program: Program, arrays: tuple[str, ...]) -> tuple[Any, list[Any]]:
    """The function to time and its arguments, the result last."""
    import tvm

    library = tvm.runtime.load_module(str(program.library))
    values = list(_tensors(arrays))
    for step in program.load:
        values.append(tvm.runtime.empty(step.shape, step.dtype))
        library[step.function](*(values[number] for number in step.arguments), values[-1])
    (step,) = program.run
    result = tvm.runtime.empty(step.shape, step.dtype)
    return library[step.function], [*(values[number] for number in step.arguments), result]


def _measure(program: Program, arrays: tuple[str, ...], expected: str, best: float) -> Measured:
    """What the worker does for one candidate."""
    function, arguments = _prepared(program, arrays)
    seconds = _call(function, arguments, 1)
    wrong = fault(arguments[-1].numpy(), np.load(expected, mmap_mode="r"))
    if wrong or seconds > 2 * _HOPELESS * best:
        return Measured((seconds,), fault=wrong)
    number = max(1, math.ceil(_ROUNDS.least_seconds / max(seconds, 1e-6)))
    times: list[float] = []
    while len(times) < _ROUNDS.count and min(times, default=0.0) <= _HOPELESS * best:
        times.append(_call(function, arguments, number))
    return Measured(tuple(times))


def _call(function: Any, arguments: Sequence[Any], number: int) -> float:
    start = time.perf_counter()
    for _ in range(number):
        function(*arguments)
    return (time.perf_counter() - start) / number


def _write_result(program: Program, arrays: Sequence[str], expected: str) -> float:
    function, arguments = _prepared(program, tuple(arrays))
    seconds = _call(function, arguments, 1)
    np.save(expected, arguments[-1].numpy())
    return seconds
