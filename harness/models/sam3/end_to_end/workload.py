"""The whole model as a workload: compiled into a folder, loaded, asked every question, judged."""

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
from harness.models.sam3.deployed.running import deployed_model
from harness.models.sam3.end_to_end import RAW
from harness.models.sam3.end_to_end.questions import Question
from harness.models.sam3.end_to_end.source import Answer, EndToEndSource, decided
from harness.parity.detections import Detections, ReferenceDetections, judge_detections
from harness.parity.distribution import with_distributions
from harness.parity.saved import load_outputs, save_outputs, saved_folder
from harness.parity.verdict import judge, judge_by_gate
from harness.runtime.manifest import DEFAULT_CAPACITY
from harness.runtime.sam3.model import Sam3
from harness.runtime.sam3.prompts import Prompt
from harness.runtime.sam3.segmentation import Found as Segmented

if TYPE_CHECKING:
    from harness.execution.run import Run


class EndToEndWorkload:
    """The questions of a case, asked of the compiled model through the runtime, as its users do."""

    def __init__(self, case: Case, settings: Settings) -> None:
        """Reads the questions; upstream's model is built when the first answer is not in the cache.

        Raises:
            HarnessError: If questions or cache cannot be used.
        """
        self._case = case
        self._settings = settings
        self._source = EndToEndSource(case, settings)
        self._saved = saved_folder(case)

    @property
    def programs(self) -> dict[str, Program]:
        """The entry points of the compiled model, built anew."""
        return {program.name: program for program in programs(self._case, self._settings, DEFAULT_CAPACITY)}

    def run(self, run: Run) -> bool:
        """Does what `harness.models.subject.Workload` says."""
        return _compile_and_run(run, self._source.questions, self._saved)

    def judge(self, expectation: Expectation | None) -> tuple[Verdict, ...]:
        """Does what `harness.models.subject.Workload` says."""
        return tuple(
            verdict
            for question in self._source.questions
            for answer in self._source.answers(question)
            for verdict in judged(
                load_outputs(self._saved / answer.name), answer, expectation, PRECISIONS[self._case.precision]
            )
        )


def judged(
    actual: Arrays,
    answer: Answer,
    expectation: Expectation | None = None,
    precision: Precision = PRECISIONS[DEFAULT_PRECISION],
) -> tuple[Verdict, ...]:
    """Returns the verdicts on one answer.

    Args:
        actual: What the compiled model answers: raw outputs by name, and `queries`, `masks`, `boxes` and `scores` of
            what is found, prefixed by `found/`.
        answer: What upstream answers.
        expectation: If it allows the oracle verdict, raw outputs may pass on it.
        precision: In a half one, raw outputs may pass on the oracle verdict, and what is found is held to what upstream
            makes of the raw outputs, see `harness.models.sam3.end_to_end.source`.
    """
    beside = precision.judged_by_oracle and _alike(actual, answer.reference)

    def named(arrays: Arrays) -> Arrays:
        judged_as = _presence_beside_logits(arrays) if beside else arrays
        return {f"{answer.name}/{name}": judged_as[name] for name in RAW}

    reference, again = named(answer.reference), named(answer.again)
    if answer.oracle is not None:
        raw = judge(
            named(actual),
            reference,
            named(answer.oracle),
            reference_again=again,
            expectation=expectation,
            by_oracle=precision.judged_by_oracle,
        )
    else:
        raw = judge_by_gate(named(actual), reference, again)
    found = Detections(*(actual[f"found/{name}"] for name in ("queries", "masks", "boxes", "scores")))
    truth = _decided(actual, answer) if precision.judged_by_oracle else answer.truth
    raw = with_distributions(raw, named(actual), reference)
    prefix = f"{answer.name}/found/"
    masks = f"{prefix}masks"
    return raw + with_distributions(
        judge_detections(prefix, found, truth), {masks: found.masks}, {masks: truth.found.masks}
    )


def _alike(actual: Arrays, reference: Arrays) -> bool:
    """Returns whether raw outputs have the shapes and dtypes that they are to have."""
    return all(
        (actual[name].shape, actual[name].dtype) == (reference[name].shape, reference[name].dtype) for name in RAW
    )


def _presence_beside_logits(arrays: Arrays) -> Arrays:
    """Appends the one presence logit to the 200 logits that it makes the scores with.

    The error of a single number says nothing of how large it usually is, and the oracle verdict divides by it.
    """
    both = [arrays["logits"].ravel(), arrays["presence"].ravel()]
    return arrays | {"presence": np.concatenate(both)}


def _decided(actual: Arrays, answer: Answer) -> ReferenceDetections:
    """Decides on raw outputs as upstream does, or on upstream's own where the actual ones have other shapes."""
    _, height, width = answer.truth.found.masks.shape
    raw = actual if _alike(actual, answer.reference) else answer.reference
    return decided({name: raw[name] for name in RAW}, (width, height))


def _compile_and_run(run: Run, questions: tuple[Question, ...], saved: Path) -> bool:
    """Compiles upstream's model, runs it and saves its answers; returns False if it cannot be run."""
    with deployed_model(run, saved / "model") as model:
        if model is None:
            return False
        for answer, found in _segmented(model, questions):
            save_outputs(saved / answer, _arrays(found))
    return True


def _segmented(model: Sam3, questions: tuple[Question, ...]) -> Iterator[tuple[str, Segmented]]:
    """Yields the compiled model's answers by name; an image is encoded once."""
    for path, about in groupby(questions, lambda question: question.image):
        image = model.set_image(path)
        for question in about:
            yield from zip(question.answers, image.segment_each(prompts(question, image.size)), strict=True)


def prompts(question: Question, size: tuple[int, int]) -> list[Prompt]:
    """Converts a question to the runtime's prompts, in pixels of a photograph of that width and height."""
    centers = np.array(question.boxes, np.float64).reshape(-1, 2, 2) * size
    boxes = np.concatenate([centers[:, 0] - centers[:, 1] / 2, centers[:, 0] + centers[:, 1] / 2], axis=1)
    points = np.array(question.points, np.float64).reshape(-1, 2) * size
    return [
        Prompt(text, boxes, question.box_labels, points, question.point_labels) for text in question.texts or (None,)
    ]


def _arrays(found: Segmented) -> Arrays:
    queries = np.zeros(found.outputs.scores.shape[1], bool)
    queries[found.queries] = True
    return {name: getattr(found.outputs, name) for name in RAW} | {
        "found/queries": queries,
        "found/masks": found.masks,
        "found/boxes": found.boxes,
        "found/scores": found.scores,
    }
