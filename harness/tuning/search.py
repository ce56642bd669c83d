"""The search: which task next, which schedules of it next, what counts as found; and the state that a log brings back.

Nothing here is random but by the seed: a search that was stopped goes on where another would have come to.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from harness.core.errors import HarnessError
from harness.core.outcome import VerdictKind
from harness.parity.verdict import judge
from harness.schedules import Schedule
from harness.schedules.cpu.schedule import distance, space
from harness.schedules.cpu.tile import VectorUnit
from harness.tuning.database import Record, store
from harness.tuning.local import Builder, BuildError
from harness.tuning.measuring import Array, Program, Ran, Rounds, RunError, Runner
from harness.tuning.tasks import Task, arrays_of
from harness.tuning.trials import Kind, Place, Trial, append_trials

BATCH = 8
"""Trials between two looks at which task is worth the most; also what an interruption can lose."""
LEAST_GAIN = 0.01
"""Share of the default schedule's time below which a gain is noise whatever the rounds say."""
_NEIGHBOURS = 6
"""Of a batch, the rest is drawn from everywhere."""
_TRYING = Rounds(3, 0.01, give_up=1.1)
_CONFIRMING = Rounds(11, 0.03)
_CONFIRMATIONS = 3
"""Where its memory happens to lie can slow one side down by a third for as long as it lies there; measured."""
_GUESSED_RATE = 5e10
"""Multiply-adds per second, as long as a task was never run."""
_HOPE = 0.15
"""Gain that a task without trials is taken to have in it."""
_PATIENCE = 24
"""Trials without progress after which half of the hope is gone."""
_LEAVING = 2.0
"""How much more another task must be worth: to prepare a large one takes as long as several trials."""


@dataclass
class Progress:
    """What is known of a task.

    Attributes:
        task: The task.
        schedules: Its space, the default first.
        trials: All that were made here, in order.
        record: What the database has, if it has something.
        torch_seconds: PyTorch's time, if it is known.
        problem: Why it cannot be measured at all, in a sentence; empty if it can.
    """

    task: Task
    schedules: Sequence[Mapping[str, int]]
    trials: list[Trial] = field(default_factory=list)
    record: Record | None = None
    torch_seconds: float | None = None
    problem: str = ""

    @property
    def tried(self) -> set[tuple[tuple[str, int], ...]]:
        """The schedules that need no further trial."""
        return {_named(trial.schedule) for trial in self.trials}

    @property
    def finished(self) -> bool:
        """Whether every schedule was tried, or none can be."""
        return bool(self.problem) or len(self.tried) >= len(self.schedules)

    @property
    def default_seconds(self) -> float:
        """Median of what was measured of the default schedule; NaN before that."""
        measured = [trial.default_seconds for trial in self.trials if math.isfinite(trial.default_seconds)]
        return statistics.median(measured) if measured else math.nan

    @property
    def best(self) -> Trial | None:
        """The fastest trial, the longer measurement of a schedule before the shorter ones; None before the first."""
        last: dict[tuple[tuple[str, int], ...], Trial] = {}
        for trial in self.trials:
            known = last.get(_named(trial.schedule))
            if known is None or trial.confirmed or not known.confirmed:
                last[_named(trial.schedule)] = trial
        return min(last.values(), key=lambda trial: trial.ratio, default=None)

    @property
    def best_ratio(self) -> float:
        """Time of the best schedule in units of the default's; 1 if none is better."""
        best = self.best
        return 1.0 if best is None else min(1.0, best.ratio)

    @property
    def worth(self) -> float:
        """Seconds of one run of the components that further trials may save, as far as one can tell."""
        if self.finished:
            return 0.0
        seconds = self.default_seconds
        if math.isnan(seconds):
            seconds = self.task.problem.multiplications / _GUESSED_RATE
        since = len(self.trials) - self._last_progress
        hope: float = _HOPE * 0.5 ** (since / _PATIENCE)
        return self.task.calls * seconds * self.best_ratio * hope

    @property
    def _last_progress(self) -> int:
        """Number of trials when the best ratio fell by more than the least gain for the last time."""
        lowest, at = 1.0, 0
        for number, trial in enumerate(self.trials, 1):
            if trial.ratio < lowest * (1 - LEAST_GAIN):
                lowest, at = trial.ratio, number
        return at

    def count(self, kind: Kind) -> int:
        """Number of trials that ended in that way."""
        return sum(trial.kind is kind for trial in self.trials)


def _named(schedule: Schedule) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(schedule.items()))


