"""MetaSchedule's evolutionary search over TVM's own rules, with a clock, parity and records that survive anything.

The steps are those of MetaSchedule's task scheduler; its scheduler counts trials only, does not look at results, and
writes the records of its first round when that has ended for every task.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tvm
from tvm.s_tir import meta_schedule as ms

from harness.tuning.measuring import Program, RunError
from harness.tuning.rules_building import build_programs, reference_module, seeded_inputs
from harness.tuning.rules_measuring import LocalMeasurer, Measured, Measurer
from harness.tuning.rules_module import RulesTask
from harness.tuning.rules_records import FAILED_SECONDS, Opened
from harness.tuning.tensor_intrinsics import import_tensor_intrinsics

BATCH = 24
"""Candidates that are built together before they are measured one by one, each recorded at once."""
_FIRST_SAMPLES = 32
"""Measured candidates from which on the cost model is asked."""
_REFERENCE_SECONDS = 120.0


@dataclass
class TaskState:
    """What is known of a task.

    Attributes:
        task: The task.
        best: Seconds of its best right candidate; infinite before the first.
        trials, failed, rejected: Candidates tried, of them those that crashed, hung or did not build, and wrong ones.
        problem: Why it cannot be tuned; empty if it can.
        stale: Batches since the best one fell.
        exhausted: Whether the search has no more candidates.
        reasons: The first line of each kind of failure, with how often it occurred.
    """

    task: RulesTask
    best: float = math.inf
    trials: int = 0
    failed: int = 0
    rejected: int = 0
    problem: str = ""
    stale: int = 0
    exhausted: bool = False
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def worth(self) -> float:
        """What the next batch goes by: time spent in the task in a run of the model, less for every futile batch."""
        if self.problem or self.exhausted:
            return -1.0
        return self.task.weight * self.best * 0.5**self.stale

    def count(self, measured: Measured) -> None:
        """Takes a trial into account."""
        self.trials += 1
        self.failed += bool(measured.failure)
        self.rejected += bool(measured.fault)
        reason = measured.failure or measured.fault
        if reason:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self.best = min(self.best, measured.median)


@dataclass(frozen=True)
class Bench:
    """What a search works with.

    Attributes:
        target: What to compile for.
        records: Where to read what is known and write what is measured.
        measurer: Runs the candidates.
        scratch: Folder for inputs and expected results; some hundred megabytes for large tasks.
        jobs: Processes that compile, and threads that search.
        seed: Of candidates and inputs.
    """

    target: tvm.target.Target
    records: Opened
    measurer: Measurer
    scratch: Path
    jobs: int
    seed: int


def search(
    tasks: Sequence[RulesTask],
    bench: Bench,
    go_on: Callable[[int], bool],
    on_trial: Callable[[TaskState], None] = lambda state: None,
    trials: int | None = None,
) -> tuple[list[TaskState], bool]:
    """Tunes tasks until there is no time, or nothing to try.

    Args:
        tasks: What to tune.
        bench: What to work with.
        go_on: (candidates measured so far) → whether to go on; asked before every candidate.
        on_trial: Called after every candidate, with what is known of its task.
        trials: Number of candidates at most, if `go_on` is about that: batches are no larger.

    Returns:
        What is known of each task, and whether Ctrl-C ended it.

    Raises:
        HarnessError: The records cannot be written, or there is no machine left to measure on.
    """
    states = [TaskState(task) for task in tasks]
    model = ms.cost_model.XGBModel(
        num_warmup_samples=_FIRST_SAMPLES, num_tuning_cores=bench.jobs, verbose_eval=0, early_stopping_rounds=20
    )
    batch = BATCH if trials is None else max(1, min(BATCH, trials))
    searches = [_Search(state, bench, model, batch) for state in states]
    made = 0

    interrupted = False
    try:
        while go_on(made):
            chosen = max(searches, key=lambda search: search.state.worth)
            if chosen.state.worth < 0:
                break
            for _ in chosen.batch(lambda: go_on(made)):  # noqa: B023
                made += 1
                on_trial(chosen.state)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        for one in searches:
            one.close()
    return states, interrupted


class _Search:
    """One task's search."""

    def __init__(self, state: TaskState, bench: Bench, model: ms.cost_model.CostModel, batch: int) -> None:
        self.state = state
        self._bench = bench
        self._model = model
        self._batch = batch
        self._context: ms.TuneContext | None = None
        self._folder = bench.scratch / f"task-{abs(hash(state.task.name))}"
        self._arrays: list[Path] = []
        for record in bench.records.of(state.task.module):
            seconds = [float(second) for second in record.run_secs or ()]
            state.trials += 1
            if seconds and float(np.median(seconds)) < FAILED_SECONDS:
                state.best = min(state.best, float(np.median(seconds)))
            else:
                state.failed += 1

    @property
    def _expected(self) -> Path:
        return self._folder / "expected.npy"

    def batch(self, go_on: Callable[[], bool]) -> Iterator[Measured]:
        """Makes and builds candidates, then measures and records one after the other."""
        if not self._arrays:
            self._prepare()
        if self.state.problem:
            return
        context = self._context or self._begin()
        candidates = context.generate_measure_candidates()
        if not candidates:
            self.state.exhausted = True
            return
        candidates = list(candidates)
        before = self.state.best
        programs = build_programs([one.sch.mod for one in candidates], self._bench.target, self._bench.jobs)
        built = [program for program in programs if isinstance(program, Program)]
        measuring = iter(self._bench.measurer.measure(built, self._arrays, self._expected, before))
        done: list[Measured] = []
        for candidate, program in zip(candidates, programs, strict=True):
            if not go_on():
                break
            measured = next(measuring) if isinstance(program, Program) else Measured(failure=program)
            self._record(candidate, measured)
            done.append(measured)
            yield measured
        for program in built:
            shutil.rmtree(program.library.parent, ignore_errors=True)
        results = [_result(measured) for measured in done]
        if len(done) == len(candidates):
            context.notify_runner_results(candidates, results)
            self._model.update(context, candidates, results)
        self.state.stale = 0 if self.state.best < 0.98 * before else self.state.stale + 1

    def _prepare(self) -> None:
        """Inputs, and the result that is expected of every candidate."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._arrays = [self._folder / f"{n}.npy" for n in range(len(self.state.task.module["main"].params) - 1)]
        for path, array in zip(self._arrays, seeded_inputs(self.state.task.module, self._bench.seed), strict=True):
            np.save(path, array)
        (program,) = build_programs([reference_module(self.state.task.module)], self._bench.target, 1)
        worker = LocalMeasurer()
        try:
            if isinstance(program, str):
                raise RunError(program)
            worker.reference(program, self._arrays, self._expected, _REFERENCE_SECONDS)
        except RunError as error:
            self.state.problem = f"{self.state.task.name}: the plain loops do not run: {error}"
        finally:
            worker.close()

    def _begin(self) -> ms.TuneContext:
        """MetaSchedule's search, from what is recorded."""
        state, bench = self.state, self._bench
        import_tensor_intrinsics()
        context = ms.TuneContext(
            mod=state.task.module,
            target=bench.target,
            space_generator="post-order-apply",
            search_strategy=ms.search_strategy.EvolutionarySearch(
                population_size=256, init_min_unmeasured=32, genetic_num_iters=3
            ),
            task_name=state.task.name,
            rand_state=1 + (bench.seed + state.trials) % (2**31 - 2),
            num_threads=bench.jobs,
        )
        known = bench.records.of(state.task.module)
        if known:
            candidates = [record.as_measure_candidate() for record in known]
            results = [ms.runner.RunnerResult(list(record.run_secs), None) for record in known]
            self._model.update(context, candidates, results)
        context.pre_tuning(1 << 20, self._batch, context.generate_design_space(), bench.records.records, self._model)
        self._context = context
        return context

    def _record(self, candidate: ms.MeasureCandidate, measured: Measured) -> None:
        self.state.count(measured)
        seconds = list(measured.seconds) if math.isfinite(measured.median) else [FAILED_SECONDS]
        workload = self._bench.records.records.commit_workload(self.state.task.module)
        self._bench.records.add(
            ms.database.TuningRecord(candidate.sch.trace, workload, seconds, self._bench.target, candidate.args_info)
        )
        self._bench.records.note(
            {
                "task": self.state.task.name,
                "seconds": list(measured.seconds),
                "failure": measured.failure,
                "fault": measured.fault,
            }
        )

    def close(self) -> None:
        """Removes inputs and expected results."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _result(measured: Measured) -> ms.runner.RunnerResult:
    if math.isfinite(measured.median):
        return ms.runner.RunnerResult(list(measured.seconds), None)
    return ms.runner.RunnerResult(None, measured.failure or measured.fault)
