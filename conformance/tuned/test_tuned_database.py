"""The database of tuning and the log of trials: merged, never lost, and one sentence for whatever is wrong."""

from __future__ import annotations

import json
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.support.tuning import record
from harness.core.errors import HarnessError
from harness.tuned import database
from harness.tuned.database import (
    FILE,
    Record,
    better_record,
    current_conditions,
    default_database,
    describe_database,
    merge_records,
    open_database,
    schedules_from,
    store,
)
from harness.tuned.trials import Conditions, Kind, Trial, append_trials, nothing_found, read_trials

HERE = current_conditions("llvm")
RECORD = record("product 1x2x3x4 left", {"rows": 6, "vectors": 4})
TRIAL = Trial(RECORD.task, {"rows": 6}, Kind.MEASURED, HERE, 0.5, 0.75, 0.9, torch_seconds=1.25)

PLACES = st.sampled_from([HERE, replace(HERE, tvm="0.1"), replace(HERE, cpu="another"), replace(HERE, threads=99)])
RECORDS = st.builds(
    lambda task, conditions, seconds, default, trials, rows: replace(
        RECORD,
        task=task,
        conditions=conditions,
        seconds=seconds,
        default_seconds=default,
        trials=trials,
        schedule={"rows": rows},
    ),
    st.sampled_from("ab"),
    PLACES,
    st.floats(0.1, 1.0),
    st.floats(0.1, 1.0),
    st.integers(1, 3),
    st.integers(1, 3),
)


@given(st.lists(RECORDS), st.lists(RECORDS), st.lists(RECORDS))
def test_merging_is_commutative_associative_idempotent_and_keeps_the_better(
    a: list[Record], b: list[Record], c: list[Record]
) -> None:
    both = merge_records(a, b)
    assert both == merge_records(b, a)
    assert both == merge_records(both, both) == merge_records(both, a)
    assert merge_records(merge_records(a, b), c) == merge_records(a, merge_records(b, c))
    for one in [*a, *b]:
        (kept,) = (other for other in both if (other.task, other.conditions) == (one.task, one.conditions))
        assert kept.gain >= one.gain
        assert kept in [*a, *b]


@given(RECORDS, RECORDS)
def test_the_better_of_two_is_the_same_whichever_comes_first(a: Record, b: Record) -> None:
    assert better_record(a, b) == better_record(b, a)


def test_a_record_comes_back(tmp_path: Path) -> None:
    store(tmp_path / "made", "llvm", RECORD)
    opened = open_database(tmp_path / "made")
    assert opened.records == (RECORD,)
    assert opened.schedules() == {RECORD.task: RECORD.schedule} == schedules_from(tmp_path / "made", "llvm")
    assert opened.notices() == []
    assert describe_database(tmp_path / "made", "llvm").startswith("tuned: 1 from the database made")
    assert (
        describe_database(None, "llvm") == describe_database(tmp_path / "made", "cuda") == "untuned: the default ones"
    )
    assert schedules_from(tmp_path / "made", "cuda") == {} == schedules_from(None, "llvm")


def test_the_database_of_this_machine_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "TUNED", tmp_path / "nothing")
    assert default_database("llvm") is None
    monkeypatch.setattr(database, "TUNED", tmp_path)
    store(tmp_path / replace(HERE, threads=99).tag, "llvm", RECORD)
    assert default_database("llvm") is None
    store(tmp_path / HERE.tag, "llvm", RECORD)
    assert default_database("llvm") == tmp_path / HERE.tag
    assert default_database("cuda") is None


def test_a_search_that_found_nothing_left_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "TUNED", tmp_path)
    folder = tmp_path / HERE.tag
    folder.mkdir()
    assert default_database("llvm") is None
    elsewhere = Trial("other", {}, Kind.MEASURED, replace(HERE, threads=99))
    append_trials(folder, [Trial("a", {"rows": 1}, Kind.MEASURED, HERE), Trial("a", {}, Kind.FAILED, HERE), elsewhere])
    assert default_database("llvm") == folder
    assert (
        describe_database(folder, "llvm")
        == f"untuned: the default ones, the database {HERE.tag} has none that is better"
    )
    trials, _ = read_trials(folder)
    assert nothing_found(trials, HERE, {"a", "b"}) == "2 trials of 1 of its 2 kernels found nothing over the defaults"
    assert nothing_found(trials, HERE, {"b", "other"}) == ""


