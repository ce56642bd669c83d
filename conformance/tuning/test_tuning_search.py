"""The search on a small task: what is tried, what is believed, and that a crash or a hang costs one trial."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from conformance.support.tuning import record
from harness.core.errors import HarnessError
from harness.report import read_report
from harness.schedules import Schedule
from harness.schedules.cpu.product import Extents
from harness.schedules.cpu.schedule import Attention, Product, Workload, distance, space
from harness.schedules.cpu.tile import vector_unit
from harness.targets import TARGETS
from harness.targets.compiling import export_library
from harness.tuned.database import current_conditions, open_database, store
from harness.tuned.trials import Kind, Trial, read_trials
from harness.tuning.local import BuildError, LocalBuilder, LocalRunner, TorchRunner
from harness.tuning.measuring import Program, Rounds, Runner, RunResult, Step
from harness.tuning.request import Request
from harness.tuning.search import (
    BATCH,
    Batch,
    Bench,
    Progress,
    begin,
    is_faster,
    next_schedules,
    next_task,
    search,
)
from harness.tuning.session import tune
from harness.tuning.tasks import Task, merge_tasks

pytestmark = pytest.mark.usefixtures("one_thread")

TARGET = TARGETS["llvm"].tvm_target()
UNIT = vector_unit(TARGET)
HERE = current_conditions("llvm")
WORKLOAD = Product(Extents(1, 40, 64, 64), "left")
TASK = Task(WORKLOAD, 3)
LARGE = Task(Attention(4, 16, 576, 576, 64, 64), 1)


@pytest.fixture(scope="module")
def builder(one_thread: None) -> Iterator[LocalBuilder]:
    made = LocalBuilder(TARGET)
    yield made
    made.close()


@pytest.fixture(scope="module")
def runner(one_thread: None) -> Iterator[LocalRunner]:
    made = LocalRunner(seconds=120.0)
    yield made
    made.close()


@pytest.fixture(scope="module")
def torch(one_thread: None) -> Iterator[TorchRunner]:
    made = TorchRunner()
    yield made
    made.close()


@dataclass
class Changed:
    """A real runner whose numbers, and whose result, are changed for every program but the first: the default's."""

    runner: Runner
    factor: float = 1.0
    error: float = 0.0
    calls: int = 0

    def run(self, programs: Sequence[Program], arrays: Sequence[Path], rounds: Rounds) -> list[RunResult]:
        self.calls += 1
        first, *others = self.runner.run(programs, arrays, rounds)
        times = tuple(seconds * self.factor for seconds in first.seconds)
        return [first, *(RunResult(times, other.result + np.float32(self.error)) for other in others)]


@dataclass
class Broken:
    """A real builder that builds something else for some of the schedules, counted from the first."""

    builder: LocalBuilder
    instead: tirx.PrimFunc
    which: tuple[int, ...]
    asked: list[Schedule] = field(default_factory=list)

    def build(self, workload: Workload, schedule: Schedule, library: Path) -> Program:
        if schedule:
            self.asked.append(schedule)
        if schedule and len(self.asked) in self.which:
            compiled = tvm.tirx.build(tvm.IRModule({"broken": self.instead}), TARGET)
            export_library(compiled, TARGET, library)
            return Program(library, (), (Step("broken", (), (4,), "float32"),), 2)
        return self.builder.build(workload, schedule, library)


def endless() -> tirx.PrimFunc:
    """Never ends."""
    with IRBuilder() as made:
        with T.prim_func(s_tir=True):
            T.func_name("broken")
            T.func_attr({"global_symbol": "broken", "tirx.noalias": True})
            buffer = T.arg("a", T.buffer((4,), "float32"))
            with T.While(buffer[0] == buffer[0]):
                T.buffer_store(buffer, T.max(buffer[1], T.float32(1.0)), [1])
        return made.get()


def aborting() -> tirx.PrimFunc:
    """Ends the process."""
    with IRBuilder() as made:
        with T.prim_func(s_tir=True):
            T.func_name("broken")
            T.func_attr({"global_symbol": "broken", "tirx.noalias": True})
            T.arg("a", T.buffer((4,), "float32"))
            T.evaluate(tirx.call_extern("int32", "abort"))
        return made.get()


def bench(builder, runner, torch: TorchRunner, folder: Path, seed: int = 0) -> Bench:  # type: ignore[no-untyped-def]
    return Bench(
        builder, runner, lambda task, arrays: torch.run(task.workload, arrays), HERE, folder, "a machine", seed
    )


def run(states: Sequence[Progress], work: Bench, trials: int = 4) -> list[Batch]:
    return list(search(states, work, lambda made: made < trials))


# --- a search with real workers ---


