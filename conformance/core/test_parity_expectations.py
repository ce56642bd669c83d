"""Expectations: the file is checked, and both sides are enforced: unexpected failures and unexpected passes."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from conformance.support.sentences import sentence
from harness.compiler.lowering.rope import STRATEGIES
from harness.compiler.targets import TARGETS
from harness.core.case import Case, Scale, Weights
from harness.core.errors import HarnessError
from harness.core.expectations import (
    Check,
    Expectation,
    check,
    expectation_for,
    load_expectations,
)
from harness.core.outcome import CaseError, Outcome, Stage, Status, Verdict, VerdictKind
from harness.models.registry import subjects

REPOSITORY = Path(__file__).parents[2]
FIXTURE = REPOSITORY / "fixtures" / "expectations.toml"
COMPLEX = "input_type torch.complex64 is not handled yet"

FAILURE = """
[[expect]]
component = ["vit", "vision_backbone"]
strategy = "none"
target = "*"
scale = "*"
status = "failed"
stage = "import"
error = "NotImplementedError"
message = "complex64 is not handled"
why = "no complex dtype"
"""
ORACLE = """
[[expect]]
component = "vit"
strategy = "real"
target = "llvm"
scale = "full"
judge = "oracle"
outputs = ["features"]
why = "large activations"
"""


def load(tmp_path: Path, text: str, **options: object) -> tuple[Expectation, ...]:
    path = tmp_path / "expectations.toml"
    path.write_text(text)
    return load_expectations(path, **options)


def verdict(name: str = "features", kind: VerdictKind = VerdictKind.STRICT) -> Verdict:
    reason = "" if kind is VerdictKind.STRICT else "3 of 4 elements outside"
    return Verdict(name, (4,), "float32", 4, 0, 0.0, 0.0, 0.0, 0.0, 90.0, 1.0, 1.0, kind, reason)


def passed(*verdicts: Verdict) -> Outcome:
    return Outcome(Stage.JUDGE, Status.PASSED, verdicts=verdicts)


def failed(stage: Stage, error: str = "NotImplementedError", message: str = COMPLEX, **options: object) -> Outcome:
    status = options.pop("status", Status.FAILED)
    return Outcome(stage, status, error=CaseError(error, message), **options)


CONTROL = Case("vit", "none", "llvm")
REAL = Case("vit", "real", "llvm", "full")


# --- the file of the project ---


def test_the_project_expects_the_complex_control_to_fail_at_import():
    known = {
        "component": subjects(),
        "strategy": STRATEGIES,
        "target": TARGETS,
        "scale": list(Scale),
        "weights": list(Weights),
    }
    expectations = load_expectations(FIXTURE, known)
    for component in ("vit", "vision_backbone", "image_encoder", "memory_attention", "end_to_end"):
        for scale, weights in product(Scale, Weights):
            case = Case(component, "none", "llvm", scale.value, weights=weights.value)
            expectation = expectation_for(case, expectations)
            assert expectation is not None and expectation.why
            assert check(case, failed(Stage.IMPORT), expectation) == Check(expected=True)
            for wrong in (
                passed(verdict()),
                failed(Stage.COMPILE),
                failed(Stage.IMPORT, error="TVMError"),
                failed(Stage.IMPORT, message="input_type torch.complex128 is not handled yet"),
                failed(Stage.IMPORT, message="input_type torchXcomplex64 is not handled yet"),
            ):
                assert check(case, wrong, expectation).expected is False


def test_the_expectations_need_neither_torch_nor_tvm():
    code = (
        "import sys; from pathlib import Path; from harness.core.expectations import load_expectations;"
        f"load_expectations(Path({str(FIXTURE)!r})); print('torch' in sys.modules, 'tvm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# --- both sides ---


def test_without_an_entry_only_a_strict_pass_is_expected():
    case = Case("box_head", "real", "llvm")
    assert check(case, passed(verdict(), verdict("more")), None).expected is True
    for outcome, words in (
        (failed(Stage.IMPORT, "TVMError", "boom\nsecond line"), "failed at import with TVMError: boom"),
        (Outcome(Stage.COMPILE, Status.CRASHED), "crashed at compile"),
        (Outcome(Stage.RUN, Status.TIMED_OUT), "timed out at run"),
        (Outcome(Stage.RUN, Status.OUT_OF_MEMORY), "out of memory at run"),
        (passed(verdict(), verdict("boxes", VerdictKind.ORACLE)), "boxes is oracle"),
        (passed(verdict("boxes", VerdictKind.FAILED)), "boxes is failed: 3 of 4 elements outside"),
        (passed(verdict("boxes", VerdictKind.NOT_JUDGEABLE)), "boxes is not_judgeable"),
        (passed(), "without a single judged output"),
    ):
        result = check(case, outcome, None)
        assert result.expected is False
        assert words in result.sentence
        assert "second line" not in result.sentence


def test_with_outliers_the_judge_says_where_the_oracle_decides():
    by_oracle = passed(verdict(), verdict("boxes", VerdictKind.ORACLE))
    case = Case("box_head", "real", "llvm", weights="outliers")
    assert check(case, by_oracle, None).expected is True
    assert check(case, passed(verdict()), None).expected is True
    wrong = check(case, passed(verdict("boxes", VerdictKind.FAILED)), None)
    assert "right by the oracle where PyTorch itself leaves the strict gate" in wrong.sentence
    assert check(replace(case, weights="seeded"), by_oracle, None).expected is False


def test_an_entry_is_about_seeded_weights_unless_it_says_otherwise(tmp_path):
    outliers = replace(CONTROL, weights="outliers")
    assert [entry.matches(outliers) for entry in load(tmp_path, FAILURE)] == [False]
    assert [entry.matches(outliers) for entry in load(tmp_path, FAILURE + 'weights = "*"\n')] == [True]


def test_a_predicted_failure_is_expected_and_nothing_else(tmp_path):
    (expectation,) = load(tmp_path, FAILURE)
    assert check(CONTROL, failed(Stage.IMPORT), expectation) == Check(expected=True)
    for outcome, words in (
        (passed(verdict()), "unexpected pass"),
        (failed(Stage.EXPORT), "failed at export"),
        (failed(Stage.COMPILE), "failed at compile"),
        (failed(Stage.IMPORT, error="TypeError"), "TypeError"),
        (failed(Stage.IMPORT, message="another message"), "another message"),
        (failed(Stage.IMPORT, status=Status.CRASHED), "crashed at import"),
        (failed(Stage.IMPORT, status=Status.TIMED_OUT), "timed out at import"),
        (Outcome(Stage.IMPORT, Status.FAILED), "failed at import"),
    ):
        result = check(CONTROL, outcome, expectation)
        assert result.expected is False, words
        assert words in result.sentence
        assert "line 2" in result.sentence


def test_unavailable_is_neither(tmp_path):
    outcome = Outcome(Stage.RUN, Status.UNAVAILABLE, error=CaseError("Unavailable", "no GPU here"))
    (expectation,) = load(tmp_path, FAILURE)
    for case, entry in ((CONTROL, expectation), (REAL, None)):
        assert check(case, outcome, entry) == Check(expected=None, sentence="no GPU here")


def test_the_oracle_verdict_is_expected_where_an_entry_says_so(tmp_path):
    (expectation,) = load(tmp_path, ORACLE)
    oracle = verdict(kind=VerdictKind.ORACLE)
    assert check(REAL, passed(oracle, verdict("more")), expectation).expected is True
    for outcome, words in (
        (passed(verdict(), verdict("more")), "unexpected pass"),
        (passed(oracle, verdict("more", VerdictKind.ORACLE)), "more is oracle"),
        (passed(verdict(kind=VerdictKind.FAILED)), "features is failed"),
        (passed(verdict("other")), "does not have"),
        (passed(), "without a single judged output"),
        (failed(Stage.JUDGE), "failed at judge"),
    ):
        result = check(REAL, outcome, expectation)
        assert result.expected is False, words
        assert words in result.sentence


def test_what_varies_among_processors_may_be_strict_and_nothing_worse(tmp_path):
    (expectation,) = load(tmp_path, ORACLE + "varies = true\n")
    assert check(REAL, passed(verdict()), expectation).expected is True
    assert check(REAL, passed(verdict(kind=VerdictKind.ORACLE)), expectation).expected is True
    assert check(REAL, passed(verdict(kind=VerdictKind.FAILED)), expectation).expected is False
    assert "does not have" in check(REAL, passed(verdict("other")), expectation).sentence


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f'{ORACLE}varies = "yes"', sentence("bad-expectation", error="`varies`")),
        (f"{FAILURE}varies = true", sentence("bad-expectation", problem="judge")),
    ],
)
def test_where_nothing_can_vary(tmp_path, text, words):
    with pytest.raises(HarnessError, match=words):
        load(tmp_path, text)


def test_a_predicted_wrong_result_names_the_outputs_that_are_wrong(tmp_path):
    text = FAILURE.replace('stage = "import"', 'stage = "judge"').replace('error = "NotImplementedError"\n', "")
    text = text.replace('message = "complex64 is not handled"', 'outputs = ["masks"]')
    (expectation,) = load(tmp_path, text)
    wrong = (verdict("masks", VerdictKind.FAILED), verdict("semantic"))
    outcome = Outcome(Stage.JUDGE, Status.FAILED, verdicts=wrong)
    assert check(CONTROL, outcome, expectation).expected is True
    both = (verdict("masks", VerdictKind.FAILED), verdict("semantic", VerdictKind.FAILED))
    other = (verdict("masks"), verdict("semantic", VerdictKind.FAILED))
    for verdicts in (both, other):
        result = check(CONTROL, Outcome(Stage.JUDGE, Status.FAILED, verdicts=verdicts), expectation)
        assert result.expected is False


def test_an_expectation_of_another_case_is_a_mistake_of_the_caller(tmp_path):
    (expectation,) = load(tmp_path, FAILURE)
    with pytest.raises(ValueError, match="not about"):
        check(REAL, passed(verdict()), expectation)


# --- patterns ---


def test_patterns_are_exact_names_or_everything(tmp_path):
    expectations = load(tmp_path, FAILURE + ORACLE)
    assert expectation_for(CONTROL, expectations) is expectations[0]
    assert expectation_for(Case("vision_backbone", "none", "metal", "full", 7), expectations) is expectations[0]
    assert expectation_for(REAL, expectations) is expectations[1]
    for names in (("image_encoder", "none", "llvm"), ("vit", "real", "llvm", "shallow"), ("vi", "none", "llvm")):
        assert expectation_for(Case(*names), expectations) is None


def test_a_star_is_a_wildcard_only_alone(tmp_path):
    (expectation,) = load(tmp_path, FAILURE.replace('["vit", "vision_backbone"]', '"vi*"'))
    assert not expectation.matches(CONTROL)


# --- bad files ---


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[expect]\n", sentence("not-toml")),
        ("x = 1\n", "unknown key 'x'"),
        ("[expect]\ncomponent = 'vit'\n", "not a list of tables"),
        ("expect = [1]\n", "not a list of tables"),
        (FAILURE.replace("why", "because"), "line 2: Object contains unknown field `because`"),
        (FAILURE.replace('why = "no complex dtype"', ""), "line 2: Object missing required field `why`"),
        (FAILURE.replace('"no complex dtype"', '" "'), "line 2: `why`: Expected `str` matching"),
        (FAILURE.replace('strategy = "none"', ""), "line 2: Object missing required field `strategy`"),
        (FAILURE.replace('strategy = "none"', "strategy = []"), "line 2: `strategy`: Expected `array` of length >= 1"),
        (FAILURE.replace('strategy = "none"', "strategy = 3"), "line 2: `strategy`: Expected `array`, got `int`"),
        (FAILURE.replace('"failed"', '"passed"'), "line 2: `status` is 'passed'"),
        (FAILURE.replace('"failed"', '"unavailable"'), "line 2: `status` is 'unavailable'"),
        (FAILURE.replace('stage = "import"', ""), "line 2: `stage` is missing"),
        (FAILURE.replace('"import"', '"imports"'), "line 2: `stage`: Invalid enum value 'imports'"),
        (FAILURE.replace('error = "NotImplementedError"', ""), "line 2: a failure needs `error` and `message`"),
        (FAILURE.replace("complex64 is", "complex64 ("), "line 2: `message` is not a regular expression"),
        (FAILURE + ORACLE.replace('"oracle"', '"kindly"'), "line 13: `judge`: Invalid enum value 'kindly'"),
        (ORACLE + 'status = "failed"\n', "line 2: `judge` and 'status' exclude each other"),
        (FAILURE + 'outputs = ["masks"]\n', "line 2: `outputs` needs"),
        (FAILURE + FAILURE, sentence("case-named-twice", where="line 13")),
        (FAILURE + FAILURE.replace('["vit", "vision_backbone"]', '"*"'), sentence("case-named-twice", where="line 13")),
    ],
)
def test_a_bad_file_ends_in_one_sentence_with_the_place(tmp_path, text, words):
    with pytest.raises(HarnessError) as problem:
        load(tmp_path, text)
    assert re.search(words, str(problem.value))
    assert "expectations.toml" in str(problem.value)
    assert "\n" not in str(problem.value)


def test_names_that_no_registry_knows_are_refused(tmp_path):
    known = {"component": ["vit"], "scale": list(Scale)}
    with pytest.raises(HarnessError, match=sentence("unknown-name", field="component", value="vision_backbone")):
        load(tmp_path, FAILURE, registered_names=known)
    with pytest.raises(HarnessError, match=sentence("unknown-name", field="scale", value="huge")):
        load(tmp_path, ORACLE.replace('"full"', '"huge"'), registered_names=known)
    assert len(load(tmp_path, ORACLE, registered_names=known)) == 1


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xff"])
def test_a_file_that_cannot_be_read_ends_in_one_sentence(tmp_path, content):
    path = tmp_path / "expectations.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(HarnessError, match=sentence("unreadable-expectations")):
        load_expectations(path)


def test_an_empty_file_expects_strict_passes(tmp_path):
    assert load(tmp_path, "# nothing yet\n") == ()