def begin(
    tasks: Sequence[Task],
    unit: VectorUnit,
    place: Place,
    trials: Sequence[Trial] = (),
    records: Sequence[Record] = (),
) -> list[Progress]:
    """The state of a search, with what earlier ones left in this place."""
    states = []
    for task in tasks:
        made = [trial for trial in trials if trial.task == task.key and trial.place == place]
        known = next((record for record in records if record.task == task.key and record.place == place), None)
        torch_seconds = next((trial.torch_seconds for trial in made if trial.torch_seconds is not None), None)
        states.append(Progress(task, space(task.problem, unit), made, known, torch_seconds))
    return states


def next_task(states: Sequence[Progress]) -> Progress | None:
    """The task that further trials promise to save the most time of; None if everything was tried."""
    best = max(states, key=lambda state: state.worth, default=None)
    return None if best is None or best.worth <= 0 else best


def next_schedules(state: Progress, count: int, seed: int) -> list[Mapping[str, int]]:
    """Schedules to try: the default and what is next to it first, then next to the best, and some from anywhere."""
    generator = random.Random(f"{seed} {state.task.key} {len(state.trials)}")
    tried = state.tried
    left = [schedule for schedule in state.schedules if _named(schedule) not in tried]
    default = state.schedules[0]
    chosen = [default] if _named(default) not in tried else []
    best = state.best
    centre = default if best is None or best.ratio >= 1.0 else best.schedule
    near = [schedule for schedule in left if distance(schedule, centre) == 1 and schedule is not default]
    generator.shuffle(near)
    chosen += near[: _NEIGHBOURS if state.trials else count]
    rest = [schedule for schedule in left if schedule not in chosen]
    return [*chosen, *generator.sample(rest, min(len(rest), max(0, count - len(chosen))))][:count]


@dataclass(frozen=True)
class Bench:
    """What a search works with.

    Attributes:
        builder: Compiles candidates.
        runner: Runs them.
        torch: (task, files of its arrays) → PyTorch's seconds, None if it runs elsewhere, and its result in float64.
        place: Where that is.
        folder: The database.
        machine: The processor's model.
        seed: Of candidates and inputs.
    """

    builder: Builder
    runner: Runner
    torch: Callable[[Task, Sequence[Path]], tuple[float | None, Array]]
    place: Place
    folder: Path
    machine: str
    seed: int = 0


class _NotMeasurable(Exception):
    """A task that has no time to compare with; the message is a sentence."""


class Measured:
    """A task ready to be measured: its arrays on disk, the default schedule compiled, its result and the exact one."""

    def __init__(self, bench: Bench, state: Progress, folder: Path) -> None:
        """Prepare a task.

        Raises:
            _NotMeasurable: The default schedule cannot be built or run, or PyTorch cannot do the same.
            HarnessError: There is nothing to run on, or no space for its arrays.
        """
        self._bench, self._state, self._folder = bench, state, folder
        self._count = 0
        self._arrays = []
        for number, array in enumerate(arrays_of(state.task.problem, bench.seed)):
            path = folder / f"{number}.npy"
            _saved(path, array)
            self._arrays.append(path)
        try:
            self._default = self._built({})
            self._expected = bench.runner.run([self._default], self._arrays, Rounds(1, 0.0))[0].result
            seconds, self._exact = bench.torch(state.task, self._arrays)
        except (BuildError, RunError) as error:
            raise _NotMeasurable(f"{state.task.key} cannot be measured: {error}") from error
        state.torch_seconds = state.torch_seconds or seconds

    def trial(self, schedule: Schedule, *, rounds: Rounds = _TRYING, against: Record | None = None) -> Trial:
        """Builds, runs and judges one schedule, alternately with the default one.

        Args:
            schedule: A complete schedule.
            rounds: How long.
            against: A record that it must beat too; then what is not clearly faster than both is not `confirmed`.
        """
        state, bench = self._state, self._bench
        torch_seconds = state.torch_seconds if not state.trials else None
        base = Trial(state.task.key, dict(schedule), Kind.FAILED, bench.place, torch_seconds=torch_seconds)
        programs = [self._default]
        try:
            programs.append(self._built(schedule))
            if against is not None and _named(against.schedule) != _named(schedule):
                programs.append(self._built(against.schedule))
            ran = bench.runner.run(programs, self._arrays, rounds)
        except (BuildError, RunError) as error:
            return replace(base, reason=str(error))
        finally:
            for program in programs[1:]:
                program.library.unlink(missing_ok=True)
        kind, r_rms, reason = Kind.MEASURED, math.nan, ""
        # What is slower than the default is never used, and large results take long to judge.
        default_seconds, seconds = (_time(program, rounds) for program in ran[:2])
        if seconds <= default_seconds:
            kind, r_rms, reason = self._judged(ran[1].result)
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
        """Measures one schedule for longer, `_CONFIRMATIONS` times, each with memory of its own; the least gain counts.

        Args:
            schedule: A complete schedule.
            against: A record that it must beat too.
        """
        trials = []
        for _ in range(_CONFIRMATIONS):
            trials.append(self.trial(schedule, rounds=_CONFIRMING, against=against))
            if not trials[-1].confirmed:
                return trials[-1]
        return max(trials, key=lambda trial: trial.ratio)

    def _judged(self, result: Array) -> tuple[Kind, float, str]:
        verdict = judge({"result": result}, {"result": self._expected}, {"result": self._exact})[0]
        if verdict.kind is VerdictKind.STRICT:
            return Kind.MEASURED, verdict.r_rms, ""
        return Kind.REJECTED, verdict.r_rms, verdict.reason

    def _built(self, schedule: Schedule) -> Program:
        self._count += 1
        return self._bench.builder.build(self._state.task.problem, schedule, self._folder / f"{self._count}.so")


