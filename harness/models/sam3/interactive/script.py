"""Asks the compiled model for masks of one object in every round, and judges its answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from harness.core.expectations import Expectation
from harness.core.outcome import Verdict
from harness.core.program import Arrays
from harness.models.sam3.detections import judge_masks
from harness.models.sam3.interactive.questions import QUESTIONS, Question
from harness.models.sam3.scripted import Answer, Script, judge_numbers, pool
from harness.models.sam3.source import UpstreamModel
from harness.parity.distribution import add_distributions
from harness.parity.references import Reference, add_prefix
from harness.parity.verdict import judge_by_gate
from harness.runtime.sam3.image_model import EncodedImage
from harness.runtime.sam3.images import load_image

UPSTREAM = "harness.models.sam3.interactive.upstream"
"""The module that asks upstream."""


def ask_compiled(image: EncodedImage, question: Question, upstream: UpstreamModel) -> Arrays:
    """Returns the compiled model's answers by `answer/part`.

    A round refines the best mask of the previous round, in half precision upstream's.
    """
    from harness.models.sam3.interactive.upstream import best_mask

    source = upstream.answer(UPSTREAM, question).first if upstream.half else None
    scale = np.array(image.size, np.float64)
    arrays: Arrays = {}
    refined: Any = None
    for name, prompt in zip(question.answers, question.rounds, strict=True):
        predicted = image.predict(
            points=np.array(prompt.points).reshape(-1, 2) * scale,
            labels=prompt.labels,
            box=None if prompt.box is None else (np.array(prompt.box).reshape(2, 2) * scale).ravel(),
            mask=refined,
            multimask=question.multimask,
        )
        refined = predicted.logits[predicted.best] if source is None else best_mask(source, name)
        arrays |= add_prefix(name, {"logits": predicted.logits, "iou": predicted.iou, "masks": predicted.masks})
    return arrays


def judge(answers: Iterable[Answer[Question]], expectation: Expectation | None, by_oracle: bool) -> Iterator[Verdict]:
    """Yields the verdicts on all rounds, with one on the predicted IoU of those that were answered in float64."""
    rounds: list[tuple[Arrays, Reference]] = []
    for answer in answers:
        size = load_image(answer.question.image).size
        for name, actual, reference in answer.parts(answer.question.answers):
            yield from judge_round(name, actual, reference, size, expectation, by_oracle=by_oracle)
            if reference.exact:
                rounds.append((actual, reference))
    if rounds:
        yield from judge_ious(rounds, by_oracle=by_oracle)


def judge_round(
    name: str,
    actual: Arrays,
    reference: Reference,
    size: tuple[int, int],
    expectation: Expectation | None = None,
    *,
    by_oracle: bool = False,
) -> tuple[Verdict, ...]:
    """Judges one round, inside `upstream()`; the predicted IoU by the strict gate, and in half precision not at all.

    One or three numbers say little about the usual size of an error, so `judge_ious` compares them with float64.

    Args:
        name: Prefix of the names of the verdicts.
        actual: The compiled model's answer, `harness.models.sam3.interactive.OUTPUTS`.
        reference: Upstream's answer from `harness.models.sam3.interactive.upstream`.
        size: Width and height of the photograph.
        expectation: If it allows the oracle verdict, logits may pass on it.
        by_oracle: Whether the case is in half precision. Logits may then pass by the oracle, and masks are held to
            upstream's decision on the compiled model's own logits.
    """

    def output(kind: str, arrays: Arrays) -> Arrays:
        return {f"{name}/{kind}": arrays[kind]} if kind in arrays else {}

    logits = reference.map(partial(output, "logits"))
    verdicts = judge_numbers(output("logits", actual), logits, expectation, by_oracle=by_oracle)
    compared = logits.first
    if by_oracle:
        from harness.models.sam3.interactive.upstream import decide_masks

        expected = reference.first["logits"]
        decided, undecided = decide_masks(
            actual["logits"] if actual["logits"].shape == expected.shape else expected, size
        )
        again = decided
    else:
        iou = reference.map(partial(output, "iou"))
        verdicts += judge_by_gate(output("iou", actual), iou)
        compared = compared | iou.first
        decided, again = reference.first["masks"], reference.again["masks"]
        undecided = reference.first["undecided"]
    verdicts += (judge_masks(f"{name}/masks", actual["masks"], decided, again, undecided),)
    return add_distributions(verdicts, add_prefix(name, actual), compared | {f"{name}/masks": decided})


def judge_ious(rounds: Sequence[tuple[Arrays, Reference]], *, by_oracle: bool = False) -> tuple[Verdict, ...]:
    """Judges the predicted IoU of all rounds against float64; in half precision by the oracle."""
    compiled = {"iou": pool(actual["iou"] for actual, _ in rounds)}
    first, again, exact = (
        {"iou": pool(arrays["iou"] for arrays in runs)}
        for runs in zip(*((reference.first, reference.again, reference.exact) for _, reference in rounds), strict=True)
    )
    verdicts = judge_numbers(compiled, Reference(first, again, exact), by_oracle=by_oracle)
    return add_distributions(verdicts, compiled, first)


SCRIPTS = (Script(QUESTIONS, Question, UPSTREAM, ask_compiled, judge, asks_upstream_first=True),)
