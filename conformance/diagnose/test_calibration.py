"""The calibration: a fault is seen for what it is, none is seen where there is none, and a run goes on where it was."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.calibration import suite
from conformance.calibration.__main__ import main
from conformance.calibration.faults import Fault, drawn
from conformance.calibration.layers import LAYERS
from conformance.calibration.measuring import CRASHED, OUTPUTS, UNREACHED, add, measured, records
from conformance.calibration.preparing import Observed, Prepared, prepared
from conformance.calibration.sources import HARNESS, KINDS, PARTS, Edit, Place, edits, marked, part_of
from conformance.support.examples import examples

pytestmark = pytest.mark.usefixtures("forked_processes")

SEED = 0


@pytest.fixture(scope="module")
def component() -> Iterator[tuple[Prepared, Observed]]:
    with prepared("block") as found:
        yield found


def found(layer: str, kind: str, component: tuple[Prepared, Observed]) -> dict[str, Any]:
    return measured(Fault(SEED, 0, "block", layer, kind, 0.5, 0.9, 0.5), *component)


def test_no_fault_is_not_seen(component: tuple[Prepared, Observed]) -> None:
    assert found("nothing", "nothing", component)["ended"] == UNREACHED


def test_faults_are_judged_located_and_explained(component: tuple[Prepared, Observed]) -> None:
    legalized = found("legalization", "swapped operands", component)
    assert legalized["ended"] == OUTPUTS, legalized
    assert legalized["diagnosis"]["located"] and legalized["diagnosis"]["right"], legalized
    unwritten = found("legalization", "loop ends early", component)  # whatever memory held there
    assert unwritten["diagnosis"]["located"] and unwritten["diagnosis"]["right"], unwritten
    tiny = found("program", "factor 1 + 1e-7", component)
    assert tiny["ended"] != UNREACHED and tiny["changed"] is not None
    assert tiny["r_rms"] < 1.5 or tiny["ended"] == OUTPUTS
    unstable = found("reference", "differs from itself", component)
    assert unstable["ended"] == OUTPUTS and "differs from its own second run" in unstable["reason"]
    assert not unstable["changed"]


def test_a_folder_with_files_of_another_compile_is_refused_or_judged_as_wrong() -> None:
    with prepared("clip") as (clip, right):
        for place, ended in ((0.2, "load"), (0.99, OUTPUTS)):
            record = measured(Fault(SEED, 0, "clip", "folder", "files of another compile", place, 0, 0), clip, right)
            assert record["ended"] == ended, record
    assert record["where"].count(",") == 2


def test_a_run_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "calibration.jsonl"
    layers = {name: (layer.weight, layer.kinds) for name, layer in LAYERS.items()}
    first, second = (drawn(SEED, n, ["block"], layers) for n in range(2))
    add(file, {"fault": first.to_json(), "where": "", "ended": UNREACHED})
    with file.open("a") as half:
        half.write('{"fault": {"seed"')
    asked = ["--faults", "2", "--component", "block", "--file", str(file), "--seed", str(SEED)]
    assert main(asked) == 0
    assert [record["fault"] for record in records(file)] == [first.to_json(), second.to_json()]
    printed = capsys.readouterr().out
    assert "fault 1 of 2" in printed and "fault 0 of 2" not in printed
    assert main([*asked, "--table"]) == 0
    assert capsys.readouterr().out.strip() in printed


def test_the_layer_of_the_suite_that_sees_a_fault_is_named(tmp_path: Path) -> None:
    file, test = "parity/metrics.py", "conformance/parity/test_parity_metrics.py"
    source, checkout, marks = (HARNESS / file).read_bytes(), suite.clone(tmp_path / "checkout"), tmp_path / "marks"

    def place(old: bytes, new: str) -> Place:
        start = source.index(old)
        return Place(file, file, "other number", Edit(source[:start].count(b"\n") + 1, start, start + len(old), new))

    wrong = place(b"x, y = x[finite], y[finite]", "pass")
    equal = place(b"outside = count = mismatches = 0", "count = outside = mismatches = 0")
    other = "app/ui/guard.py"
    elsewhere = next(Place(other, other, kind, edit) for kind, edit in edits((HARNESS / other).read_bytes()))
    with_marks = suite.clone(tmp_path / "marked")
    suite.mark(with_marks, [wrong, elsewhere, equal], marks)
    assert (
        suite.files_of(checkout, [test], suite.SMOKE) == [test] and suite.files_of(checkout, [test], suite.TEST) == []
    )
    assert suite.reached(marks, with_marks, suite.SMOKE, test, seconds=600) == [0, 2]

    def measured(place: Place, *tests: str) -> dict[str, Any]:
        return suite.measure(place, checkout, {suite.SMOKE: tests, suite.TEST: []}, seconds=600)

    found = [measured(wrong, test), measured(equal, test), measured(elsewhere)]
    assert [record["ended"] for record in found] == [suite.SMOKE, suite.NOT_SEEN, suite.NOT_REACHED]
    assert [record["test"].partition("::")[0] for record in found] == [test, "", ""]
    assert "| parity/metrics.py | 2 | 1 | 0 | 0 | 1 | 0 |" in suite.render(found)


def test_a_fault_beyond_its_time_is_the_end_of_itself_alone(tmp_path: Path) -> None:
    file = tmp_path / "calibration.jsonl"
    asked = ["--faults", "2", "--component", "block", "--layer", "nothing", "--seconds", "0.05", "--file", str(file)]
    assert main(asked) == 0
    ends = [(record["fault"]["number"], record["ended"], record["problem"].split(",")[0]) for record in records(file)]
    assert ends == [(number, CRASHED, "the process died of SIGALRM") for number in range(2)]


@cache
def sources() -> list[Path]:
    """Returns the files that can be changed."""
    return [path for path in sorted(HARNESS.rglob("*.py")) if any(True for _ in edits(path.read_bytes()))]


@st.composite
def changes(draw: st.DrawFn) -> tuple[bytes, str, Edit]:
    """Draws the source of a file, and a kind of fault with its edit there."""
    source = draw(st.sampled_from(sources())).read_bytes()
    return source, *draw(st.sampled_from(list(edits(source))))


@pytest.mark.law
@given(changes())
@examples(50)
def test_a_change_of_a_source_file_is_one_expression_of_code_that_still_parses(change: tuple[bytes, str, Edit]) -> None:
    source, kind, edit = change
    changed = edit.applied(source)
    assert kind in KINDS
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
    assert changed.startswith(source[: edit.start]) and changed.endswith(source[edit.end :])


@pytest.mark.law
@given(changes())
@examples(50)
def test_a_mark_runs_before_the_statement_that_an_edit_is_in(change: tuple[bytes, str, Edit]) -> None:
    source, _, edit = change
    changed = marked(source, [(edit, "mark")])
    lines = changed.splitlines()
    number = next(number for number, line in enumerate(lines) if line.strip() == b"mark")
    assert lines[:number] + lines[number + 1 :] == source.splitlines()
    blocks = [
        value for node in ast.walk(ast.parse(changed)) for _, value in ast.iter_fields(node) if isinstance(value, list)
    ]
    following = [
        after
        for block in blocks
        for before, after in itertools.pairwise(block)
        if isinstance(before, ast.Expr) and before.lineno == number + 1
    ]
    assert [after.lineno <= edit.line + 1 <= after.end_lineno for after in following] == [True]


@pytest.mark.law
def test_every_part_has_files_and_a_file_belongs_to_the_part_that_names_it_most_closely() -> None:
    parts = {part_of(str(path.relative_to(HARNESS))) for path in sources()}
    assert parts == {*PARTS, None}
    assert part_of("compiler/schedules/cpu/memory.py") == "memory"
    assert part_of("compiler/lowering/rope/real.py") == "strategies"
    assert part_of("app/ui/sessions.py") is None