def test_trials_are_measured_judged_and_kept(
    builder: LocalBuilder, runner: LocalRunner, torch: TorchRunner, tmp_path: Path
) -> None:
    states = begin([TASK], UNIT, HERE)
    run(states, bench(builder, runner, torch, tmp_path), 5)
    trials, _ = read_trials(tmp_path)
    plain = [trial for trial in trials if not trial.confirmed]
    assert trials == states[0].trials and len(plain) >= 5
    assert trials[0].schedule == space(WORKLOAD, UNIT)[0]
    assert all(trial.kind is Kind.MEASURED and 0 < trial.seconds < 1 for trial in trials)
    assert all(trial.r_rms < 1.5 for trial in trials if trial.seconds <= trial.default_seconds)
    assert trials[0].torch_seconds is not None and trials[0].torch_seconds > 0
    # Going on repeats nothing.
    again = begin([TASK], UNIT, HERE, trials)
    run(again, bench(builder, runner, torch, tmp_path), 4)
    everything, _ = read_trials(tmp_path)
    schedules = [tuple(sorted(t.schedule.items())) for t in everything[:5] + everything[len(trials) : len(trials) + 4]]
    assert len(set(schedules)) == 9


def test_what_is_clearly_faster_is_recorded(
    builder: LocalBuilder, runner: LocalRunner, torch: TorchRunner, tmp_path: Path
) -> None:
    states = begin([TASK], UNIT, HERE)
    batches = run(states, bench(builder, Changed(runner, factor=0.5), torch, tmp_path), 3)
    (record,) = open_database(tmp_path).records
    assert record == states[0].record == batches[-1].record
    assert record.task == TASK.key and record.gain == pytest.approx(2.0)
    assert record.schedule in space(WORKLOAD, UNIT)
    assert (record.trials, record.failed, record.rejected) == (4, 0, 0)
    assert record.machine == "a machine" and record.conditions == HERE and record.torch_seconds is not None


@pytest.mark.parametrize("factor", [1.0, 0.995, 1.3])
def test_what_is_not_clearly_faster_is_no_record(
    factor: float, builder: LocalBuilder, runner: LocalRunner, torch: TorchRunner, tmp_path: Path
) -> None:
    states = begin([TASK], UNIT, HERE)
    run(states, bench(builder, Changed(runner, factor=factor), torch, tmp_path), 3)
    assert states[0].record is None
    assert not (tmp_path / "schedules.json").exists()
    assert len(read_trials(tmp_path)[0]) == 3


@pytest.mark.parametrize("error", [1e-4, float("nan")])
def test_a_wrong_result_is_rejected_however_fast(
    error: float, builder: LocalBuilder, runner: LocalRunner, torch: TorchRunner, tmp_path: Path
) -> None:
    states = begin([TASK], UNIT, HERE)
    run(states, bench(builder, Changed(runner, 0.1, error), torch, tmp_path), 3)
    assert states[0].count(Kind.REJECTED) == 3
    assert states[0].record is None and not (tmp_path / "schedules.json").exists()
    assert all(trial.reason for trial in states[0].trials)


@pytest.mark.parametrize(("instead", "words"), [(aborting, "crashed"), (endless, "was not done after 8 s")])
def test_a_crash_or_a_hang_costs_one_trial(  # type: ignore[no-untyped-def]
    instead, words: str, builder: LocalBuilder, torch: TorchRunner, tmp_path: Path
) -> None:
    states = begin([TASK], UNIT, HERE)
    runner = LocalRunner(seconds=8.0)
    run(states, bench(Broken(builder, instead(), (2,)), runner, torch, tmp_path), 4)
    runner.close()
    kinds = [trial.kind for trial in states[0].trials if not trial.confirmed]
    assert kinds[:4] == [Kind.MEASURED, Kind.FAILED, Kind.MEASURED, Kind.MEASURED]
    assert words in states[0].trials[1].reason


def test_a_schedule_that_cannot_be_built_costs_one_trial(builder: LocalBuilder, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="does not fit"):
        builder.build(WORKLOAD, {"rows": 100}, tmp_path / "a.so")
    assert builder.build(WORKLOAD, {}, tmp_path / "b.so").run


def test_a_task_without_a_default_is_passed_over(
    builder: LocalBuilder, runner: LocalRunner, torch: TorchRunner, tmp_path: Path
) -> None:
    @dataclass
    class Refusing:
        builder: LocalBuilder

        def build(self, workload: Workload, schedule: Schedule, library: Path) -> Program:
            if workload == LARGE.workload:
                raise BuildError("it crashed")
            return self.builder.build(workload, schedule, library)

    states = begin([LARGE, TASK], UNIT, HERE)
    run(states, bench(Refusing(builder), runner, torch, tmp_path), 2)
    assert "it crashed" in states[0].unmeasurable and states[0].trials == []
    assert len(states[1].trials) >= 2
    with pytest.raises(HarnessError, match="cannot be measured: it crashed"):
        run(begin([LARGE], UNIT, HERE), bench(Refusing(builder), runner, torch, tmp_path), 2)


