"""The file of a budget: what is written is read, and what is no budget is one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance.support.sentences import sentence
from harness.core.budget import Budget, check_groups, read_budget, read_budgets
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.settings import REPOSITORY

BUDGET = Budget("sam3", "box_head", "shallow", "llvm", "bf16", 0.5, ("a.0", "a.1"))
CASE = Case("box_head", "real", "llvm", precision="bf16")


def written(folder: Path, name: str = "budget.json", **changed: object) -> Path:
    file = folder / name
    file.write_text(json.dumps(BUDGET.to_json() | changed))
    return file


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_budget(written(tmp_path, measured={"anything": 1})) == BUDGET


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", sentence("no-budget")),
        ("[]", sentence("no-budget")),
        ("{}", sentence("no-budget")),
        (json.dumps(BUDGET.to_json() | {"format": 7}), sentence("budget-version", value=7)),
        (json.dumps(BUDGET.to_json() | {"float32": [1]}), sentence("damaged-budget", error="`float32[0]`")),
        (json.dumps(BUDGET.to_json() | {"limit": "much"}), sentence("damaged-budget", error="`limit`")),
        (
            json.dumps({k: v for k, v in BUDGET.to_json().items() if k != "scale"}),
            sentence("damaged-budget", error="`scale`"),
        ),
        (json.dumps(BUDGET.to_json() | {"limit": 10**400}), sentence("damaged-budget")),
        (json.dumps(BUDGET.to_json() | {"precision": "fp32"}), sentence("no-half-precision", precision="fp32")),
    ],
)
def test_another_file_is_one_sentence(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "budget.json"
    file.write_text(content)
    with pytest.raises(HarnessError, match=message):
        read_budget(file)


@pytest.mark.parametrize(
    "file", sorted((REPOSITORY / "fixtures" / "precision").glob("*.json")), ids=lambda file: file.stem
)
def test_the_kept_budgets_hold_their_limits(file: Path) -> None:
    budget, measured = read_budget(file), json.loads(file.read_text())["measured"]
    assert file.stem == "-".join((budget.component, budget.scale, budget.target, budget.precision))
    assert all(errors["chosen"] <= budget.limit for errors in measured["outputs"].values())
    assert [group["name"] for group in measured["groups"] if group["float32"]] == list(budget.float32)


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=sentence("unreadable-budget", file="none.json")):
        read_budget(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            Case("box_head", "real", "llvm"),
            sentence("budget-for-other", field="precision", expected="bf16", actual="fp32"),
        ),
        (
            Case("box_head", "real", "cuda", precision="bf16"),
            sentence("budget-for-other", field="target", expected="llvm", actual="cuda"),
        ),
        (
            Case("box_head", "real", "llvm", "full", precision="bf16"),
            sentence("budget-for-other", field="scale", expected="shallow", actual="full"),
        ),
    ],
)
def test_a_budget_for_something_else_is_one_sentence(other: Case, message: str) -> None:
    BUDGET.check_fits(CASE, "sam3", Path("budget.json"))
    with pytest.raises(HarnessError, match=message):
        BUDGET.check_fits(other, "sam3", Path("budget.json"))
    with pytest.raises(HarnessError, match=sentence("budget-for-model", model="sam3", model2="other")):
        BUDGET.check_fits(CASE, "other", Path("budget.json"))


def test_several_budgets_are_for_several_components_of_one_model(tmp_path: Path) -> None:
    first, other = written(tmp_path), written(tmp_path, "other.json", component="scoring_head")
    assert [budget.component for budget in read_budgets([first, other]).values()] == ["box_head", "scoring_head"]
    with pytest.raises(HarnessError, match=sentence("two-budgets", component="box_head")):
        read_budgets([first, written(tmp_path, "again.json")])
    with pytest.raises(HarnessError, match=sentence("budgets-of-two-models", model="sam3", model2="another")):
        read_budgets([first, written(tmp_path, "model.json", component="x", model="another")])


def test_a_group_that_nothing_has_is_one_sentence() -> None:
    check_groups({"a", "b"}, [{"a"}, {"b"}], "box_head")
    with pytest.raises(HarnessError, match=sentence("unknown-group", unknown="b", subject="box_head", more=1)):
        check_groups({"a", "b", "c"}, [{"a"}], "box_head")


def test_a_whole_model_need_not_have_every_group_of_its_components() -> None:
    """What makes the smallest map of features is not compiled, because nothing reads it there."""
    check_groups({"a", "b", "c"}, [{"a"}, set()], "what is compiled", partial=True)
    check_groups((), [set()], "what is compiled", partial=True)
    with pytest.raises(HarnessError, match=sentence("unknown-group", unknown="b", more=1)):
        check_groups({"b", "c"}, [set()], "what is compiled", partial=True)
