"""Searches the schedules of a component's kernels in one loop, and measures each in another process.

The record of a kernel has the number of schedules tried since its best one, in an order that follows from the best one,
so that an interrupted search continues.
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
from harness.compiler.tuned.database import FILE, Database, Record, current_conditions
from harness.core.errors import HarnessError
from harness.core.files import lock_folder, remove_temporary_files
from harness.core.machine import describe_machine
from harness.core.processes.timed_calls import CallError, TimedCalls
from harness.core.processors import THIS_MACHINE, Processors
from harness.parity.references import Reference
from harness.parity.verdict import judge, judge_by_gate
from harness.tuning.kernels import Run, build

BATCH = 8
"""Number of trials of a kernel after which the next kernel is chosen."""
LEAST_GAIN = 0.01
"""Gains below this share of the other schedule's time count as noise."""
LIMIT_SECONDS = 120.0
"""Time limit of one measurement, builds included; most take one second."""
_LEAST_ROUNDS, _ROUNDS = 3, 11
"""Number of rounds after which a schedule that never was the fastest is rejected, and of all rounds."""
_TURN_SECONDS = 0.03
_CONFIRMATIONS = 3
"""Number of measurements, each with new memory, whose addresses can slow one side down by a third (measured)."""
_GUESSED_RATE = 5e10
"""Assumed multiply-adds per second of a kernel without a measurement."""
_PATIENCE = 24
"""Number of trials without progress that halve the expected gain."""

Build = Callable[[Workload, Schedule, str], Run]
"""Compiles a workload with a schedule for TVM's target, as `harness.tuning.kernels.build` does."""


def measure(build: Build, workload: Workload, target: str, schedules: Sequence[Schedule]) -> list[list[float]]:
    """Times schedules in turns, and compares the result of the last with that of the first.

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
            index = (n + m) % len(runs)
            times[index].append(_seconds(runs[index], numbers[index]))
        if n + 1 == _LEAST_ROUNDS and min(map(min, times)) < min(times[-1]):
            return times
    actual, expected = {"result": runs[-1]().numpy()}, {"result": runs[0]().numpy()}
    if workload.dtype == "float32":
        verdict = judge_by_gate(actual, Reference.from_run(expected))[0]
    else:
        # Rounding of weights in an attention follows from their blocking: strict would be too strict.
        exact = build(replace(workload, dtype="float32"), {}, target)().numpy()
        verdict = judge(actual, Reference.from_run(expected, {"result": exact.astype(np.float64)}), by_oracle=True)[0]
    if not verdict.kind.passes:
        raise HarnessError(f"its result is wrong: {verdict.reason}")
    return times


def _seconds(run: Run, number: int) -> float:
    start = time.perf_counter()
    for _ in range(number):
        run()
    return (time.perf_counter() - start) / number


def is_faster(candidate: Sequence[float], reference: Sequence[float]) -> bool:
    """Returns whether a candidate is faster than a reference, timed in turns, by more than the noise.

    Three quarters of the rounds' ratios must be below 1, and both their median and the ratio of the medians below 1 by
    at least `LEAST_GAIN`.
    """
    ratios = sorted(a / b for a, b in zip(candidate, reference, strict=True))
    upper = ratios[min(len(ratios) - 1, (3 * len(ratios)) // 4)]
    medians = statistics.median(candidate) / statistics.median(reference)
    return max(statistics.median(ratios), medians) < 1 - LEAST_GAIN and upper < 1


def candidates(workload: Workload, unit: VectorUnit, best: Schedule) -> list[Schedule]:
    """Returns all schedules but the default and the best one, in the order of their distance from the best.

    Args:
        workload: The workload.
        unit: The target's vector registers.
        best: The best schedule so far; empty for the default.
    """
    default, *alternatives = space(workload, unit)
    centre = best or default
    random.Random(workload.key).shuffle(alternatives)
    alternatives.sort(key=lambda schedule: distance(schedule, centre))
    return [schedule for schedule in alternatives if schedule != centre]


@dataclass(frozen=True)
class Trial:
    """A schedule that was tried, and its result.

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
    """Tries schedules until all are tried or the caller stops; writes each trial to disk before it yields it.

    The next kernel is the one whose calls take longest, with its time halved for every `_PATIENCE` trials without
    progress.

    Args:
        counts: Number of calls of each workload.
        database: The records so far; its folder is there.
        processors: The processors to compile for.
        build: Compiles a schedule.
        limit: Time limit of one measurement in seconds.

    Raises:
        HarnessError: No kernel can be measured, the database cannot be written, or another process writes it.
    """
    target = TARGETS[database.target].tvm_target(processors)
    unit, conditions = vector_unit(target), current_conditions(database.target, processors)
    records, remaining = database.matching_records(processors), list(counts)
    machine = str(describe_machine()["cpu"])

    def expected_gain(workload: Workload) -> float:
        record = records.get(workload.key)
        seconds = record.seconds if record else workload.multiplications / _GUESSED_RATE
        probability: float = 0.5 ** ((record.trials if record else 0) / _PATIENCE)
        return counts[workload] * seconds * probability

    with lock_folder(database.path, database.path / ".lock"), closing(TimedCalls()) as calls:
        remove_temporary_files([database.path / FILE])
        while remaining:
            workload = max(remaining, key=expected_gain)
            measure_candidate = partial(calls.call, measure, build, workload, str(target), seconds=limit)
            record = records.get(workload.key)
            if record is None:
                try:
                    seconds = statistics.median(measure_candidate(({},))[0])
                except CallError as error:
                    remaining.remove(workload)
                    failure = f"{workload.key} cannot be measured: {error}"
                    if not remaining and not records:
                        raise HarnessError(failure) from error
                    yield Trial(workload.key, None, failure=failure)
                    continue
                record = Record(workload.key, {}, conditions, seconds, seconds, 0, machine, _timestamp())
            batch = candidates(workload, unit, record.schedule)[record.trials :][:BATCH]
            if not batch:
                remaining.remove(workload)
            for schedule in batch:
                better, failure = None, ""
                try:
                    better = _confirm(record, schedule, measure_candidate)
                except CallError as error:
                    failure = f"{workload.key} with {dict(schedule)}: {error}"
                record = better or replace(record, trials=record.trials + 1)
                records[workload.key] = record
                database = database.store(record)
                yield Trial(workload.key, record, better is not None, failure)
                if better is not None:
                    break


def _confirm(record: Record, schedule: Schedule, measure_candidate: Callable[..., list[list[float]]]) -> Record | None:
    """Returns the record of a schedule with the least gain of several measurements; None if one shows no gain."""
    records = []
    for _ in range(_CONFIRMATIONS):
        *reference_times, candidate_times = measure_candidate(
            ({}, record.schedule, schedule) if record.schedule else ({}, schedule)
        )
        if not all(is_faster(candidate_times, times) for times in reference_times):
            return None
        seconds, default_seconds = statistics.median(candidate_times), statistics.median(reference_times[0])
        confirmed = replace(record, schedule=dict(schedule), seconds=seconds, default_seconds=default_seconds)
        records.append(replace(confirmed, trials=0, date=_timestamp()))
    return min(records, key=lambda confirmed: confirmed.gain)


def _timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
