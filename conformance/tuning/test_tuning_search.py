"""The search: what becomes a record and what does not, and that a search that is ended in any way goes on."""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from conformance.support import faulty_builds
from conformance.support.commands import run_command
from conformance.support.cpus import target_for
from conformance.support.place import executes
from conformance.support.sentences import sentence
from conformance.support.tuning import database_of, record
from harness.cli.main import app
from harness.compiler.schedules.cpu.blocking import Extents
from harness.compiler.schedules.cpu.schedule import Product, Workload, distance, space
from harness.compiler.schedules.cpu.tile import vector_unit
from harness.compiler.targets import TARGETS
from harness.compiler.tuned.database import FILE, open_database
from harness.core.errors import HarnessError
from harness.core.files import lock_folder
from harness.tuning.search import Trial, candidates, is_faster, search
from harness.verify.report import read_report

pytestmark = pytest.mark.usefixtures("one_thread")

UNIT = vector_unit(TARGETS["llvm"].tvm_target())
WORKLOAD = Product(Extents(1, 40, 64, 64), "left")
BOX_HEAD = Product(Extents(1, 400, 256, 256), "left")
"""A layer of `box_head`."""

HALF = pytest.mark.skipif(
    not executes(target_for("cooperlake")), reason="this machine does not execute code for cooperlake"
)
"""What multiplies bfloat16 by an instruction."""


@pytest.mark.parametrize(
    ("workload", "faults"),
    [(WORKLOAD, ("crash", "hang", "wrong")), pytest.param(replace(WORKLOAD, dtype="bfloat16"), ("wrong",), marks=HALF)],
    ids=["float32", "bfloat16"],
)
def test_what_crashes_hangs_or_is_wrong_is_no_record_and_what_is_right_and_faster_is(
    workload: Workload, faults: tuple[str, ...], tmp_path: Path
) -> None:
    build = partial(faulty_builds.build, faults=faults)
    trials = []
    for trial in search(Counter([workload]), database_of(tmp_path), build=build, limit=faulty_builds.SECONDS):
        trials.append(trial)
        # On disk before it is told.
        assert open_database(tmp_path).records == (trial.record,)
        if len(trials) > len(faults):
            break
    *faulty, right = trials
    for trial, fault in zip(faulty, faults, strict=True):
        assert trial.failure.startswith(f"{workload.key} with ") and faulty_builds.FAULTS[fault][1] in trial.failure
        assert trial.record is not None and (trial.record.schedule, trial.record.gain) == ({}, 1)
    assert right.is_better and not right.failure
    assert right.record is not None and right.record.trials == 0 and right.record.gain > 2
    assert right.record.schedule == candidates(workload, UNIT, {})[len(faults)]


def test_the_next_search_goes_on_after_the_last_trial(tmp_path: Path) -> None:
    first = [trial.record for trial in islice(search(Counter([WORKLOAD]), database_of(tmp_path)), 3)]
    assert first[-1] is not None
    (tmp_path / f".{FILE}.1.2.tmp").write_text("half")  # of a killed search
    (again,) = islice(search(Counter([WORKLOAD]), open_database(tmp_path)), 1)
    assert again.record is not None
    assert again.is_better or again.record == replace(first[-1], trials=first[-1].trials + 1)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_kernel_whose_default_cannot_be_measured_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        HarnessError, match=r"product 1x40x64x64 left cannot be measured: it was not done after 0\.001 s"
    ):
        list(search(Counter([WORKLOAD]), database_of(tmp_path), limit=0.001))
    assert not (tmp_path / FILE).exists()


def test_two_searches_do_not_write_the_same_database(tmp_path: Path) -> None:
    with lock_folder(tmp_path, tmp_path / ".lock"), pytest.raises(HarnessError, match=sentence("folder-in-use")):
        next(search(Counter([WORKLOAD]), database_of(tmp_path)))


@given(st.integers(0, 200))
def test_every_schedule_is_tried_once_and_the_nearest_first(number: int) -> None:
    default, *others = space(BOX_HEAD, UNIT)
    best = others[number % len(others)]
    order = candidates(BOX_HEAD, UNIT, best)
    assert [{}, *order].count(best) == 0 and default not in order and len(order) == len(others) - 1
    distances = [distance(schedule, best) for schedule in order]
    assert distances == sorted(distances) and distances[0] == 1


@given(st.lists(st.floats(0.9, 1.1), min_size=3, max_size=20), st.floats(0.1, 10.0))
def test_nothing_is_faster_than_itself_and_half_the_time_always_is(seconds: list[float], scale: float) -> None:
    times = [second * scale for second in seconds]
    assert not is_faster(times, times)
    assert is_faster([time / 2 for time in times], times)
    assert not is_faster([time * 0.995 for time in times], times)


