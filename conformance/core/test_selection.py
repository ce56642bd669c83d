"""pytest selects the same cases as the command, by flag, marker and id; a missing device fails where it is required."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from conformance.support.inner_pytest import run_pytest
from conformance.support.sentences import sentence
from harness.cli.main import app
from harness.compiler.lowering.rope import STRATEGIES
from harness.compiler.targets import TARGETS
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.models.registry import models
from harness.models.sam3.components import COMPONENTS
from harness.models.sam31.components import COMPONENTS as SAM_3_1
from harness.models.selection import select, strategies_of

pytestmark = pytest.mark.part

MULTIPLEX = [component.name for component in SAM_3_1]
SUITE = "conformance/verify/test_components.py"


class Collection:
    """A plugin that notes what pytest collects."""

    ids: tuple[str, ...] = ()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.ids = tuple(item.nodeid for item in session.items)


def collected(*arguments: str, suite: str = SUITE) -> set[str]:
    """What is between the brackets of the ids that are collected."""
    run_pytest("--collect-only", suite, *arguments, plugin=(found := Collection()))
    return {name.partition("[")[2].rstrip("]") for name in found.ids if "[" in name}


def test_everything_is_selected_by_default() -> None:
    cases = select()
    assert {case.component for case in cases} == {*COMPONENTS, *MULTIPLEX}
    assert {case.target for case in cases} == set(TARGETS)
    assert {(case.component, case.strategy) for case in cases} == {
        (component, strategy) for component in (*COMPONENTS, *MULTIPLEX) for strategy in strategies_of(component)
    }
    assert len(set(cases)) == len(cases)


def test_control_strategy_is_for_rotary_encoding_only() -> None:
    rotary = {"vit", "vision_backbone", "image_encoder", "memory_attention", "multiplex_memory_attention"}
    assert {case.component for case in select(strategies=["none"])} == rotary
    assert all("real" in strategies_of(component) for component in COMPONENTS)
    assert set(strategies_of("vit")) == set(STRATEGIES)


def test_the_whole_model_has_to_be_named() -> None:
    cases = select(["end_to_end", "box_head"])
    whole = {case for case in cases if case.component == "end_to_end"}
    assert whole == {Case("end_to_end", strategy, target) for strategy in STRATEGIES for target in TARGETS}


def test_the_suite_runs_the_whole_model_with_the_default_strategy() -> None:
    suite = "conformance/models/sam3/test_end_to_end.py::test_end_to_end"
    asked = ("some", "all")
    assert collected(suite=suite) == {f"end_to_end-real-{name}-shallow-{which}" for name in TARGETS for which in asked}
    named = ("--strategy", "tensorir", "--scale", "full", "--target", "cuda")
    assert collected(*named, suite=suite) == {f"end_to_end-tensorir-cuda-full-{which}" for which in asked}
    assert collected("--target", "llvm", "-m", "not wide", suite=suite) == {"end_to_end-real-llvm-shallow-some"}
    assert collected("--component", "vit", suite=suite) == set()


def test_a_subject_is_selected_in_the_precisions_that_it_is_judged_in() -> None:
    halves = select(["video", "interactive", "end_to_end"], ["real"], ["llvm"], precisions=["bf16"])
    assert {case.component for case in halves} == {"interactive", "end_to_end"}
    both = select(["video"], ["real"], ["llvm"], precisions=["bf16", "fp32"])
    assert {case.precision for case in both} == {"fp32"}
    with pytest.raises(
        HarnessError,
        match=sentence("unjudged-precision", components="video", judged_precisions="fp32", precisions="bf16"),
    ):
        select(["video"], ["real"], ["llvm"], precisions=["bf16"])


def test_outliers_are_for_components_and_stand_in_the_id() -> None:
    cases = select(["box_head", "end_to_end"], targets=["llvm"], weights=["outliers", "seeded"])
    assert {case.id for case in cases if case.component == "box_head"} == {
        "box_head-real-llvm-shallow",
        "box_head-real-llvm-shallow-outliers",
    }
    assert {case.weights for case in cases if case.component == "end_to_end"} == {"seeded"}
    with pytest.raises(HarnessError, match=sentence("seeded-only", components="end_to_end", weights="outliers")):
        select(["end_to_end"], weights=["outliers"])
    with pytest.raises(HarnessError, match=sentence("unknown-name", kind="weights", name="outlier", hint="'outliers'")):
        select(["box_head"], weights=["outlier"])


QUICK = [name for name, subject in models()["sam3.1"].subjects.items() if not subject.long]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--weights", "outliers"), sentence("seeded-only", components=", ".join(QUICK))),
        (("--component", "vit"), sentence("unknown-name", kind="component", name="vit", hint="tri_neck")),
    ],
)
def test_a_model_stands_for_its_subjects(arguments: tuple[str, ...], expected: str) -> None:
    with pytest.raises(HarnessError, match=f"^{expected}"):
        CliRunner().invoke(app, ["verify", "--model", "sam3.1", *arguments], catch_exceptions=False)


def test_a_model_is_a_name_or_a_folder() -> None:
    with pytest.raises(HarnessError, match=sentence("not-a-model", value="sam31", models="sam3.1")):
        CliRunner().invoke(app, ["verify", "--model", "sam31"], catch_exceptions=False)


def test_no_case_is_of_the_scale_that_only_tests_compile() -> None:
    with pytest.raises(HarnessError, match=sentence("tiny-scale", scale="shallow or full")):
        select(["box_head"], scales=["tiny"])


def test_repeated_names_count_once() -> None:
    expected = (Case("box_head", "real", "llvm", "shallow", 7),)
    assert select(["box_head", "box_head"], targets=["llvm", "llvm"], seed=7) == expected


@pytest.mark.parametrize("name", ["", "VIT", "vision-backbone", "vit "])
def test_names_are_exact(name: str) -> None:
    with pytest.raises(HarnessError, match=sentence("unknown-name", kind="component", name=name)):
        select([name])


def test_flags_markers_and_ids_select_the_same_cases() -> None:
    expected = {"vit-real-metal-full"}
    assert collected("--component", "vit", "--strategy", "real", "--target", "metal", "--scale", "full") == expected
    assert collected("-m", "vit and real and metal and full", "--scale", "full", "--scale", "shallow") == expected
    assert collected("-k", "vit-real-metal-full", "--scale", "full") == expected
    box_head = ("--component", "box_head", "--target", "llvm", "--weights", "seeded", "--weights", "outliers")
    assert collected(*box_head, "-m", "outliers") == {"box_head-real-llvm-shallow-outliers"}


def test_only_cases_are_left_where_an_option_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    others = "conformance/core/test_processors.py"
    run_pytest("--collect-only", others, plugin=(without := Collection()))
    run_pytest("--collect-only", SUITE, others, "--component", "box_head", plugin=(named := Collection()))
    assert {name.partition("[")[2] for name in named.ids} == {f"box_head-real-{name}-shallow]" for name in TARGETS}
    assert f"{len(named.ids)}/{len(named.ids) + len(without.ids)} tests collected ({len(without.ids)} deselected)" in (
        capsys.readouterr().out
    )
    run_pytest("--collect-only", others, "--seed", "1", plugin=(seeded := Collection()))
    assert seeded.ids == without.ids != ()


def test_what_is_left_to_the_night_runs_where_it_is_named() -> None:
    daily = collected("-m", "llvm and not wide")
    assert {name.split("-")[0] for name in daily if "-real-" in name} == {*COMPONENTS} - {"vit", "vision_backbone"}
    assert {name for name in daily if "-real-" not in name} == {"memory_attention-none-llvm-shallow"}
    assert collected("-m", "llvm") == {case.id for case in select(targets=["llvm"])} > daily
    named = ("--component", "vit", "--strategy", "lowering", "--target", "llvm")
    assert collected(*named) == {"vit-lowering-llvm-shallow"}
    assert collected(*named, "-m", "not wide") == set()


def test_unknown_name_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_pytest(SUITE, "--component", "vti") == pytest.ExitCode.USAGE_ERROR
    assert "did you mean 'vit'" in capsys.readouterr().err
    assert run_pytest(SUITE, "--require-target", "cudaa") == pytest.ExitCode.USAGE_ERROR


# That it is skipped otherwise, every night: each takes a process of its own.
@pytest.mark.parametrize("required", [True, pytest.param(False, marks=pytest.mark.wide)])
def test_required_target_that_cannot_run_fails(required: bool, capsys: pytest.CaptureFixture[str]) -> None:
    missing = next((name for name, target in TARGETS.items() if target.compile_problem() or target.run_problem()), None)
    if missing is None:
        pytest.skip("every target runs on this machine")
    selection = (SUITE, "--component", "box_head", "--target", missing)
    options = ("--require-target", missing) if required else ()
    assert run_pytest(*selection, *options) == (pytest.ExitCode.TESTS_FAILED if required else pytest.ExitCode.OK)
    assert (f"--require-target {missing}" in capsys.readouterr().out) == required
