"""The search: it chooses the next task and its next schedules, measures them, and decides what becomes a record.

All random choices follow from the seed and from the trials in the log. A search that was stopped therefore goes on as
if it had not been stopped.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from harness.core.errors import HarnessError
from harness.core.outcome import VerdictKind
from harness.files import temporary_folder
from harness.parity.verdict import judge
from harness.schedules import Schedule
from harness.schedules.cpu.schedule import distance, space
from harness.schedules.cpu.tile import VectorUnit
from harness.tuned.database import Record, store
from harness.tuned.trials import Conditions, Kind, Trial, append_trials
from harness.tuning.local import Builder, BuildError
from harness.tuning.measuring import Array, Program, Rounds, RunError, Runner, RunResult
from harness.tuning.tasks import Task, arrays_of

BATCH = 8
"""Number of trials after which the next task is chosen; an interruption loses as many at most."""
LEAST_GAIN = 0.01
"""Smaller gains, as a share of the default schedule's time, are taken for noise."""
_NEIGHBOURS = 6
"""Number of schedules in a batch that are next to the best one; the rest is drawn from the whole space."""
_TRYING = Rounds(3, 0.01, give_up=1.1)
_CONFIRMING = Rounds(11, 0.03)
_CONFIRMATIONS = 3
"""Number of confirmations, each with new memory: its addresses can slow one side down by a third (measured)."""
_GUESSED_RATE = 5e10
"""Multiply-adds per second that are assumed of a task before it was measured."""
_HOPE = 0.15
"""Gain that is expected of a task without trials."""
_PATIENCE = 24
"""Number of trials without progress after which half of that gain is expected."""
_LEAVING = 2.0
"""Factor by which another task must be worth more, because to prepare a task takes as long as several trials."""


@dataclass
class Progress:
    """The state of a task in a search.

    Attributes:
        task: The task.
        schedules: All schedules of the task, the default first.
        trials: All trials under these conditions, in order.
        record: The record in the database, if there is one.
        torch_seconds: PyTorch's time, if it is known.
        unmeasurable: The reason why the task cannot be measured at all, in a sentence; empty if it can.
    """

    task: Task
    schedules: Sequence[Mapping[str, int]]
    trials: list[Trial] = field(default_factory=list)
    record: Record | None = None
    torch_seconds: float | None = None
    unmeasurable: str = ""

    @property
    def tried(self) -> set[tuple[tuple[str, int], ...]]:
        """The schedules that need no further trial."""
        return {_frozen(trial.schedule) for trial in self.trials}

    @property
    def finished(self) -> bool:
        """Whether every schedule was tried, or the task cannot be measured."""
        return bool(self.unmeasurable) or len(self.tried) >= len(self.schedules)

    @property
    def default_seconds(self) -> float:
        """Median of the default schedule's times; NaN before the first one."""
        measured = [trial.default_seconds for trial in self.trials if math.isfinite(trial.default_seconds)]
        return statistics.median(measured) if measured else math.nan

    @property
    def best(self) -> Trial | None:
        """The fastest trial, where the longest measurement of each schedule counts; None before the first trial."""
        last: dict[tuple[tuple[str, int], ...], Trial] = {}
        for trial in self.trials:
            known = last.get(_frozen(trial.schedule))
            if known is None or trial.confirmed or not known.confirmed:
                last[_frozen(trial.schedule)] = trial
        return min(last.values(), key=lambda trial: trial.ratio, default=None)

    @property
    def best_ratio(self) -> float:
        """Time of the best schedule in units of the default's time; 1 if no schedule is better."""
        best = self.best
        return 1.0 if best is None else min(1.0, best.ratio)

    @property
    def worth(self) -> float:
        """An estimate of the seconds that further trials may save in one run of the components."""
        if self.finished:
            return 0.0
        seconds = self.default_seconds
        if math.isnan(seconds):
            seconds = self.task.workload.multiplications / _GUESSED_RATE
        since = len(self.trials) - self._last_progress
        hope: float = _HOPE * 0.5 ** (since / _PATIENCE)
        return self.task.calls * seconds * self.best_ratio * hope

    @property
    def _last_progress(self) -> int:
        """Number of the last trial that lowered the best ratio by more than the least gain; 0 if there is none."""
        lowest, at = 1.0, 0
        for number, trial in enumerate(self.trials, 1):
            if trial.ratio < lowest * (1 - LEAST_GAIN):
                lowest, at = trial.ratio, number
        return at

    def count(self, kind: Kind) -> int:
        """Returns the number of trials with an outcome."""
        return sum(trial.kind is kind for trial in self.trials)


