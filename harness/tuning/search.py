"""The search: one loop over the schedules of a component's kernels, each measured in another process.

The record of a kernel says how many schedules were tried since its best one was found, in an order that follows from
that one: so a search that was ended in any way goes on where it was.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

import numpy as np

from harness.compiler.schedules import Schedule
from harness.compiler.schedules.cpu.schedule import Workload, distance, space
from harness.compiler.schedules.cpu.tile import VectorUnit, vector_unit
from harness.compiler.targets import TARGETS
from harness.compiler.tuned.database import Database, Record, current_conditions
from harness.core.errors import HarnessError
from harness.core.files import lock_folder
from harness.core.machine import describe_machine
from harness.core.outcome import VerdictKind
from harness.core.processes.timed_calls import CallError, TimedCalls
from harness.core.processors import THIS_MACHINE, Processors
from harness.parity.verdict import judge, judge_by_gate
from harness.tuning.kernels import Run, build

BATCH = 8
"""Number of trials of a kernel after which the next kernel is chosen."""
LEAST_GAIN = 0.01
"""Smaller gains, as a share of the other schedule's time, are taken for noise."""
LIMIT_SECONDS = 120.0
"""Time limit of one measurement, builds included; most take one second."""
_LEAST_ROUNDS, _ROUNDS = 3, 11
"""Rounds after which a schedule is given up that has not been the fastest once, and rounds of the others."""
_TURN_SECONDS = 0.03
_CONFIRMATIONS = 3
"""Number of measurements, each with new memory: its addresses can slow one side down by a third (measured)."""
_GUESSED_RATE = 5e10
"""Multiply-adds per second that are assumed of a kernel before it was measured."""
_PATIENCE = 24
"""Number of trials without progress after which half the gain is expected."""

Build = Callable[[Workload, Schedule, str], Run]
"""Compiles a workload with a schedule for TVM's target, as `harness.tuning.kernels.build` does."""


def measure(build: Build, workload: Workload, target: str, schedules: Sequence[Schedule]) -> list[list[float]]:
    """Times schedules in turns, and holds the last one to the result of the first.

    Args:
        build: Compiles a schedule.
        workload: The workload.
        target: TVM's target, as text.
        schedules: The default one first, the candidate last.

    Returns:
        Seconds of one call in each round, for each schedule; few rounds if the candidate is not the fastest.

    Raises:
        HarnessError: The candidate is the fastest and its result is wrong.
    """
    runs = [build(workload, schedule, target) for schedule in schedules]
    numbers = [max(1, int(_TURN_SECONDS / _seconds(run, 1))) for run in runs]
    times: list[list[float]] = [[] for _ in runs]
    for n in range(_ROUNDS):
        for m in range(len(runs)):
            at = (n + m) % len(runs)
            times[at].append(_seconds(runs[at], numbers[at]))
        if n + 1 == _LEAST_ROUNDS and min(map(min, times)) < min(times[-1]):
            return times
    actual, expected = {"result": runs[-1]().numpy()}, {"result": runs[0]().numpy()}
    if workload.dtype == "float32":
        verdict = judge_by_gate(actual, expected, expected)[0]
    else:
        # Rounding of weights in an attention follows from their blocking: strict would be too strict.
        exact = build(replace(workload, dtype="float32"), {}, target)().numpy()  # type: ignore[type-var]
        verdict = judge(actual, expected, {"result": exact.astype(np.float64)}, by_oracle=True)[0]
    if verdict.kind not in (VerdictKind.STRICT, VerdictKind.ORACLE):
        raise HarnessError(f"its result is wrong: {verdict.reason}")
    return times


def _seconds(run: Run, number: int) -> float:
    start = time.perf_counter()
    for _ in range(number):
        run()
    return (time.perf_counter() - start) / number


