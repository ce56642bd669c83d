"""Asks the compiled whole model the questions about photographs, and judges its answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from harness.core.expectations import Expectation
from harness.core.outcome import Verdict
from harness.core.program import Array, Arrays
from harness.models.sam3.detections import judge_detections
from harness.models.sam3.end_to_end import FINAL, RAW
from harness.models.sam3.end_to_end.questions import QUESTIONS, Question
from harness.models.sam3.scripted import Answer, Script, judge_numbers, pool
from harness.models.sam3.source import UpstreamModel
from harness.parity.distribution import add_distributions
from harness.parity.references import Reference, add_prefix, select
from harness.runtime.sam3.image_model import EncodedImage
from harness.runtime.sam3.images import load_image
from harness.runtime.sam3.prompts import Prompt
from harness.runtime.sam3.segmentation import Found as Segmented

UPSTREAM = "harness.models.sam3.end_to_end.upstream"
"""The module that asks upstream."""


def ask_compiled(image: EncodedImage, question: Question, _upstream: UpstreamModel) -> Arrays:
    """Returns the compiled model's answers by `answer/part`, `RAW` and `FINAL`."""
    arrays: Arrays = {}
    for name, found in zip(question.answers, image.segment_each(prompts(question, image.size)), strict=True):
        arrays |= add_prefix(name, _arrays(found))
    return arrays


def prompts(question: Question, size: tuple[int, int]) -> list[Prompt]:
    """Converts a question to the runtime's prompts, in pixels of a photograph of the given width and height."""
    boxes = _corners(question.boxes, size)
    points = np.array(question.points, np.float64).reshape(-1, 2) * size
    return [
        Prompt(text, boxes, question.box_labels, points, question.point_labels) for text in question.texts or (None,)
    ]


def _arrays(found: Segmented) -> Arrays:
    queries = np.zeros(found.outputs.scores.shape[1], bool)
    queries[found.queries] = True
    final = (queries, found.masks, found.boxes, found.scores)
    return {name: getattr(found.outputs, name) for name in RAW} | dict(zip(FINAL, final, strict=True))


def judge(answers: Iterable[Answer[Question]], expectation: Expectation | None, by_oracle: bool) -> Iterator[Verdict]:
    """Yields the verdicts on all answers."""
    for answer in answers:
        size = load_image(answer.question.image).size
        for part in answer.parts(answer.question.answers):
            yield from judge_answer(*part, size, expectation, by_oracle=by_oracle)


def judge_answer(
    name: str,
    actual: Arrays,
    reference: Reference,
    size: tuple[int, int],
    expectation: Expectation | None = None,
    *,
    by_oracle: bool = False,
) -> tuple[Verdict, ...]:
    """Returns the verdicts on one answer.

    Args:
        name: Prefix of the names of the verdicts.
        actual: The compiled model's answer, `RAW` and `FINAL`.
        reference: Upstream's answer from `harness.models.sam3.end_to_end.upstream`.
        size: Width and height of the photograph.
        expectation: If it allows the oracle verdict, raw outputs may pass on it.
        by_oracle: Whether the case is in half precision. Raw outputs may then pass by the oracle, and detections are
            held to upstream's detections on the raw outputs.
    """
    first = reference.first
    comparable = all((actual[part].shape, actual[part].dtype) == (first[part].shape, first[part].dtype) for part in RAW)

    def raw_outputs(arrays: Arrays) -> Arrays:
        outputs = {part: arrays[part] for part in RAW if part in arrays}
        if by_oracle and comparable and outputs:
            # The logits form the scores with the presence.
            outputs["presence"] = pool((outputs["logits"], outputs["presence"]))
        return add_prefix(name, outputs)

    compiled, expected = raw_outputs(actual), reference.map(raw_outputs)
    raw = judge_numbers(compiled, expected, expectation, by_oracle=by_oracle)
    truth = _decided(actual if comparable else first, size) if by_oracle else _truth(reference, size)
    detections = select(actual, "found")
    verdicts = (*raw, *judge_detections(f"{name}/found/", detections, truth))
    masks = f"{name}/found/masks"
    return add_distributions(
        verdicts, compiled | {masks: detections["masks"]}, expected.first | {masks: truth.first["masks"]}
    )


def _found(arrays: Arrays) -> Arrays:
    """Returns the detections among upstream's arrays, and their undecided pixels."""
    return select(arrays, "found") | {"undecided": arrays["undecided"]}


def _decided(raw: Arrays, size: tuple[int, int]) -> Reference:
    """Returns upstream's detections for raw outputs."""
    from harness.models.sam3.end_to_end.upstream import decide_detections

    return Reference.from_run(_found(decide_detections(raw, size)))


def _truth(reference: Reference, size: tuple[int, int]) -> Reference:
    """Returns upstream's detections; boxes and scores of the float64 outputs are those of the same queries."""
    first, exact = _found(reference.first), reference.exact
    if exact:
        scores = _sigmoid(exact["logits"])[0, :, 0] * _sigmoid(exact["presence"])[0]
        exact = {"boxes": _corners(exact["boxes"][0], size)[first["queries"]], "scores": scores[first["queries"]]}
    return Reference(first, _found(reference.again), exact)


def _corners(boxes: Any, size: tuple[int, int]) -> Array:
    """Converts normalized (cx, cy, w, h) of N boxes to (x0, y0, x1, y1) in pixels [N, 4]."""
    centers, extents = (np.array(boxes, np.float64).reshape(-1, 2, 2) * size).swapaxes(0, 1)
    return np.concatenate([centers - extents / 2, centers + extents / 2], axis=1)


def _sigmoid(x: Array) -> Array:
    result: Array = 1 / (1 + np.exp(-x))
    return result


SCRIPTS = (Script(QUESTIONS, Question, UPSTREAM, ask_compiled, judge),)