def _frozen(schedule: Schedule) -> tuple[tuple[str, int], ...]:
    """Returns a schedule as a hashable value."""
    return tuple(sorted(schedule.items()))


def begin(
    tasks: Sequence[Task],
    unit: VectorUnit,
    conditions: Conditions,
    trials: Sequence[Trial] = (),
    records: Sequence[Record] = (),
) -> list[Progress]:
    """Returns the state of a search, with the trials and records of earlier searches under these conditions."""
    states = []
    for task in tasks:
        made = [trial for trial in trials if trial.task == task.key and trial.conditions == conditions]
        known = next(
            (record for record in records if record.task == task.key and record.conditions == conditions), None
        )
        torch_seconds = next((trial.torch_seconds for trial in made if trial.torch_seconds is not None), None)
        states.append(Progress(task, space(task.workload, unit), made, known, torch_seconds))
    return states


def next_task(states: Sequence[Progress]) -> Progress | None:
    """Returns the task of which further trials promise to save the most time; None if everything was tried."""
    best = max(states, key=lambda state: state.worth, default=None)
    return None if best is None or best.worth <= 0 else best


def next_schedules(state: Progress, count: int, seed: int) -> list[Mapping[str, int]]:
    """Chooses schedules: first the default and its neighbours, then the best one's and some from anywhere."""
    generator = random.Random(f"{seed} {state.task.key} {len(state.trials)}")
    tried = state.tried
    left = [schedule for schedule in state.schedules if _frozen(schedule) not in tried]
    default = state.schedules[0]
    chosen = [default] if _frozen(default) not in tried else []
    best = state.best
    centre = default if best is None or best.ratio >= 1.0 else best.schedule
    near = [schedule for schedule in left if distance(schedule, centre) == 1 and schedule is not default]
    generator.shuffle(near)
    chosen += near[: _NEIGHBOURS if state.trials else count]
    rest = [schedule for schedule in left if schedule not in chosen]
    return [*chosen, *generator.sample(rest, min(len(rest), max(0, count - len(chosen))))][:count]


@dataclass(frozen=True)
class Bench:
    """The tools of a search.

    Attributes:
        builder: Compiles candidates.
        runner: Runs candidates.
        torch: Takes a task and the files of its arrays; returns PyTorch's seconds, None if it runs on another machine
            than the candidates, and its result in float64.
        conditions: Conditions of the measurements.
        folder: Folder of the database.
        machine: Model of the processor.
        seed: Seed of candidates and inputs.
    """

    builder: Builder
    runner: Runner
    torch: Callable[[Task, Sequence[Path]], tuple[float | None, Array]]
    conditions: Conditions
    folder: Path
    machine: str
    seed: int = 0


class _UnmeasurableTask(Exception):
    """The default schedule of a task has no time to compare with; the message is a sentence."""


