"""Clicks, boxes and masks, compiled, against upstream's `predict_inst`; and that its judge sees what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from conformance.support.whole import Answer, upstream_answers, verified
from harness.core.case import Case
from harness.core.outcome import Status, VerdictKind
from harness.core.precision import PRECISIONS
from harness.core.processes.call import Template
from harness.core.settings import SEEDED, Settings
from harness.models.sam3.interactive import OUTPUTS
from harness.models.sam3.interactive.script import SCRIPTS, judge_ious, judge_round
from harness.models.sam3.source import Arrays
from harness.models.sam3.upstream import upstream
from harness.parity.references import Reference
from harness.runtime.sam3.interactive import LARGEST_LOGIT

SUBJECT = "interactive"
DAILY = ("tall",)
"""A click on a photograph of another form than the components'; every night all questions are asked.

By day the modules are upstream's predictor for boxes, refined masks and single ones (`test_interactive.py`), and
float64 judges what they are compiled to, component by component.
"""
QUESTIONS_OF = pytest.mark.parametrize(
    "names", [pytest.param(DAILY, id="some"), pytest.param((), id="all", marks=pytest.mark.wide)]
)


@QUESTIONS_OF
def test_interactive(
    whole_case: Case,
    names: tuple[str, ...],
    verification_settings: Settings,
    verifying_process: Template,
    request: pytest.FixtureRequest,
) -> None:
    result = verified(whole_case, verification_settings, names, verifying_process, request)
    if result.outcome.status is Status.PASSED:
        half = PRECISIONS[whole_case.precision].is_half
        verdicts = [verdict.name for verdict in result.outcome.verdicts]
        questions = SCRIPTS[0].questions(whole_case, SEEDED)
        answers = [name for one in questions if not names or one.name in names for name in one.answers]
        outputs = ("logits", "masks") if half else OUTPUTS
        together = ["iou"] if any(one.float64 for one in questions if not names or one.name in names) else []
        assert verdicts == [f"{answer}/{name}" for answer in answers for name in outputs] + together


@cache
def answers(case: Case, names: tuple[str, ...] = DAILY) -> tuple[Answer, ...]:
    """What upstream answers; whoever changes an array changes a copy."""
    return tuple(upstream_answers(SCRIPTS[0], case, judge_round, names))


@QUESTIONS_OF
def test_what_upstream_answers_is_no_accident(whole_fp32_case: Case, names: tuple[str, ...]) -> None:
    """Masks are neither empty nor full, few pixels are undecided, and the best of three is the best by a margin.

    Upstream's single mask, where it is stable, is the whole photograph with seeded weights; its logits still differ.
    """
    full = []
    for answer in answers(whole_fp32_case, names):
        masks, iou = answer.first["masks"], answer.first["iou"]
        if masks.all():
            full.append(answer.name)
            assert np.ptp(answer.first["logits"]) > 0.1, answer.name
        else:
            assert all(0.01 < mask.mean() < 0.99 for mask in masks), answer.name
        assert answer.first["undecided"].mean() < 0.001, answer.name
        ordered = np.sort(iou)
        assert len(iou) == 1 or ordered[-1] - ordered[-2] > 1e-3, answer.name
    assert full == ([] if names else ["clicks"])


def flip_a_pixel(actual: Arrays, answer: Answer) -> None:
    decided = np.argwhere(~answer.first["undecided"])
    actual["masks"][tuple(decided[len(decided) // 2])] ^= True


def change_a_logit(actual: Arrays, answer: Answer) -> None:
    actual["logits"][0, 100, 200] += 1e-3


def change_an_iou(actual: Arrays, answer: Answer) -> None:
    actual["iou"][-1] += 1e-4


def swap_two_masks(actual: Arrays, answer: Answer) -> None:
    for name in OUTPUTS:
        actual[name][[0, 1]] = actual[name][[1, 0]]


FAULTS: dict[Callable[[Arrays, Answer], None], set[str]] = {
    flip_a_pixel: {"masks"},
    change_a_logit: {"logits"},
    change_an_iou: {"iou"},
    swap_two_masks: set(OUTPUTS),
}
"""What goes wrong, and where it must be seen."""


@pytest.mark.parametrize("fault", [None, *FAULTS], ids=lambda fault: fault.__name__ if fault else "none")
def test_faults_are_seen_where_they_are(whole_fp32_case: Case, fault: Callable[[Arrays, Answer], None] | None) -> None:
    answer = next(answer for answer in answers(whole_fp32_case) if len(answer.first["iou"]) > 1)
    actual = {name: answer.first[name].copy() for name in OUTPUTS}
    if fault is not None:
        fault(actual, answer)
    verdicts = answer.judge(actual)
    assert [verdict.name for verdict in verdicts] == [f"{answer.name}/{name}" for name in OUTPUTS]
    failed = {verdict.name.rpartition("/")[2] for verdict in verdicts if verdict.kind is not VerdictKind.STRICT}
    assert failed == (FAULTS[fault] if fault else set())


def test_undecided_pixels_may_differ(whole_fp32_case: Case) -> None:
    answer = max(answers(whole_fp32_case), key=lambda answer: int(answer.first["undecided"].sum()))
    actual = {name: answer.first[name].copy() for name in OUTPUTS}
    undecided = answer.first["undecided"]
    assert undecided.any()
    actual["masks"] ^= undecided
    verdict = answer.judge(actual)[-1]
    assert verdict.kind is VerdictKind.STRICT
    assert verdict.reason.startswith(f"{np.count_nonzero(undecided)} pixels differ")


def test_ious_that_are_less_accurate_than_pytorchs_are_seen_together() -> None:
    """Each number is inside the strict gate, and all of them are further from float64 than PyTorch's."""
    generator = np.random.default_rng(0)
    exact = [generator.uniform(size=3 - number % 2 * 2) for number in range(8)]

    def rounded(size: float) -> list[Arrays]:
        return [{"iou": (iou + generator.normal(scale=size, size=iou.shape)).astype(np.float32)} for iou in exact]

    pytorch = [Reference(one, one, {"iou": iou}) for one, iou in zip(rounded(1e-6), exact, strict=True)]
    for size, kind in ((1e-6, VerdictKind.STRICT), (3e-6, VerdictKind.FAILED)):
        (verdict,) = judge_ious(list(zip(rounded(size), pytorch, strict=True)))
        assert (verdict.name, verdict.kind, verdict.outside) == ("iou", kind, 0)