def test_another_run_does_not_overwrite(tmp_path: Path) -> None:
    slower = replace(RECORD, seconds=0.7, schedule={"rows": 4})
    other = replace(RECORD, task="another", seconds=0.6)
    for one in (RECORD, slower, other):
        store(tmp_path, "llvm", one)
    assert sorted(r.task for r in open_database(tmp_path).records) == ["another", RECORD.task]
    assert RECORD in open_database(tmp_path).records
    store(tmp_path, "llvm", slower, instead_of=RECORD)
    assert slower in open_database(tmp_path).records
    assert RECORD not in open_database(tmp_path).records
    store(tmp_path, "llvm", RECORD, instead_of=slower)
    store(tmp_path, "llvm", replace(RECORD, seconds=0.4))
    assert {record.seconds for record in open_database(tmp_path).records} == {0.4, 0.6}


@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        (replace(HERE, tvm="0.1"), f"with TVM 0.1, this is {HERE.tvm}"),
        (replace(HERE, cpu="zx81"), f"for zx81, this is {HERE.cpu}"),
        (replace(HERE, threads=99), "for 99 threads"),
        (replace(HERE, tvm="0.1", cpu="zx81"), "with TVM 0.1, .* and for zx81"),
    ],
)
def test_a_record_from_elsewhere_is_left_out_with_a_notice(conditions: Conditions, words: str, tmp_path: Path) -> None:
    store(tmp_path, "llvm", replace(RECORD, conditions=conditions))
    opened = open_database(tmp_path)
    assert opened.schedules() == {}
    (notice,) = opened.notices()
    assert re.search(words, notice)


def test_many_processes_store_at_the_same_time(tmp_path: Path) -> None:
    script = (
        "import pickle, sys\n"
        "from dataclasses import replace\n"
        "from pathlib import Path\n"
        "from harness.tuned.database import store\n"
        "record = pickle.loads(bytes.fromhex(sys.argv[3]))\n"
        "for n in range(5):\n"
        "    store(Path(sys.argv[1]), 'llvm', replace(record, task=f'{sys.argv[2]} {n}'))\n"
    )
    pickled = pickle.dumps(RECORD).hex()
    started = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path), str(n), pickled]) for n in range(3)]
    assert [process.wait(timeout=300) for process in started] == [0, 0, 0]
    assert len(open_database(tmp_path).records) == 15


def test_without_a_target_any_database_is_read(tmp_path: Path) -> None:
    other = replace(HERE, target="cuda")
    store(tmp_path / "found", "cuda", replace(RECORD, conditions=other))
    assert (open_database(tmp_path / "found").target, len(open_database(tmp_path / "found").records)) == ("cuda", 1)
    (tmp_path / "nothing found").mkdir()
    append_trials(tmp_path / "nothing found", [replace(TRIAL, conditions=other)])
    assert open_database(tmp_path / "nothing found").target == "cuda"
    with pytest.raises(HarnessError, match="for cuda, not for llvm"):
        open_database(tmp_path / "found", "llvm")


# --- what is wrong ---


def test_a_search_that_found_nothing_left_an_empty_database(tmp_path: Path) -> None:
    append_trials(tmp_path, [TRIAL])
    assert open_database(tmp_path).schedules() == {}
    assert [path.name for path in tmp_path.iterdir()] == ["trials.jsonl"]


