"""Masks of one object as a workload: compiled into a folder, loaded, asked every round, judged."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.core.case import Case
from harness.core.expectations import Expectation
from harness.core.outcome import Verdict
from harness.core.settings import Settings
from harness.core.subject import Arrays, Program
from harness.models.sam3.deployed.deployable import DEPLOYABLE
from harness.models.sam3.deployed.entry_points.programs import programs
from harness.models.sam3.deployed.running import deployed_model
from harness.models.sam3.interactive.questions import Question
from harness.models.sam3.interactive.source import Answer, InteractiveSource
from harness.parity.detections import judge_masks
from harness.parity.distribution import with_distributions
from harness.parity.saved import load_outputs, save_outputs, saved_folder
from harness.parity.verdict import judge, judge_by_gate
from harness.runtime.manifest import DEFAULT_CLICKS, Capacity
from harness.runtime.sam3.model import EncodedImage, Sam3

if TYPE_CHECKING:
    from harness.execution.run import Run

CAPACITY = Capacity(clicks=DEFAULT_CLICKS)
NUMBERS = ("logits", "iou")
"""Outputs under the strict gate; masks have a criterion of their own."""


class InteractiveWorkload:
    """The questions of a case, asked of the compiled model through the runtime, as its users do."""

    def __init__(self, case: Case, settings: Settings) -> None:
        """Reads the questions; upstream's model is built when the first answer is not in the cache.

        Raises:
            HarnessError: Questions or cache cannot be used.
        """
        self._case = case
        self._settings = settings
        self._source = InteractiveSource(case, settings)
        self._saved = saved_folder(case)

    @property
    def programs(self) -> dict[str, Program]:
        """The entry points that predict masks of one object, built anew."""
        built = programs(self._case, self._settings, CAPACITY)
        return {program.name: program for program in built if program.name not in DEPLOYABLE.grounding}

    def run(self, run: Run) -> bool:
        """See `harness.core.subject.Workload`."""
        with deployed_model(run, self._saved / "model", CAPACITY, DEPLOYABLE.grounding) as model:
            if model is None:
                return False
            for answer, arrays in _asked(model, self._source.questions):
                save_outputs(self._saved / answer, arrays)
        return True

    def judge(self, expectation: Expectation | None) -> tuple[Verdict, ...]:
        """See `harness.core.subject.Workload`."""
        return tuple(
            verdict
            for question in self._source.questions
            for answer in self._source.answers(question)
            for verdict in judged(load_outputs(self._saved / answer.name), answer, expectation)
        )


def judged(actual: Arrays, answer: Answer, expectation: Expectation | None = None) -> tuple[Verdict, ...]:
    """Judges one round.

    Args:
        actual: What the compiled model answers, `harness.models.sam3.interactive.OUTPUTS`.
        answer: What upstream answers.
        expectation: If it allows the oracle verdict, logits and IoU may pass on it.
    """
    numbers, reference, again = (
        {f"{answer.name}/{name}": arrays[name] for name in NUMBERS}
        for arrays in (actual, answer.reference, answer.again)
    )
    if answer.oracle is not None:
        oracle = {f"{answer.name}/{name}": answer.oracle[name] for name in NUMBERS}
        verdicts = judge(numbers, reference, oracle, reference_again=again, expectation=expectation)
    else:
        verdicts = judge_by_gate(numbers, reference, again)
    name = f"{answer.name}/masks"
    masks = judge_masks(
        name,
        actual["masks"],
        answer.reference["masks"],
        answer.again["masks"],
        answer.reference["undecided"],
    )
    ours, theirs = numbers | {name: actual["masks"]}, reference | {name: answer.reference["masks"]}
    return with_distributions((*verdicts, masks), ours, theirs)


def _asked(model: Sam3, questions: tuple[Question, ...]) -> Iterator[tuple[str, Arrays]]:
    """The compiled model's answers by name; an image is encoded once."""
    for path, about in groupby(questions, lambda question: question.image):
        image = model.set_image(path)
        for question in about:
            yield from _rounds(image, question)


def _rounds(image: EncodedImage, question: Question) -> Iterator[tuple[str, Arrays]]:
    scale = np.array(image.size, np.float64)
    refined: Any = None
    for name, asked in zip(question.answers, question.rounds, strict=True):
        predicted = image.predict(
            points=np.array(asked.points).reshape(-1, 2) * scale,
            labels=asked.labels,
            box=None if asked.box is None else (np.array(asked.box).reshape(2, 2) * scale).ravel(),
            mask=refined,
            multimask=question.multimask,
        )
        refined = predicted.logits[predicted.best]
        yield name, {"logits": predicted.logits, "iou": predicted.iou, "masks": predicted.masks}