# --- half precision ---

SIZE = (80, 60)
"""Width and height of the photograph."""


@cache
def rounds() -> tuple[tuple[Answer, ...], tuple[Arrays, ...]]:
    """Eight rounds as upstream answers them under autocast, and as code that is as accurate does."""
    with upstream():
        from harness.models.sam3.interactive.upstream import decide_masks

    generator = np.random.default_rng(0)
    y, x = np.mgrid[-1:1:288j, -1:1:288j]
    answers, actual = [], []
    for number in range(8):
        masks = 3 - number % 2 * 2
        exact = {
            "logits": np.stack([4 - 9 * ((x - k / 9) ** 2 + (y + number / 20) ** 2) for k in range(masks)]),
            "iou": generator.uniform(size=masks),
        }

        def inexact(exact: Arrays = exact) -> Arrays:
            return {
                name: (values + generator.normal(scale=2e-3, size=values.shape)).astype(np.float32)
                for name, values in exact.items()
            }

        reference, ours = inexact(), inexact()
        answers.append(Answer(f"question {number}", SIZE, Reference(reference, reference, exact), judge_round))
        with upstream():
            actual.append(ours | {"masks": decide_masks(ours["logits"], SIZE)[0]})
    return tuple(answers), tuple(actual)


def flip_a_decided_pixel(actual: Arrays) -> None:
    actual["masks"][0, 30, 40] ^= True


def shift_logits(actual: Arrays) -> None:
    actual["logits"] += np.float32(0.02)


def wrong_iou(actual: Arrays) -> None:
    actual["iou"][-1] += np.float32(0.03)


def forget_a_mask(actual: Arrays) -> None:
    for name in OUTPUTS:
        actual[name] = actual[name][1:]


def swap_logits(actual: Arrays) -> None:
    actual["logits"] = actual["logits"][::-1].copy()


HALF_FAULTS: dict[Callable[[Arrays], None], set[str]] = {
    flip_a_decided_pixel: {"question 2/masks"},
    shift_logits: {"question 2/logits", "question 2/masks"},
    wrong_iou: {"iou"},
    forget_a_mask: {"question 2/logits", "question 2/masks", "iou"},
    swap_logits: {"question 2/logits", "question 2/masks"},
}
"""What goes wrong in the third round, and where it must be seen; masks are those of the logits as they were."""


@pytest.mark.parametrize("fault", [None, *HALF_FAULTS], ids=lambda fault: fault.__name__ if fault else "none")
def test_faults_are_seen_in_half_precision(fault: Callable[[Arrays], None] | None) -> None:
    answers, accurate = rounds()
    actual = [{name: array.copy() for name, array in arrays.items()} for arrays in accurate]
    if fault is not None:
        fault(actual[2])
    with upstream():
        asked = list(zip(answers, actual, strict=True))
        verdicts = [verdict for answer, arrays in asked for verdict in answer.judge(arrays, by_oracle=True)]
        verdicts += judge_ious([(arrays, answer.reference) for answer, arrays in asked], by_oracle=True)
    assert [verdict.name for verdict in verdicts] == [
        *(f"{answer.name}/{name}" for answer in answers for name in ("logits", "masks")),
        "iou",
    ]
    passed = (VerdictKind.STRICT, VerdictKind.ORACLE)
    assert {verdict.name for verdict in verdicts if verdict.kind not in passed} == (
        HALF_FAULTS[fault] if fault else set()
    )


def test_masks_are_decided_as_the_runtime_decides_and_pixels_of_cut_logits_are_not() -> None:
    with upstream():
        from harness.models.sam3.interactive.upstream import decide_masks

    _, actual = rounds()
    logits = np.clip(actual[0]["logits"] * np.float32(20), -LARGEST_LOGIT, LARGEST_LOGIT)
    with upstream():
        masks, near = decide_masks(logits, SIZE)
        _, none = decide_masks(actual[0]["logits"], SIZE)
    assert masks.shape == near.shape == (3, SIZE[1], SIZE[0])
    assert 0.3 < near.mean() < 1 and none.mean() < 0.01
    # Pixels that no cut logit reaches are decided as before.
    assert np.array_equal(masks[~near], actual[0]["masks"][~near])