def _time(ran: Ran, rounds: Rounds) -> float:
    """The median of many rounds; of a few the fastest, since whatever else runs only adds to a time."""
    return ran.median if rounds is _CONFIRMING else min(ran.seconds)


def _saved(path: Path, array: Array) -> None:
    try:
        np.save(path, array)
    except OSError as error:
        raise HarnessError(f"cannot write {path}: {error}; free some space or set TMPDIR to another folder") from error


def is_faster(candidate: Sequence[float], other: Sequence[float]) -> bool:
    """Whether rounds that took turns show a gain beyond their own noise.

    The ratio of each round with its neighbour must be below 1 in three quarters of the rounds, and both their median
    and the ratio of the medians below it by `LEAST_GAIN` at least.
    """
    ratios = sorted(a / b for a, b in zip(candidate, other, strict=True))
    upper = ratios[min(len(ratios) - 1, (3 * len(ratios)) // 4)]
    medians = statistics.median(candidate) / statistics.median(other)
    return max(statistics.median(ratios), medians) < 1 - LEAST_GAIN and upper < 1


@dataclass(frozen=True)
class Batch:
    """What one batch of trials brought.

    Attributes:
        state: The task, after it.
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
    """Tries schedules, task by task and batch by batch; each batch is on disk before it is given.

    Args:
        states: From `begin`; they are brought up to date.
        bench: What to work with.
        go_on: (trials so far) → whether there may be another.
        on_trial: Called after each trial.

    Raises:
        HarnessError: No task can be measured at all, or the database cannot be written.
    """
    made = 0
    for known in states:
        _recover(known, bench)
    while go_on(made) and (state := next_task(states)) is not None:
        with TemporaryDirectory(prefix="sam3-tvm-tune-") as folder:
            try:
                measured = Measured(bench, state, Path(folder))
            except _NotMeasurable as error:
                state.problem = str(error)
                if all(other.problem for other in states):
                    raise HarnessError(state.problem) from error
                continue
            # As long as it stays, nothing has to be prepared again.
            while go_on(made):
                batch: list[Trial] = []
                try:
                    for schedule in next_schedules(state, BATCH, bench.seed):
                        if not go_on(made):
                            break
                        trial = measured.trial(schedule)
                        batch.append(trial)
                        made += 1
                        state.trials.append(trial)
                        on_trial(state, trial)
                    confirming = _worth_confirming(state)
                    if confirming is not None:
                        trial = measured.confirmation(confirming.schedule, state.record)
                        batch.append(trial)
                        state.trials.append(trial)
                finally:
                    # Also what was measured before Ctrl-C.
                    append_trials(bench.folder, batch)
                record = _record(state, batch[-1], bench) if batch and batch[-1].confirmed else None
                if record is not None:
                    store(bench.folder, bench.place.target, record, state.record)
                    state.record = record
                yield Batch(state, tuple(batch), record)
                following = next_task(states)
                if following is None or following.worth > _LEAVING * state.worth:
                    break


def _worth_confirming(state: Progress) -> Trial | None:
    """The best trial, if it promises more than the record and was not measured for longer yet."""
    best = state.best
    if best is None or best.confirmed or best.ratio >= 1 - LEAST_GAIN:
        return None
    if state.record is not None and _named(best.schedule) == _named(state.record.schedule):
        return None
    longer = [trial for trial in state.trials if _named(trial.schedule) == _named(best.schedule)]
    return best if len(longer) == 1 else None


def _record(state: Progress, trial: Trial, bench: Bench) -> Record:
    """The record of a trial that was confirmed."""
    return Record(
        task=state.task.key,
        schedule=trial.schedule,
        place=bench.place,
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
    if confirmed and (state.record is None or _named(state.record.schedule) != _named(confirmed[-1].schedule)):
        database = store(bench.folder, bench.place.target, _record(state, confirmed[-1], bench))
        known = (record for record in database.records if record.place == bench.place)
        state.record = next(record for record in known if record.task == state.task.key)