# --- the command ---


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "harness", "tune", "--component", "box_head", "--db", str(folder), *arguments]


def trials_in(folder: Path) -> int:
    return sum(one.trials for one in open_database(folder).records) if (folder / FILE).exists() else 0


@pytest.mark.wide
def test_a_killed_search_loses_nothing_and_verify_uses_what_it_found(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    killed = subprocess.Popen(command(folder, "--minutes", "5"), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while trials_in(folder) < 3:
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    before = {one.task: one for one in open_database(folder).records}
    done = subprocess.run(command(folder, "--trials", "3"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"Continuing in {folder}: {len(before)} of 2 kernels were tuned before." in done.stdout
    assert "3 trials" in done.stdout
    after = {one.task: one for one in open_database(folder).records}
    assert before.keys() <= after.keys() and all(one.gain >= 1 for one in after.values())
    if not any(one.schedule for one in after.values()):
        assert trials_in(folder) == sum(one.trials for one in before.values()) + 3
    # Whether or not something was found: another schedule is right inside the component, too.
    database_of(folder, *after.values(), record(BOX_HEAD.key, candidates(BOX_HEAD, UNIT, {})[0]))
    arguments = ["--component", "box_head", "--db", str(folder), "--report", str(tmp_path / "report")]
    verified = run_command("verify", *arguments)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    report = read_report(tmp_path / "report" / "verification_report.json")
    assert report["machine"]["schedules"].startswith("tuned: ") and f"--db {folder}" in report["cases"][0]["repro"]
    assert {output["verdict"] for output in report["cases"][0]["outputs"]} == {"strict"}


@pytest.mark.law
@pytest.mark.parametrize(
    ("limits", "tried"),
    [
        ((), 11),
        (("--minutes", "3"), 4),
        (("--trials", "20"), 20),
        (("--trials", "20", "--minutes", "3"), 4),
        (("--trials", "2", "--minutes", "3"), 2),
    ],
)
def test_a_search_ends_at_the_first_of_its_limits(
    limits: tuple[str, ...], tried: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    minutes = itertools.count()  # each trial takes one
    (tuned,) = database_of(tmp_path, record(BOX_HEAD.key, {})).records
    trials = (Trial(BOX_HEAD.key, tuned) for _ in range(30))
    monkeypatch.setattr("harness.cli.tune.time", SimpleNamespace(monotonic=lambda: 60 * next(minutes)))
    monkeypatch.setattr("harness.cli.tune._workloads", lambda *_: Counter([BOX_HEAD]))
    monkeypatch.setattr("harness.tuning.search.search", lambda *_: trials)
    monkeypatch.setattr("harness.core.processes.memory.hide_torch", lambda: None)
    done = CliRunner().invoke(app, ["tune", "--component", "box_head", "--db", str(tmp_path), *limits])
    assert f"{tried} trials; 0 of 1 kernels" in done.output, done.output


@HALF
def test_half_precision_has_kernels_of_its_own_where_an_instruction_multiplies_it(tmp_path: Path) -> None:
    chosen = ("--precision", "bf16", "--trials", "2", "--cpu", "cooperlake")
    done = run_command("tune", "--component", "box_head", "--db", str(tmp_path), *chosen)
    assert done.returncode == 0, done.stderr
    (one,) = open_database(tmp_path).records
    assert one.task == f"{BOX_HEAD.key} bfloat16" and one.conditions.cpu == "cooperlake"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--minutes", "0"), sentence("no-time", minutes=0)),
        (("--minutes", "-1"), sentence("no-time", minutes=-1)),
        (("--component", "boxhead"), sentence("unknown-name", hint="box_head")),
        (("--component", "end_to_end"), sentence("not-a-component", name="end_to_end")),
        (("--scale", "tiny"), sentence("tiny-scale", tiny="tiny")),
        (("--db", "{folder}/damaged"), sentence("damaged-database", file="damaged/schedules.json")),
        (("--db", "{folder}/damaged/schedules.json/db"), sentence("cannot-write", advice="--db")),
    ],
)
def test_mistakes_end_in_one_sentence_before_any_work(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged" / FILE
    damaged.parent.mkdir()
    damaged.write_text("nonsense\n")
    chosen = [argument.format(folder=tmp_path) for argument in arguments]
    done = CliRunner().invoke(app, ["tune", "--db", str(tmp_path / "db"), *chosen])
    assert isinstance(done.exception, HarnessError), done.output
    assert re.search(words, str(done.exception)) and "\n" not in str(done.exception)
    assert damaged.read_text() == "nonsense\n" and not (tmp_path / "db").exists()