def test_no_database_is_a_sentence(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(HarnessError, match=r"there is no tuning database in .*sam3-tvm tune --db"):
            open_database(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: "", "damaged"),
        (lambda text: text[: len(text) // 2], "damaged"),
        (lambda text: "[]", "damaged"),
        (lambda text: text.replace('"rows": 6', '"rows": "six"'), "damaged"),
        (lambda text: text.replace('"seconds": 0.5', '"seconds": 0'), "damaged"),
        (lambda text: text.replace('"seconds": 0.5', '"seconds": NaN'), "damaged"),
        (lambda text: text.replace('"task"', '"job"'), "damaged"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "has format 2, this version reads 1"),
        (lambda text: text.replace('"target": "llvm"\n}', '"target": "cuda"\n}'), "for cuda, not for llvm"),
    ],
)
def test_a_damaged_database_is_a_sentence_and_stays_as_it_is(
    change: Callable[[str], str], words: str, tmp_path: Path
) -> None:
    store(tmp_path, "llvm", RECORD)
    before = (tmp_path / FILE).read_text()
    after = change(before)
    assert after != before
    (tmp_path / FILE).write_text(after)
    with pytest.raises(HarnessError, match=words):
        open_database(tmp_path, "llvm")
    with pytest.raises(HarnessError, match=words):
        store(tmp_path, "llvm", RECORD)
    assert (tmp_path / FILE).read_text() == after


def test_bytes_that_are_no_text_are_a_sentence(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HarnessError, match="cannot read"):
        open_database(tmp_path)


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HarnessError, match=r"cannot write .*--db"):
        store(tmp_path / "file" / "db", "llvm", RECORD)


FULL_DISK = """
import pickle, resource, signal, sys
from pathlib import Path
from harness.core.errors import HarnessError
from harness.tuned.database import store
from harness.tuned.trials import append_trials
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
from dataclasses import replace
record, trial = pickle.loads(bytes.fromhex(sys.argv[2]))
for action in (
    lambda: store(Path(sys.argv[1]), "llvm", replace(record, task="x" * 2000)),
    lambda: append_trials(Path(sys.argv[1]), [trial] * 20),
):
    try:
        action()
    except HarnessError as error:
        print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
def test_a_full_disk_is_a_sentence_and_harms_nothing(tmp_path: Path) -> None:
    store(tmp_path, "llvm", RECORD)
    append_trials(tmp_path, [TRIAL])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path), pickle.dumps((RECORD, TRIAL)).hex()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("cannot write ") and "free some space" in first
    assert second.startswith("cannot write ") and "free some space" in second
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# --- the log ---


def test_trials_come_back(tmp_path: Path) -> None:
    failed = Trial(RECORD.task, {"rows": 7}, Kind.FAILED, HERE, reason="it crashed")
    append_trials(tmp_path, [TRIAL])
    append_trials(tmp_path, [failed, replace(TRIAL, confirmed=True)])
    (first, second, third), notices = read_trials(tmp_path)
    assert (first, third) == (TRIAL, replace(TRIAL, confirmed=True))
    assert second.reason == "it crashed" and math.isnan(second.seconds) and second.ratio == math.inf
    assert notices == []
    assert read_trials(tmp_path / "nothing") == ([], [])


@pytest.mark.parametrize("kept", [1, 20])
def test_half_a_line_at_the_end_is_left_out_and_written_over(kept: int, tmp_path: Path) -> None:
    append_trials(tmp_path, [TRIAL, TRIAL])
    log = tmp_path / "trials.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole + whole[:kept])
    trials, (notice,) = read_trials(tmp_path)
    assert trials == [TRIAL, TRIAL] and "half a line" in notice
    append_trials(tmp_path, [replace(TRIAL, task="next")])
    trials, notices = read_trials(tmp_path)
    assert [trial.task for trial in trials] == [RECORD.task, RECORD.task, "next"] and notices == []


def test_a_log_without_a_whole_line_is_begun_again(tmp_path: Path) -> None:
    (tmp_path / "trials.jsonl").write_bytes(b"{")
    append_trials(tmp_path, [TRIAL])
    assert read_trials(tmp_path) == ([TRIAL], [])


@pytest.mark.parametrize("line", ["{}", "[]", "nonsense", json.dumps({"task": 3})])
def test_a_damaged_log_is_a_sentence(line: str, tmp_path: Path) -> None:
    append_trials(tmp_path, [TRIAL])
    log = tmp_path / "trials.jsonl"
    log.write_text(f"{line}\n{log.read_text()}")
    with pytest.raises(HarnessError, match="damaged in line 1"):
        read_trials(tmp_path)