class PreparedTask:
    """A task that can be measured: its arrays are on disk, the default schedule is compiled, the results are known."""

    def __init__(self, bench: Bench, state: Progress, folder: Path) -> None:
        """Prepares a task.

        Raises:
            _UnmeasurableTask: The default schedule cannot be built or run, or PyTorch cannot compute the same.
            HarnessError: There is no machine to run on, or no space for the arrays.
        """
        self._bench, self._state, self._folder = bench, state, folder
        self._count = 0
        self._arrays = []
        for number, array in enumerate(arrays_of(state.task.workload, bench.seed)):
            path = folder / f"{number}.npy"
            _save(path, array)
            self._arrays.append(path)
        try:
            self._default = self._build({})
            self._expected = bench.runner.run([self._default], self._arrays, Rounds(1, 0.0))[0].result
            seconds, self._exact = bench.torch(state.task, self._arrays)
        except (BuildError, RunError) as error:
            raise _UnmeasurableTask(f"{state.task.key} cannot be measured: {error}") from error
        state.torch_seconds = state.torch_seconds or seconds

    def trial(self, schedule: Schedule, *, rounds: Rounds = _TRYING, against: Record | None = None) -> Trial:
        """Builds, runs and judges one schedule, which takes turns with the default one.

        Args:
            schedule: A complete schedule.
            rounds: The rounds of the measurement.
            against: A record that the schedule must beat too, or its trial is not `confirmed`.
        """
        state, bench = self._state, self._bench
        torch_seconds = state.torch_seconds if not state.trials else None
        base = Trial(state.task.key, dict(schedule), Kind.FAILED, bench.conditions, torch_seconds=torch_seconds)
        programs = [self._default]
        try:
            programs.append(self._build(schedule))
            if against is not None and _frozen(against.schedule) != _frozen(schedule):
                programs.append(self._build(against.schedule))
            ran = bench.runner.run(programs, self._arrays, rounds)
        except (BuildError, RunError) as error:
            return replace(base, reason=str(error))
        finally:
            for program in programs[1:]:
                program.library.unlink(missing_ok=True)
        kind, r_rms, reason = Kind.MEASURED, math.nan, ""
        # A schedule that is slower than the default is never used, and large results take long to judge.
        default_seconds, seconds = (_time(program, rounds) for program in ran[:2])
        if seconds <= default_seconds:
            kind, r_rms, reason = self._judge(ran[1].result)
        faster = all(is_faster(ran[1].seconds, other.seconds) for other in (ran[0], *ran[2:]))
        return replace(
            base,
            kind=kind,
            seconds=seconds,
            default_seconds=default_seconds,
            r_rms=r_rms,
            reason=reason,
            confirmed=rounds is _CONFIRMING and kind is Kind.MEASURED and faster,
        )

    def confirmation(self, schedule: Schedule, against: Record | None) -> Trial:
        """Measures one schedule for longer, several times and each time with new memory; the least gain counts.

        Args:
            schedule: A complete schedule.
            against: A record that the schedule must beat too.
        """
        trials = []
        for _ in range(_CONFIRMATIONS):
            trials.append(self.trial(schedule, rounds=_CONFIRMING, against=against))
            if not trials[-1].confirmed:
                return trials[-1]
        return max(trials, key=lambda trial: trial.ratio)

    def _judge(self, result: Array) -> tuple[Kind, float, str]:
        """Judges a result: outcome, error in units of the default schedule's, and reason of a rejection."""
        # Rounding of weights in an attention follows from their blocking, so that strict would be too strict.
        by_oracle = self._state.task.dtype != "float32"
        verdict = judge({"result": result}, {"result": self._expected}, {"result": self._exact}, by_oracle=by_oracle)[0]
        if verdict.kind in (VerdictKind.STRICT, VerdictKind.ORACLE):
            return Kind.MEASURED, verdict.r_rms, ""
        return Kind.REJECTED, verdict.r_rms, verdict.reason

    def _build(self, schedule: Schedule) -> Program:
        """Compiles the task with a schedule."""
        self._count += 1
        return self._bench.builder.build(self._state.task.workload, schedule, self._folder / f"{self._count}.so")


def _time(result: RunResult, rounds: Rounds) -> float:
    """Returns the median of many rounds, or the fastest of a few, because other processes only add to a time."""
    return result.median if rounds is _CONFIRMING else min(result.seconds)


def _save(path: Path, array: Array) -> None:
    """Writes an array.

    Raises:
        HarnessError: The file cannot be written.
    """
    try:
        np.save(path, array)
    except OSError as error:
        raise HarnessError(f"cannot write {path}: {error}; free some space or set TMPDIR to another folder") from error


