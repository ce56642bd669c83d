"""The results in a database of tuned schedules, with the tasks for which nothing was found."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.tuned.database import Record
    from harness.tuned.trials import Conditions, Trial


@dataclass(frozen=True)
class TuningRecord:
    """A task of the search.

    Attributes:
        task: Its key.
        default_seconds: Time of the default schedule, None if it was never measured.
        seconds: Time of the best schedule; None where nothing was found over the default.
        schedule: Its decisions; empty where nothing was found.
        torch_seconds: Time of PyTorch, None if it was not measured.
        trials: Schedules that were tried; `rejected` of them gave wrong results, `failed` crashed or hung.
    """

    task: str
    default_seconds: float | None
    seconds: float | None
    schedule: str
    torch_seconds: float | None
    trials: int
    rejected: int
    failed: int

    @property
    def gain(self) -> float | None:
        """How many times as fast as the default schedule, None where nothing was found."""
        return self.default_seconds / self.seconds if self.default_seconds and self.seconds else None


@dataclass(frozen=True)
class TuningResults:
    """Everything that was found under the same conditions.

    Attributes:
        where: CPU, threads, version of TVM; and when, if anything was found.
        records: What was found, the largest gain first, then the tasks where nothing was.
    """

    where: str
    records: tuple[TuningRecord, ...]

    @property
    def found(self) -> tuple[TuningRecord, ...]:
        """The tasks with something better than the default."""
        return tuple(record for record in self.records if record.gain is not None)


@dataclass(frozen=True)
class Tuning:
    """A database.

    Attributes:
        folder: Its name.
        results: One for each processor, number of threads and version of TVM.
    """

    folder: str
    results: tuple[TuningResults, ...]


def read_tuning(folder: Path) -> Tuning:
    """Reads a database: what is kept of it, and the trials where they lie beside it.

    Raises:
        HarnessError: There is none, or it is damaged.
    """
    from harness.tuned.database import open_database
    from harness.tuned.trials import read_trials

    records, (trials, _) = open_database(folder).records, read_trials(folder)
    every: dict[Conditions, None] = dict.fromkeys(entry.conditions for entry in records)
    every |= dict.fromkeys(trial.conditions for trial in trials)
    return Tuning(
        folder.resolve().name,
        tuple(
            _results(
                conditions,
                [record for record in records if record.conditions == conditions],
                [trial for trial in trials if trial.conditions == conditions],
            )
            for conditions in every
        ),
    )


def _results(conditions: Conditions, records: Sequence[Record], trials: Sequence[Trial]) -> TuningResults:
    found = [_found(record) for record in records]
    known = {record.task for record in records}
    for task in dict.fromkeys(trial.task for trial in trials if trial.task not in known):
        found.append(_nothing_found(task, [trial for trial in trials if trial.task == task]))
    found.sort(key=lambda entry: (-(entry.gain or 0), entry.task))
    machines = ", ".join(dict.fromkeys(record.machine for record in records))
    dates = sorted(record.date for record in records)
    when = f", {dates[0][:10]}" if dates else ""
    when += f" to {dates[-1][:10]}" if dates and dates[0][:10] != dates[-1][:10] else ""
    where = f"{machines or conditions.cpu} ({conditions.cpu}), {conditions.threads} threads, TVM {conditions.tvm}{when}"
    return TuningResults(where, tuple(found))


def _found(record: Record) -> TuningRecord:
    schedule = ", ".join(f"{name} {value}" for name, value in sorted(record.schedule.items()))
    counts = record.trials, record.rejected, record.failed
    return TuningRecord(record.task, record.default_seconds, record.seconds, schedule, record.torch_seconds, *counts)


def _nothing_found(task: str, trials: Sequence[Trial]) -> TuningRecord:
    from harness.tuned.trials import Kind

    kinds = [trial.kind for trial in trials]
    defaults = [trial.default_seconds for trial in trials if trial.kind is Kind.MEASURED]
    return TuningRecord(
        task,
        statistics.median(defaults) if defaults else None,
        None,
        "",
        next((trial.torch_seconds for trial in trials if trial.torch_seconds is not None), None),
        len(trials),
        kinds.count(Kind.REJECTED),
        kinds.count(Kind.FAILED),
    )
