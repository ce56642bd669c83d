"""The database of tuned schedules: what is written comes back, and whatever is wrong with it is one sentence."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.support.sentences import sentence
from conformance.support.tuning import database_of, record
from harness.compiler.tuned import database
from harness.compiler.tuned.database import (
    FILE,
    TUNED,
    Conditions,
    choose_schedules,
    current_conditions,
    find_default_database,
    open_database,
)
from harness.core.errors import HarnessError

pytestmark = pytest.mark.smoke

HERE = current_conditions("llvm")
RECORD = record("product 1x2x3x4 left", {"rows": 6, "vectors": 4})
UNTUNED = record("attention 1x2", {}, seconds=0.75)


def test_a_record_comes_back_and_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    database_of(folder, RECORD, UNTUNED)
    opened = open_database(folder, "llvm")
    assert opened.records == (UNTUNED, RECORD) and opened.notices() == []
    chosen = choose_schedules(folder, "llvm")
    assert chosen.schedules == {RECORD.task: RECORD.schedule}
    assert chosen.origin.startswith("tuned: 1 from the database made")
    for nothing in (choose_schedules(folder, "cuda"), choose_schedules(None, "llvm")):
        assert (nothing.schedules, nothing.origin) == ({}, "untuned: the default ones")


def test_a_record_takes_the_place_of_its_kernels_alone(tmp_path: Path) -> None:
    elsewhere = replace(RECORD, conditions=replace(HERE, tvm="0.1"))
    later = replace(RECORD, seconds=0.7, schedule={"rows": 4})
    made = database_of(tmp_path, elsewhere, UNTUNED, RECORD, later)
    assert made.records == open_database(tmp_path).records == (UNTUNED, elsewhere, later)


def test_the_database_of_this_machine_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "TUNED", tmp_path / "nothing")
    assert find_default_database("llvm") is None
    monkeypatch.setattr(database, "TUNED", tmp_path)
    database_of(tmp_path / replace(HERE, threads=99).tag, RECORD)
    assert find_default_database("llvm") is None
    database_of(tmp_path / HERE.tag, UNTUNED)
    assert find_default_database("llvm") == tmp_path / HERE.tag and find_default_database("cuda") is None
    origin = choose_schedules(tmp_path / HERE.tag, "llvm").origin
    assert origin == f"untuned: the default ones, the database {HERE.tag} has none that is better"


def test_the_databases_of_the_repository_are_read_and_lie_where_they_are_found(tmp_path: Path) -> None:
    """A record that is stored again changes no byte, so that a difference shows what was tuned and nothing else."""
    folders = list(TUNED.iterdir())
    assert folders
    for folder in folders:
        copied = open_database(shutil.copytree(folder, tmp_path / folder.name), "llvm")
        records = copied.records
        assert records and {one.conditions.tag for one in records} == {folder.name}
        assert all(one.schedule and one.gain > 1 for one in records)
        copied.store(records[0])
        assert (copied.path / FILE).read_bytes() == (folder / FILE).read_bytes()


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
    opened = database_of(tmp_path, replace(RECORD, conditions=conditions))
    assert opened.matching_records() == {}
    (notice,) = opened.notices()
    assert re.search(words, notice)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: "", sentence("damaged-database")),
        (lambda text: text[: len(text) // 2], sentence("damaged-database")),
        (lambda text: "[]", sentence("damaged-database")),
        (lambda text: text.replace('"rows": 6', '"rows": "six"'), sentence("damaged-database")),
        (lambda text: text.replace('"seconds": 0.5', '"seconds": 0'), sentence("damaged-database")),
        (lambda text: text.replace('"seconds": 0.5', '"seconds": NaN'), sentence("damaged-database")),
        (lambda text: text.replace('"task"', '"job"'), sentence("damaged-database")),
        (lambda text: text.replace("product", "\udcff"), sentence("damaged-database")),
        (lambda text: text.replace('"format": 1', '"format": 2'), sentence("database-version", version="format 2")),
        (
            lambda text: text.replace('"target": "llvm"\n}', '"target": "cuda"\n}'),
            sentence("foreign-database", target="cuda", target2="llvm"),
        ),
    ],
)
def test_a_damaged_or_foreign_database_is_a_sentence(change: Callable[[str], str], words: str, tmp_path: Path) -> None:
    database_of(tmp_path, RECORD)
    before = (tmp_path / FILE).read_text(encoding="utf-8")
    after = change(before)
    assert after != before
    (tmp_path / FILE).write_bytes(after.encode("utf-8", "surrogateescape"))
    with pytest.raises(HarnessError, match=words):
        open_database(tmp_path, "llvm")


def test_no_database_is_a_sentence(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(HarnessError, match=sentence("no-database", path=path)):
            open_database(path)
    (tmp_path / FILE).mkdir()
    with pytest.raises(HarnessError, match=sentence("unreadable-database", file=FILE)):
        open_database(tmp_path)