def is_faster(candidate: Sequence[float], other: Sequence[float]) -> bool:
    """Returns whether a candidate that took turns with another program is faster than it by more than the noise.

    The ratio of each round with its neighbour must be below 1 in three quarters of the rounds, and both their median
    and the ratio of the medians below it by `LEAST_GAIN` at least.
    """
    ratios = sorted(a / b for a, b in zip(candidate, other, strict=True))
    upper = ratios[min(len(ratios) - 1, (3 * len(ratios)) // 4)]
    medians = statistics.median(candidate) / statistics.median(other)
    return max(statistics.median(ratios), medians) < 1 - LEAST_GAIN and upper < 1


@dataclass(frozen=True)
class Batch:
    """The outcome of a batch of trials.

    Attributes:
        state: The state of the task after the batch.
        trials: The trials.
        record: The new record, if there is one.
    """

    state: Progress
    trials: tuple[Trial, ...]
    record: Record | None


def search(
    states: Sequence[Progress],
    bench: Bench,
    go_on: Callable[[int], bool],
    on_trial: Callable[[Progress, Trial], None] = lambda state, trial: None,
) -> Iterator[Batch]:
    """Tries schedules, task by task and batch by batch; each batch is on disk before it is yielded.

    Args:
        states: States that `begin` returned; the search updates them.
        bench: The tools of the search.
        go_on: Takes the number of trials so far; tells whether there may be another.
        on_trial: The search calls it after each trial.

    Raises:
        HarnessError: No task can be measured at all, or the database cannot be written.
    """
    made = 0
    for known in states:
        _recover(known, bench)
    while go_on(made) and (state := next_task(states)) is not None:
        with temporary_folder("tune") as folder:
            try:
                prepared = PreparedTask(bench, state, Path(folder))
            except _UnmeasurableTask as error:
                state.unmeasurable = str(error)
                if all(other.unmeasurable for other in states):
                    raise HarnessError(state.unmeasurable) from error
                continue
            # The task stays prepared for as many batches as it is worth.
            while go_on(made):
                batch: list[Trial] = []
                try:
                    for schedule in next_schedules(state, BATCH, bench.seed):
                        if not go_on(made):
                            break
                        trial = prepared.trial(schedule)
                        batch.append(trial)
                        made += 1
                        state.trials.append(trial)
                        on_trial(state, trial)
                    confirming = _worth_confirming(state)
                    if confirming is not None:
                        trial = prepared.confirmation(confirming.schedule, state.record)
                        batch.append(trial)
                        state.trials.append(trial)
                finally:
                    # Trials that were made before Ctrl-C are kept too.
                    append_trials(bench.folder, batch)
                record = _record(state, batch[-1], bench) if batch and batch[-1].confirmed else None
                if record is not None:
                    store(bench.folder, bench.conditions.target, record, state.record)
                    state.record = record
                yield Batch(state, tuple(batch), record)
                following = next_task(states)
                if following is None or following.worth > _LEAVING * state.worth:
                    break


def _worth_confirming(state: Progress) -> Trial | None:
    """Returns the best trial, if it may become a record and has had no longer measurement yet."""
    best = state.best
    if best is None or best.confirmed or best.ratio >= 1 - LEAST_GAIN:
        return None
    if state.record is not None and _frozen(best.schedule) == _frozen(state.record.schedule):
        return None
    longer = [trial for trial in state.trials if _frozen(trial.schedule) == _frozen(best.schedule)]
    return best if len(longer) == 1 else None


def _record(state: Progress, trial: Trial, bench: Bench) -> Record:
    """Returns the record of a trial that was confirmed."""
    return Record(
        task=state.task.key,
        schedule=trial.schedule,
        conditions=bench.conditions,
        seconds=trial.seconds,
        default_seconds=trial.default_seconds,
        torch_seconds=state.torch_seconds,
        r_rms=trial.r_rms,
        trials=len(state.trials),
        failed=state.count(Kind.FAILED),
        rejected=state.count(Kind.REJECTED),
        machine=bench.machine,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seed=bench.seed,
    )


def _recover(state: Progress, bench: Bench) -> None:
    """Writes the record of a confirmed trial if the process was killed between the log and the database."""
    confirmed = [trial for trial in state.trials if trial.confirmed]
    if confirmed and (state.record is None or _frozen(state.record.schedule) != _frozen(confirmed[-1].schedule)):
        database = store(bench.folder, bench.conditions.target, _record(state, confirmed[-1], bench))
        known = (record for record in database.records if record.conditions == bench.conditions)
        state.record = next(record for record in known if record.task == state.task.key)