def test_what_was_measured_before_ctrl_c_is_kept(
    builder: LocalBuilder, runner: LocalRunner, torch: TorchRunner, tmp_path: Path
) -> None:
    states = begin([TASK], UNIT, HERE)

    def stop(state: Progress, _trial: Trial) -> None:
        if len(state.trials) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(search(states, bench(builder, runner, torch, tmp_path), lambda made: True, stop))
    assert len(read_trials(tmp_path)[0]) == 2


def test_a_record_that_was_lost_between_log_and_database_comes_back(
    builder: LocalBuilder, runner: LocalRunner, torch: TorchRunner, tmp_path: Path
) -> None:
    states = begin([TASK], UNIT, HERE)
    work = bench(builder, Changed(runner, factor=0.5), torch, tmp_path)
    run(states, work, 3)
    before = open_database(tmp_path).records
    (tmp_path / "schedules.json").unlink()
    again = begin([TASK], UNIT, HERE, read_trials(tmp_path)[0])
    run(again, work, 0)
    assert replace(open_database(tmp_path).records[0], date=before[0].date) == before[0]


def test_trials_from_elsewhere_do_not_count() -> None:
    trial = Trial(TASK.key, space(WORKLOAD, UNIT)[0], Kind.MEASURED, replace(HERE, threads=99), 1.0, 1.0)
    assert begin([TASK], UNIT, HERE, [trial])[0].trials == []


# --- which next ---


def made(task: Task, ratios: Sequence[float], seconds: float = 1.0) -> Progress:
    (state,) = begin([task], UNIT, HERE)
    for schedule, ratio in zip(state.schedules, ratios, strict=False):
        state.trials.append(Trial(task.key, schedule, Kind.MEASURED, HERE, seconds * ratio, seconds))
    return state


def test_the_task_that_costs_the_most_is_next() -> None:
    cheap, dear = made(TASK, [1.0], 0.1), made(LARGE, [1.0], 1.0)
    assert next_task([cheap, dear]) is dear
    assert next_task([made(replace(TASK, calls=100), [1.0], 0.1), dear]) is not dear
    assert next_task([]) is None


def test_a_task_without_progress_yields_to_others() -> None:
    stuck = made(TASK, [1.0] * 60)
    assert next_task([stuck, made(LARGE, [1.0], 0.9)]) is not stuck
    assert next_task([made(TASK, [1.0] * 59 + [0.8]), made(LARGE, [1.0], 0.3)]).task == TASK  # type: ignore[union-attr]


def test_a_task_whose_space_is_exhausted_is_finished() -> None:
    state = made(TASK, [1.0] * len(space(WORKLOAD, UNIT)))
    assert state.finished and next_task([state]) is None and next_schedules(state, 4, 0) == []


@given(st.integers(0, 60), st.integers(0, 5), st.integers(1, 12))
def test_the_next_schedules_are_new_and_the_same_for_a_seed(tried: int, seed: int, count: int) -> None:
    state = made(TASK, [1.0] * tried)
    chosen = next_schedules(state, count, seed)
    assert chosen == next_schedules(made(TASK, [1.0] * tried), count, seed)
    named = [tuple(sorted(schedule.items())) for schedule in chosen]
    assert len(set(named)) == len(named) == min(count, len(state.schedules) - tried)
    assert not state.tried & set(named)
    assert all(schedule in state.schedules for schedule in chosen)
    if tried == 0:
        assert chosen[0] == state.schedules[0]
        neighbours = sum(distance(schedule, chosen[0]) == 1 for schedule in state.schedules)
        assert neighbours >= 3
        assert all(distance(schedule, chosen[0]) == 1 for schedule in chosen[1 : neighbours + 1])


def test_neighbours_of_the_best_come_before_the_rest() -> None:
    state = made(LARGE, [1.0] * 9 + [0.5] + [1.0] * 5)
    best = state.schedules[9]
    near = [distance(schedule, best) for schedule in next_schedules(state, BATCH, 0)]
    assert near[:6] == [1] * 6 and len(near) == BATCH


def test_calls_add_up() -> None:
    tasks = merge_tasks([[TASK, LARGE], [replace(TASK, calls=4)]], "these")
    assert {task.key: task.calls for task in tasks} == {TASK.key: 7, LARGE.key: 1}


@given(st.lists(st.floats(0.9, 1.1), min_size=3, max_size=20), st.floats(0.1, 10.0))
def test_nothing_is_faster_than_itself_and_half_the_time_always_is(seconds: list[float], scale: float) -> None:
    times = [second * scale for second in seconds]
    assert not is_faster(times, times)
    assert is_faster([time / 2 for time in times], times)
    assert not is_faster([time * 0.995 for time in times], times)


