"""The whole model, compiled, against upstream's `Sam3Processor`; and that its judge sees what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from conformance.support.sentences import sentence
from conformance.support.whole import Answer, upstream_answers, verified
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.outcome import Status, VerdictKind
from harness.core.processes.call import Template
from harness.core.settings import SEEDED, Settings
from harness.models.sam3.detections import SCORE, UNDECIDED
from harness.models.sam3.end_to_end import FINAL, RAW
from harness.models.sam3.end_to_end.questions import QUESTIONS, Question
from harness.models.sam3.end_to_end.script import SCRIPTS, judge_answer, prompts
from harness.models.sam3.fixtures import read_questions
from harness.models.sam3.source import Arrays
from harness.models.sam3.upstream import upstream
from harness.parity.references import Reference
from harness.runtime.sam3.images import load_image

SUBJECT = "end_to_end"
DAILY = ("tall",)
"""A text about a photograph of another form than the component's; every night all questions are asked.

By day boxes and points are upstream's when they reach the model (`test_runtime_prompts.py`), its answer to text, point
and box is upstream's (`test_artifact.py`), a batch is its texts one by one (`test_runtime_model.py`), and
components are held to float64.
"""
QUESTIONS_OF = pytest.mark.parametrize(
    "names", [pytest.param(DAILY, id="some"), pytest.param((), id="all", marks=pytest.mark.wide)]
)


@QUESTIONS_OF
def test_end_to_end(
    whole_case: Case,
    names: tuple[str, ...],
    verification_settings: Settings,
    verifying_process: Template,
    request: pytest.FixtureRequest,
) -> None:
    result = verified(whole_case, verification_settings, names, verifying_process, request)
    if result.outcome.status is Status.PASSED:
        verdicts = [verdict.name for verdict in result.outcome.verdicts]
        questions = SCRIPTS[0].questions(whole_case, SEEDED)
        answers = [name for one in questions if not names or one.name in names for name in one.answers]
        assert verdicts == [f"{answer}/{name}" for answer in answers for name in (*RAW, *FINAL)]


def upstreams(case: Case, names: tuple[str, ...] = DAILY) -> Iterator[Answer]:
    """What upstream answers, one question after the other."""
    return upstream_answers(SCRIPTS[0], case, judge_answer, names)


@QUESTIONS_OF
def test_the_threshold_decides_something_in_every_answer(whole_fp32_case: Case, names: tuple[str, ...]) -> None:
    for answer in upstreams(whole_fp32_case, names):
        kept = answer.first["found/queries"]
        assert 0 < kept.sum() < kept.size, answer.name
        raw = {name: array.astype(np.float64) for name, array in (answer.reference.exact or answer.first).items()}
        scores = sigmoid(raw["logits"][0, :, 0]) * sigmoid(raw["presence"][0])
        assert np.array_equal(scores > 0.5, kept), answer.name
        # Twice what a score may be off: no correct model decides otherwise.
        assert np.abs(scores - 0.5).min() > 2 * SCORE, answer.name
        masks = answer.first["found/masks"]
        assert 0.1 < masks.mean() < 0.9, answer.name
        assert answer.first["undecided"].mean() < 0.001, answer.name


def sigmoid(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = 1 / (1 + np.exp(-x))
    return result


@cache
def first(case: Case) -> Answer:
    """The answer to the first question; whoever changes an array changes a copy."""
    return next(upstreams(case))


def as_compiled(answer: Answer) -> Arrays:
    """Upstream's own answer, in the form of the compiled model's."""
    return {name: answer.first[name].copy() for name in (*RAW, *FINAL)}


def flip_a_pixel(actual: Arrays, answer: Answer) -> None:
    decided = np.argwhere(~answer.first["undecided"])
    at = tuple(decided[len(decided) // 2])
    actual["found/masks"][at] ^= True


def shift_a_box(actual: Arrays, answer: Answer) -> None:
    actual["found/boxes"][-1, 2] += 0.02


def change_a_score(actual: Arrays, answer: Answer) -> None:
    actual["found/scores"][0] += 2e-5


def drop_a_query(actual: Arrays, answer: Answer) -> None:
    actual["found/queries"][np.flatnonzero(actual["found/queries"])[1]] = False
    for name in ("found/masks", "found/boxes", "found/scores"):
        actual[name] = np.delete(actual[name], 1, axis=0)


def swap_two_queries(actual: Arrays, answer: Answer) -> None:
    for name in ("found/masks", "found/boxes", "found/scores"):
        actual[name][[0, 1]] = actual[name][[1, 0]]


def change_a_mask_logit(actual: Arrays, answer: Answer) -> None:
    actual["masks"][0, 7, 100, 200] += 1e-3


Fault = Callable[[Arrays, Answer], None]
FAULTS: dict[Fault, set[str]] = {
    flip_a_pixel: {"found/masks"},
    shift_a_box: {"found/boxes"},
    change_a_score: {"found/scores"},
    drop_a_query: set(FINAL),
    swap_two_queries: {"found/masks", "found/boxes", "found/scores"},
    change_a_mask_logit: {"masks"},
}
"""What goes wrong, and where it must be seen."""


@pytest.mark.parametrize("fault", [None, *FAULTS], ids=lambda fault: fault.__name__ if fault else "none")
def test_faults_are_seen_where_they_are(whole_fp32_case: Case, fault: Fault | None) -> None:
    answer = first(whole_fp32_case)
    actual = as_compiled(answer)
    if fault is not None:
        fault(actual, answer)
    verdicts = answer.judge(actual)
    assert [verdict.name for verdict in verdicts] == [f"{answer.name}/{name}" for name in (*RAW, *FINAL)]
    failed = {verdict.name.partition("/")[2] for verdict in verdicts if verdict.kind is not VerdictKind.STRICT}
    assert failed == (FAULTS[fault] if fault else set())


def test_undecided_pixels_may_differ_and_are_counted(whole_fp32_case: Case) -> None:
    answer = first(whole_fp32_case)
    actual, undecided = as_compiled(answer), answer.first["undecided"]
    actual["found/masks"] ^= undecided
    verdict = answer.judge(actual)[-3]
    assert verdict.kind is VerdictKind.STRICT
    assert verdict.reason.startswith(f"{np.count_nonzero(undecided)} pixels differ")
    assert f"within {UNDECIDED:g} of zero" in verdict.reason


SIZE = (67, 45)


@cache
def in_half(precision: str) -> tuple[Answer, Arrays]:
    """Random raw outputs: as an answer with oracle, and as a model in half precision might answer."""
    rng = np.random.default_rng(0)
    shapes = {"logits": (1, 200, 1), "boxes": (1, 200, 4), "masks": (1, 200, 24, 24), "presence": (1, 1)}
    exact = {name: rng.standard_normal(shape) for name, shape in (shapes | {"semantic": (1, 1, 24, 24)}).items()}
    exact["presence"] += 5
    error = 2e-3 if precision == "bf16" else 2e-4
    reference, actual = (
        {name: (array + error * rng.standard_normal(array.shape)).astype(np.float32) for name, array in exact.items()}
        for _ in range(2)
    )
    with upstream():
        from harness.models.sam3.end_to_end.upstream import decide_detections

        found, decided = decide_detections(actual, SIZE), decide_detections(reference, SIZE)
    answer = Answer("text", SIZE, Reference(decided, decided, exact), judge_answer)
    return answer, {name: found[name] for name in (*RAW, *FINAL)}


def flip_every_pixel(actual: Arrays, answer: Answer) -> None:
    actual["found/masks"] = ~actual["found/masks"]


def change_a_mask_logit_a_lot(actual: Arrays, answer: Answer) -> None:
    actual["masks"][0, 7, 10, 20] += 0.1


def shift_the_presence(actual: Arrays, answer: Answer) -> None:
    actual["presence"] += 0.1


def double_a_box(actual: Arrays, answer: Answer) -> None:
    actual["boxes"][0, np.flatnonzero(actual["found/queries"])[0]] *= 2


HALF_FAULTS: dict[Fault, set[str]] = {
    flip_every_pixel: {"found/masks"},
    shift_a_box: {"found/boxes"},
    change_a_score: {"found/scores"},
    drop_a_query: set(FINAL),
    swap_two_queries: {"found/masks", "found/boxes", "found/scores"},
    change_a_mask_logit_a_lot: {"masks"},
    double_a_box: {"boxes", "found/boxes"},
    shift_the_presence: {"presence", "found/scores"},
}


@pytest.mark.parametrize("fault", [None, *HALF_FAULTS], ids=lambda fault: fault.__name__ if fault else "none")
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_half_answer_is_held_to_float64_and_to_upstreams_decisions_on_it(precision: str, fault: Fault | None) -> None:
    answer, right = in_half(precision)
    actual = {name: array.copy() for name, array in right.items()}
    if fault is not None:
        fault(actual, answer)
    with upstream():
        verdicts, strict = answer.judge(actual, by_oracle=True), answer.judge(actual)
    assert [verdict.name for verdict in verdicts] == [f"{answer.name}/{name}" for name in (*RAW, *FINAL)]
    good = (VerdictKind.STRICT, VerdictKind.ORACLE)
    failed = {verdict.name.partition("/")[2] for verdict in verdicts if verdict.kind not in good}
    assert failed == (HALF_FAULTS[fault] if fault else set())
    assert {verdict.kind for verdict in strict[: len(RAW)]} == {VerdictKind.FAILED}, "in fp32 that is not enough"


def test_a_half_answer_of_another_shape_fails() -> None:
    answer, right = in_half("fp16")
    actual = {**right, "semantic": right["semantic"][0]}
    with upstream():
        verdicts = answer.judge(actual, by_oracle=True)
    failed = {verdict.name.partition("/")[2] for verdict in verdicts if verdict.kind is VerdictKind.FAILED}
    assert "semantic" in failed


@pytest.mark.cuda
def test_upstream_under_autocast_is_a_half_answer() -> None:
    """What a half-precision case is measured by: further from float64 than fp32 is, as half types are."""
    case = Case("end_to_end", "real", "cuda", precision="bf16")
    answer, accurate = next(upstreams(case)), next(upstreams(replace(case, precision="fp32")))
    with upstream():
        verdicts = answer.judge(as_compiled(accurate), by_oracle=True)
    assert {verdict.kind for verdict in verdicts[: len(RAW)]} == {VerdictKind.ORACLE}
    assert {verdict.kind for verdict in verdicts[len(RAW) :]} == {VerdictKind.STRICT}
    assert max(verdict.r_rms for verdict in verdicts[: len(RAW)]) < 0.01
    assert all(30 < verdict.sqnr_db < 80 for verdict in verdicts[: len(RAW)])


def test_every_kind_of_prompt_and_photograph_is_asked() -> None:
    questions = read_questions(QUESTIONS, Question)
    about = [question for question in questions if question.image == questions[0].image]
    assert any(question.texts and not question.boxes and not question.points for question in about)
    assert any(question.texts and set(question.box_labels) == {True} for question in about)
    assert any(not question.texts and set(question.box_labels) == {True, False} for question in about)
    assert any(set(question.point_labels) == {True, False} for question in about)
    assert any(len(question.texts) == 3 for question in about)
    sizes = {load_image(question.image).size for question in questions}
    ratios = sorted(width / height for width, height in sizes)
    assert len(sizes) == len(ratios) >= 3
    assert ratios[0] < 0.5 < 1.3 < ratios[-1]
    # Smaller and larger than the model's input, and not only multiples of 8.
    assert min(min(size) for size in sizes) < 200
    assert max(min(size) for size in sizes) > 1008
    assert all(width % 2 or height % 2 for width, height in sizes)


def test_questions_are_asked_in_pixels() -> None:
    (question,) = (question for question in read_questions(QUESTIONS, Question) if question.name == "boxes")
    (prompt,) = prompts(question, (451, 300))
    cx, cy, w, h = question.boxes[0]
    expected = [(cx - w / 2) * 451, (cy - h / 2) * 300, (cx + w / 2) * 451, (cy + h / 2) * 300]
    np.testing.assert_allclose(np.asarray(prompt.boxes)[0], expected)
    assert (prompt.text, tuple(prompt.box_labels or ())) == (None, question.box_labels)


def test_another_photograph_is_asked_what_the_first_one_is(tmp_path: Path) -> None:
    image = tmp_path / "photo.png"
    usual, other = read_questions(QUESTIONS, Question), read_questions(QUESTIONS, Question, image)
    assert [question.name for question in other] == [q.name for q in usual if q.image == usual[0].image]
    assert {question.image for question in other} == {image}


@pytest.mark.parametrize(
    "table",
    [
        'name = "a"',
        'image = "a.png"\ntexts = ["cat"]',
        'name = "a"\nimage = "a.png"',
        'name = "a"\nimage = "a.png"\ntexts = ["cat", "dog"]\npoints = [[0, 0]]\npoint_labels = [1]',
        'name = "a"\nimage = "a.png"\nboxes = [[0, 0, 1]]\nbox_labels = [1]',
        'name = "a"\nimage = "a.png"\nboxes = [[0, 0, 1, 1]]\nbox_labels = []',
        'name = "a"\nimage = "a.png"\ntext = "cat"\ntexts = ["cat"]',
        'name = "a"\nimage = "a.png"\ntexts = ["cat"]\n[[question]]\nname = "a"\nimage = "a.png"\ntexts = ["dog"]',
    ],
)
def test_wrong_questions_are_a_sentence(tmp_path: Path, table: str) -> None:
    path = tmp_path / "questions.toml"
    path.write_text(f"[[question]]\n{table}\n")
    with pytest.raises(HarnessError, match=sentence("no-questions", "bad-description", path="questions.toml")):
        read_questions(path, Question)


def test_missing_questions_are_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=sentence("no-checkout")):
        read_questions(tmp_path / QUESTIONS.name, Question)