def is_faster(candidate: Sequence[float], other: Sequence[float]) -> bool:
    """Returns whether a candidate that took turns with another program is faster than it by more than the noise.

    The ratio of each round must be below 1 in three quarters of the rounds, and both their median and the ratio of the
    medians below it by `LEAST_GAIN` at least.
    """
    ratios = sorted(a / b for a, b in zip(candidate, other, strict=True))
    upper = ratios[min(len(ratios) - 1, (3 * len(ratios)) // 4)]
    medians = statistics.median(candidate) / statistics.median(other)
    return max(statistics.median(ratios), medians) < 1 - LEAST_GAIN and upper < 1


def candidates(workload: Workload, unit: VectorUnit, best: Schedule) -> list[Schedule]:
    """Returns all schedules but the default and the best one, those that have most in common with the best one first.

    Args:
        workload: The workload.
        unit: The target's vector registers.
        best: The best schedule so far; empty for the default.
    """
    default, *others = space(workload, unit)
    centre = best or default
    random.Random(workload.key).shuffle(others)
    others.sort(key=lambda schedule: distance(schedule, centre))
    return [schedule for schedule in others if schedule != centre]


@dataclass(frozen=True)
class Trial:
    """A schedule that was tried.

    Attributes:
        task: Key of the kernel's workload.
        record: The kernel's record after it; None if the default schedule cannot be measured.
        is_better: Whether the record is of this schedule.
        failure: A sentence if it crashed, hung or gave a wrong result; empty otherwise.
    """

    task: str
    record: Record | None
    is_better: bool = False
    failure: str = ""


def search(
    counts: Mapping[Workload, int],
    database: Database,
    processors: Processors = THIS_MACHINE,
    build: Build = build,
    limit: float = LIMIT_SECONDS,
) -> Generator[Trial]:
    """Tries schedules until all are tried or the caller stops; each trial is on disk before it is yielded.

    The next kernel is the one whose calls take longest, where every `_PATIENCE` trials without progress halve its time.

    Args:
        counts: How often each workload is computed.
        database: The records so far; its folder is there.
        processors: The processors to compile for.
        build: Compiles a schedule.
        limit: Time limit of one measurement in seconds.

    Raises:
        HarnessError: No kernel can be measured, or the database cannot be written, or another process writes it.
    """
    target = TARGETS[database.target].tvm_target(processors)
    unit, conditions = vector_unit(target), current_conditions(database.target, processors)
    found, left = database.found(processors), list(counts)
    machine = str(describe_machine()["cpu"])

    def worth(workload: Workload) -> float:
        record = found.get(workload.key)
        seconds = record.seconds if record else workload.multiplications / _GUESSED_RATE
        hope: float = 0.5 ** ((record.trials if record else 0) / _PATIENCE)
        return counts[workload] * seconds * hope

    with lock_folder(database.path, database.path / ".lock"), closing(TimedCalls()) as calls:
        while left:
            workload = max(left, key=worth)
            measured = partial(calls.call, measure, build, workload, str(target), seconds=limit)
            record = found.get(workload.key)
            if record is None:
                try:
                    seconds = statistics.median(measured(({},))[0])
                except CallError as error:
                    left.remove(workload)
                    failure = f"{workload.key} cannot be measured: {error}"
                    if not left and not found:
                        raise HarnessError(failure) from error
                    yield Trial(workload.key, None, failure=failure)
                    continue
                record = Record(workload.key, {}, conditions, seconds, seconds, 0, machine, _now())
            batch = candidates(workload, unit, record.schedule)[record.trials :][:BATCH]
            if not batch:
                left.remove(workload)
            for schedule in batch:
                better, failure = None, ""
                try:
                    better = _improved(record, schedule, measured)
                except CallError as error:
                    failure = f"{workload.key} with {dict(schedule)}: {error}"
                record = better or replace(record, trials=record.trials + 1)
                found[workload.key] = record
                database = database.store(record)
                yield Trial(workload.key, record, better is not None, failure)
                if better is not None:
                    break


def _improved(record: Record, schedule: Schedule, measured: Callable[..., list[list[float]]]) -> Record | None:
    """Returns the record of a schedule with the least gain of several measurements; None if one of them shows none."""
    records = []
    for _ in range(_CONFIRMATIONS):
        *others, own = measured(({}, record.schedule, schedule) if record.schedule else ({}, schedule))
        if not all(is_faster(own, other) for other in others):
            return None
        seconds, default_seconds = statistics.median(own), statistics.median(others[0])
        one = replace(record, schedule=dict(schedule), seconds=seconds, default_seconds=default_seconds)
        records.append(replace(one, trials=0, date=_now()))
    return min(records, key=lambda one: one.gain)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