# --- the command ---


def tuning(folder: Path, *arguments: str, component: str = "box_head") -> list[str]:
    return [sys.executable, "-m", "harness", "tune", "--component", component, "--db", str(folder), *arguments]


@pytest.mark.wide
def test_a_killed_search_goes_on_and_what_it_tried_is_strict_in_the_component(tmp_path: Path) -> None:
    """kill -9 in the middle, half a line of the log, then the same command again; Ctrl-C; a verification with it."""
    log = tmp_path / "trials.jsonl"
    killed = subprocess.Popen(tuning(tmp_path, "--minutes", "3"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_for(lambda: log.exists() and log.read_bytes().count(b"\n") >= BATCH, killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=240)
    before, _ = read_trials(tmp_path)
    log.write_bytes(log.read_bytes() + log.read_bytes()[:30])
    printed = tmp_path / "printed.txt"
    with printed.open("w") as file:
        going = subprocess.Popen(tuning(tmp_path, "--minutes", "3"), stdout=file, stderr=subprocess.PIPE, text=True)
    # What a batch brought is told after it is on disk.
    wait_for(lambda: "x PyTorch" in printed.read_text(), going)
    assert len(read_trials(tmp_path)[0]) > len(before)
    going.send_signal(signal.SIGINT)
    _, err = going.communicate(timeout=240)
    out = printed.read_text()
    assert going.returncode == 130, out + err
    assert "half a line" in out and f"Going on after {len(before)} trials" in out
    assert "The same command goes on from there" in out
    assert "Traceback" not in out + err
    trials, notices = read_trials(tmp_path)
    assert trials[: len(before)] == before and notices == []
    tried = [(trial.task, tuple(sorted(trial.schedule.items()))) for trial in trials]
    # Twice, if at all, only because the second time confirms the first.
    assert all(tried.count(entry) <= 2 for entry in tried)
    assert "default" in out
    # Whatever was found: the schedules that were tried last must be right inside the component too.
    last = {trial.task: trial for trial in trials if trial.kind is Kind.MEASURED}
    for trial in last.values():
        store(tmp_path, "llvm", record(trial.task, trial.schedule))
    kept = open_database(tmp_path).schedules()
    arguments = ["--component", "box_head", "--db", str(tmp_path), "--report", str(tmp_path / "report")]
    verified = subprocess.run(
        [sys.executable, "-m", "harness", "verify", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr
    report = read_report(tmp_path / "report" / "verification_report.json")
    assert report["machine"]["schedules"].startswith(f"tuned: {len(kept)} from the database")
    assert f"--db {tmp_path}" in report["cases"][0]["repro"]
    assert {output["verdict"] for output in report["cases"][0]["outputs"]} == {"strict"}


def wait_for(condition, process: subprocess.Popen) -> None:  # type: ignore[no-untyped-def,type-arg]
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(minutes=0), "--minutes 0 leaves no time"),
        (Request(minutes=-1), "--minutes -1 leaves no time"),
        (Request(minutes=float("nan")), "--minutes nan leaves no time"),
        (Request(trials=0), "--trials 0 tries nothing"),
        (Request(target="cuda"), "cannot tune for 'cuda'"),
        (Request(("boxhead",)), "did you mean 'box_head'"),
        (Request(("end_to_end",)), "end_to_end is no component"),
        (Request(scale="tiny"), "Unknown scale 'tiny'"),
    ],
)
def test_wrong_usage_is_a_sentence(request_: Request, words: str, tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=words):
        tune(Console(), replace(request_, folder=tmp_path / "db"))
    assert not (tmp_path / "db").exists()


def test_wrong_usage_ends_with_2(tmp_path: Path) -> None:
    done = subprocess.run(tuning(tmp_path / "db", "--minutes", "0"), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "--minutes 0" in done.stderr


def test_a_folder_that_cannot_be_written_is_a_sentence_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HarnessError, match=r"cannot write .*--db"):
        tune(Console(), Request(("box_head",), trials=1, folder=tmp_path / "file" / "db"))


@pytest.mark.parametrize("file", ["schedules.json", "trials.jsonl"])
def test_a_damaged_database_is_a_sentence_before_any_work(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("nonsense\n")
    with pytest.raises(HarnessError, match="damaged"):
        tune(Console(), Request(("box_head",), trials=1, folder=tmp_path))
    assert (tmp_path / file).read_text() == "nonsense\n"


def test_nothing_to_tune_is_a_sentence() -> None:
    with pytest.raises(HarnessError, match=r"box_head: nothing to tune, .* takes a CPU with an instruction for it"):
        merge_tasks([[]], "box_head")
