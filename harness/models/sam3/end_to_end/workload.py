"""Compiles the whole model into a folder, asks it every question, and judges its answers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from harness.core.case import Case
from harness.core.expectations import Expectation
from harness.core.outcome import Verdict
from harness.core.precision import DEFAULT_PRECISION, PRECISIONS, Precision
from harness.core.program import Arrays, Program
from harness.core.settings import Settings
from harness.models.sam3.deployed.entry_points.programs import programs
from harness.models.sam3.deployed.options import GROUNDING_ALONE
from harness.models.sam3.deployed.running import deployed_model
from harness.models.sam3.detections import Detections, ReferenceDetections, judge_detections
from harness.models.sam3.end_to_end import RAW
from harness.models.sam3.end_to_end.questions import Question
from harness.models.sam3.end_to_end.source import Answer, EndToEndSource, decide_detections
from harness.parity.distribution import add_distributions
from harness.parity.saved_outputs import load_outputs, save_outputs, saved_folder
from harness.parity.verdict import judge, judge_by_gate
from harness.runtime.sam3.model import Sam3
from harness.runtime.sam3.prompts import Prompt
from harness.runtime.sam3.segmentation import Found as Segmented

if TYPE_CHECKING:
    from harness.compiler.execution.run import Run


class EndToEndWorkload:
    """The questions of a case, answered by the compiled model through the runtime."""

    def __init__(self, case: Case, settings: Settings) -> None:
        """Reads the questions; upstream's model is built for the first answer that is not in the cache.

        Raises:
            HarnessError: Questions or cache cannot be used.
        """
        self._case = case
        self._settings = settings
        self._source = EndToEndSource(case, settings)
        self._saved = saved_folder(case)

    @property
    def programs(self) -> dict[str, Program]:
        """Builds and returns the entry points of the compiled model."""
        return {program.name: program for program in programs(self._case, self._settings, GROUNDING_ALONE)}

    def run(self, run: Run) -> bool:
        """Compiles the folder, asks every question and saves the answers; returns False if code cannot be run here."""
        return _compile_and_run(run, self._source.questions, self._saved)

    def judge(self, expectation: Expectation | None) -> tuple[Verdict, ...]:
        """Returns the verdicts on the saved answers."""
        return tuple(
            verdict
            for question in self._source.questions
            for answer in self._source.answers(question)
            for verdict in judge_answer(
                load_outputs(self._saved / answer.name), answer, expectation, PRECISIONS[self._case.precision]
            )
        )


def judge_answer(
    actual: Arrays,
    answer: Answer,
    expectation: Expectation | None = None,
    precision: Precision = PRECISIONS[DEFAULT_PRECISION],
) -> tuple[Verdict, ...]:
    """Returns the verdicts on one answer.

    Args:
        actual: The compiled model's answer: raw outputs by name, and the detections `queries`, `masks`, `boxes` and
            `scores`, prefixed by `found/`.
        answer: Upstream's answer.
        expectation: If it allows the oracle verdict, raw outputs may pass on it.
        precision: In half precision, raw outputs may pass on the oracle verdict, and detections are held to upstream's
            detections on the raw outputs, see `harness.models.sam3.end_to_end.source`.
    """
    append_logits = precision.judged_by_oracle and _same_format(actual, answer.reference)

    def with_names(arrays: Arrays) -> Arrays:
        judged_arrays = _append_logits_to_presence(arrays) if append_logits else arrays
        return {f"{answer.name}/{name}": judged_arrays[name] for name in RAW}

    reference, rerun = with_names(answer.reference), with_names(answer.rerun)
    if answer.oracle is not None:
        raw = judge(
            with_names(actual),
            reference,
            with_names(answer.oracle),
            reference_again=rerun,
            expectation=expectation,
            by_oracle=precision.judged_by_oracle,
        )
    else:
        raw = judge_by_gate(with_names(actual), reference, rerun)
    detections = Detections(*(actual[f"found/{name}"] for name in ("queries", "masks", "boxes", "scores")))
    truth = _expected_detections(actual, answer) if precision.judged_by_oracle else answer.truth
    raw = add_distributions(raw, with_names(actual), reference)
    prefix = f"{answer.name}/found/"
    masks = f"{prefix}masks"
    return raw + add_distributions(
        judge_detections(prefix, detections, truth), {masks: detections.masks}, {masks: truth.first.masks}
    )


def _same_format(actual: Arrays, reference: Arrays) -> bool:
    """Returns whether raw outputs have the shapes and dtypes of the reference."""
    return all(
        (actual[name].shape, actual[name].dtype) == (reference[name].shape, reference[name].dtype) for name in RAW
    )


def _append_logits_to_presence(arrays: Arrays) -> Arrays:
    """Appends to the one presence logit the 200 logits that form the scores with it.

    The error of a single number says nothing about its usual size, and the oracle verdict divides by it.
    """
    parts = [arrays["logits"].ravel(), arrays["presence"].ravel()]
    return arrays | {"presence": np.concatenate(parts)}


def _expected_detections(actual: Arrays, answer: Answer) -> ReferenceDetections:
    """Returns upstream's detections on the actual raw outputs, or on upstream's own outputs if formats differ."""
    _, height, width = answer.truth.first.masks.shape
    raw = actual if _same_format(actual, answer.reference) else answer.reference
    return decide_detections({name: raw[name] for name in RAW}, (width, height))


def _compile_and_run(run: Run, questions: tuple[Question, ...], saved: Path) -> bool:
    """Compiles upstream's model, runs it and saves its answers; returns False if it cannot be run."""
    with deployed_model(run, saved / "model") as model:
        if model is None:
            return False
        for answer, detections in _segment(model, questions):
            save_outputs(saved / answer, _arrays(detections))
    return True


def _segment(model: Sam3, questions: tuple[Question, ...]) -> Iterator[tuple[str, Segmented]]:
    """Yields the compiled model's answers by name; an image is encoded once."""
    for path, image_questions in groupby(questions, lambda question: question.image):
        image = model.set_image(path)
        for question in image_questions:
            yield from zip(question.answers, image.segment_each(prompts(question, image.size)), strict=True)


def prompts(question: Question, size: tuple[int, int]) -> list[Prompt]:
    """Converts a question to the runtime's prompts, in pixels of a photograph of the given width and height."""
    centers = np.array(question.boxes, np.float64).reshape(-1, 2, 2) * size
    boxes = np.concatenate([centers[:, 0] - centers[:, 1] / 2, centers[:, 0] + centers[:, 1] / 2], axis=1)
    points = np.array(question.points, np.float64).reshape(-1, 2) * size
    return [
        Prompt(text, boxes, question.box_labels, points, question.point_labels) for text in question.texts or (None,)
    ]


def _arrays(detections: Segmented) -> Arrays:
    queries = np.zeros(detections.outputs.scores.shape[1], bool)
    queries[detections.queries] = True
    return {name: getattr(detections.outputs, name) for name in RAW} | {
        "found/queries": queries,
        "found/masks": detections.masks,
        "found/boxes": detections.boxes,
        "found/scores": detections.scores,
    }
