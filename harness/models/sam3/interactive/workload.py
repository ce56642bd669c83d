"""Masks of one object as a workload: compiled into a folder, loaded, asked every round, judged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.core.case import Case
from harness.core.expectations import Expectation
from harness.core.outcome import Verdict
from harness.core.precision import PRECISIONS
from harness.core.program import Arrays, Program
from harness.core.settings import Settings
from harness.models.sam3.deployed.deployable import DEPLOYABLE
from harness.models.sam3.deployed.entry_points.programs import programs
from harness.models.sam3.deployed.running import deployed_model
from harness.models.sam3.interactive import CAPACITY
from harness.models.sam3.interactive.questions import Question
from harness.models.sam3.interactive.source import NUMBERS, Answer, InteractiveSource
from harness.parity.detections import judge_masks
from harness.parity.distribution import add_distributions
from harness.parity.saved_outputs import load_outputs, save_outputs, saved_folder
from harness.parity.verdict import judge, judge_by_gate
from harness.runtime.sam3.image_model import EncodedImage
from harness.runtime.sam3.model import Sam3

if TYPE_CHECKING:
    from harness.execution.run import Run

Given = Mapping[str, npt.NDArray[np.float32] | None]
"""By the name of an answer: the logits that its round refines, or that there are none."""


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
        """See `harness.models.subject.Workload`."""
        half = PRECISIONS[self._case.precision].is_half
        given = {answer.name: answer.refined for answer in self._answers()} if half else {}
        with deployed_model(run, self._saved / "model", DEPLOYABLE.grounding) as model:
            if model is None:
                return False
            for answer, arrays in _asked(model, self._source.questions, given):
                save_outputs(self._saved / answer, arrays)
        return True

    def judge(self, expectation: Expectation | None) -> tuple[Verdict, ...]:
        """See `harness.models.subject.Workload`."""
        if PRECISIONS[self._case.precision].judged_by_oracle:
            answers = tuple(self._answers())
            return judged_by_oracle([load_outputs(self._saved / answer.name) for answer in answers], answers)
        return tuple(
            verdict
            for answer in self._answers()
            for verdict in judged(load_outputs(self._saved / answer.name), answer, expectation)
        )

    def _answers(self) -> Iterator[Answer]:
        for question in self._source.questions:
            yield from self._source.answers(question)


def judged_by_oracle(actual: Sequence[Arrays], answers: Sequence[Answer]) -> tuple[Verdict, ...]:
    """Judges all rounds in half precision; to be called inside `harness.models.sam3.upstream.upstream`.

    Logits pass by the oracle verdict. So do the predicted IoU of all rounds together, because the error of one to three
    numbers says little of how large it usually is. Masks are held to what upstream decides on the compiled model's own
    logits.

    Args:
        actual: What the compiled model answers to each round, `harness.models.sam3.interactive.OUTPUTS`.
        answers: What upstream answers.
    """
    from harness.models.sam3.interactive.refining import decided

    verdicts: list[Verdict] = []
    for arrays, answer in zip(actual, answers, strict=True):
        logits, masks = f"{answer.name}/logits", f"{answer.name}/masks"
        exact = {} if answer.oracle is None else {logits: answer.oracle["logits"]}
        ours, theirs = {logits: arrays["logits"]}, {logits: answer.reference["logits"]}
        verdicts += add_distributions(
            judge(ours, theirs, exact, reference_again={logits: answer.again["logits"]}, by_oracle=True), ours, theirs
        )
        fitting = arrays["logits"].shape == answer.reference["logits"].shape
        right, near = decided(arrays["logits"] if fitting else answer.reference["logits"], answer.size)
        judged_masks = judge_masks(masks, arrays["masks"], right, right, near)
        verdicts += add_distributions((judged_masks,), {masks: arrays["masks"]}, {masks: right})

    def together(each: Iterable[Arrays]) -> Arrays:
        return {"iou": np.concatenate([numbers["iou"] for numbers in each])}

    ious, reference = together(actual), together(answer.reference for answer in answers)
    again = together(answer.again for answer in answers)
    exact = together(answer.oracle for answer in answers if answer.oracle is not None)
    all_ious = judge(ious, reference, exact, reference_again=again, by_oracle=True)
    return (*verdicts, *add_distributions(all_ious, ious, reference))


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
    return add_distributions((*verdicts, masks), ours, theirs)


def _asked(model: Sam3, questions: tuple[Question, ...], given: Given) -> Iterator[tuple[str, Arrays]]:
    """The compiled model's answers by name; an image is encoded once.

    A round refines the mask that is given for it, and where none is given the best of the round before.
    """
    for path, about in groupby(questions, lambda question: question.image):
        image = model.set_image(path)
        for question in about:
            yield from _rounds(image, question, given)


def _rounds(image: EncodedImage, question: Question, given: Given) -> Iterator[tuple[str, Arrays]]:
    scale = np.array(image.size, np.float64)
    refined: Any = None
    for name, asked in zip(question.answers, question.rounds, strict=True):
        predicted = image.predict(
            points=np.array(asked.points).reshape(-1, 2) * scale,
            labels=asked.labels,
            box=None if asked.box is None else (np.array(asked.box).reshape(2, 2) * scale).ravel(),
            mask=given.get(name, refined),
            multimask=question.multimask,
        )
        refined = predicted.logits[predicted.best]
        yield name, {"logits": predicted.logits, "iou": predicted.iou, "masks": predicted.masks}
