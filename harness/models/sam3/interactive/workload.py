"""Compiles the model into a folder, asks it about one object in every round, and judges its answers."""

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
from harness.models.sam3.deployed.entry_points.programs import programs
from harness.models.sam3.deployed.options import CLICKS_ALONE
from harness.models.sam3.deployed.running import deployed_model
from harness.models.sam3.detections import judge_masks
from harness.models.sam3.interactive.questions import Question
from harness.models.sam3.interactive.source import NUMBERS, Answer, InteractiveSource
from harness.parity.distribution import add_distributions
from harness.parity.saved_outputs import load_outputs, save_outputs, saved_folder
from harness.parity.verdict import judge, judge_by_gate
from harness.runtime.sam3.image_model import EncodedImage
from harness.runtime.sam3.model import Sam3

if TYPE_CHECKING:
    from harness.compiler.execution.run import Run

RefinedMasks = Mapping[str, npt.NDArray[np.float32] | None]
"""Name of an answer → the logits that its round refines, or None."""


class InteractiveWorkload:
    """The questions of a case, answered by the compiled model through the runtime."""

    def __init__(self, case: Case, settings: Settings) -> None:
        """Reads the questions; upstream's model is built for the first answer that is not in the cache.

        Raises:
            HarnessError: Questions or cache cannot be used.
        """
        self._case = case
        self._settings = settings
        self._source = InteractiveSource(case, settings)
        self._saved = saved_folder(case)

    @property
    def programs(self) -> dict[str, Program]:
        """Builds and returns the entry points that predict masks of one object."""
        return {program.name: program for program in programs(self._case, self._settings, CLICKS_ALONE)}

    def run(self, run: Run) -> bool:
        """Compiles the folder, asks every question and saves the answers; returns False if code cannot be run here."""
        half = PRECISIONS[self._case.precision].is_half
        refined_masks = {answer.name: answer.refined for answer in self._answers()} if half else {}
        with deployed_model(run, self._saved / "model") as model:
            if model is None:
                return False
            for answer, arrays in _answer_questions(model, self._source.questions, refined_masks):
                save_outputs(self._saved / answer, arrays)
        return True

    def judge(self, expectation: Expectation | None) -> tuple[Verdict, ...]:
        """Returns the verdicts on the saved answers."""
        if PRECISIONS[self._case.precision].judged_by_oracle:
            answers = tuple(self._answers())
            return judge_rounds_by_oracle([load_outputs(self._saved / answer.name) for answer in answers], answers)
        return tuple(
            verdict
            for answer in self._answers()
            for verdict in judge_round(load_outputs(self._saved / answer.name), answer, expectation)
        )

    def _answers(self) -> Iterator[Answer]:
        for question in self._source.questions:
            yield from self._source.answers(question)


def judge_rounds_by_oracle(actual: Sequence[Arrays], answers: Sequence[Answer]) -> tuple[Verdict, ...]:
    """Judges all rounds in half precision; to be called inside `harness.models.sam3.upstream.upstream`.

    Logits pass by the oracle verdict. The predicted IoU of all rounds are judged as one array, because the error of one
    to three numbers says little about its usual size. Masks are held to upstream's decision on the compiled model's own
    logits.

    Args:
        actual: The compiled model's answers to each round, `harness.models.sam3.interactive.OUTPUTS`.
        answers: Upstream's answers.
    """
    from harness.models.sam3.interactive.refining import decide_masks

    verdicts: list[Verdict] = []
    for arrays, answer in zip(actual, answers, strict=True):
        logits, masks = f"{answer.name}/logits", f"{answer.name}/masks"
        exact = {} if answer.oracle is None else {logits: answer.oracle["logits"]}
        compiled_logits, reference_logits = {logits: arrays["logits"]}, {logits: answer.reference["logits"]}
        verdicts += add_distributions(
            judge(
                compiled_logits,
                reference_logits,
                exact,
                reference_again={logits: answer.rerun["logits"]},
                by_oracle=True,
            ),
            compiled_logits,
            reference_logits,
        )
        same_shape = arrays["logits"].shape == answer.reference["logits"].shape
        expected, near = decide_masks(arrays["logits"] if same_shape else answer.reference["logits"], answer.size)
        judged_masks = judge_masks(masks, arrays["masks"], expected, expected, near)
        verdicts += add_distributions((judged_masks,), {masks: arrays["masks"]}, {masks: expected})

    def concatenate_ious(rounds: Iterable[Arrays]) -> Arrays:
        return {"iou": np.concatenate([numbers["iou"] for numbers in rounds])}

    ious, reference = concatenate_ious(actual), concatenate_ious(answer.reference for answer in answers)
    rerun = concatenate_ious(answer.rerun for answer in answers)
    exact = concatenate_ious(answer.oracle for answer in answers if answer.oracle is not None)
    all_ious = judge(ious, reference, exact, reference_again=rerun, by_oracle=True)
    return (*verdicts, *add_distributions(all_ious, ious, reference))


def judge_round(actual: Arrays, answer: Answer, expectation: Expectation | None = None) -> tuple[Verdict, ...]:
    """Judges one round.

    Args:
        actual: The compiled model's answer, `harness.models.sam3.interactive.OUTPUTS`.
        answer: Upstream's answer.
        expectation: If it allows the oracle verdict, logits and IoU may pass on it.
    """
    numbers, reference, rerun = (
        {f"{answer.name}/{name}": arrays[name] for name in NUMBERS}
        for arrays in (actual, answer.reference, answer.rerun)
    )
    if answer.oracle is not None:
        oracle = {f"{answer.name}/{name}": answer.oracle[name] for name in NUMBERS}
        verdicts = judge(numbers, reference, oracle, reference_again=rerun, expectation=expectation)
    else:
        verdicts = judge_by_gate(numbers, reference, rerun)
    name = f"{answer.name}/masks"
    masks = judge_masks(
        name,
        actual["masks"],
        answer.reference["masks"],
        answer.rerun["masks"],
        answer.reference["undecided"],
    )
    compiled_arrays, reference_arrays = numbers | {name: actual["masks"]}, reference | {name: answer.reference["masks"]}
    return add_distributions((*verdicts, masks), compiled_arrays, reference_arrays)


def _answer_questions(
    model: Sam3, questions: tuple[Question, ...], refined_masks: RefinedMasks
) -> Iterator[tuple[str, Arrays]]:
    """Yields the compiled model's answers by name; an image is encoded once.

    A round refines its mask in `refined_masks`, or else the best mask of the previous round.
    """
    for path, image_questions in groupby(questions, lambda question: question.image):
        image = model.set_image(path)
        for question in image_questions:
            yield from _answer_rounds(image, question, refined_masks)


def _answer_rounds(
    image: EncodedImage, question: Question, refined_masks: RefinedMasks
) -> Iterator[tuple[str, Arrays]]:
    scale = np.array(image.size, np.float64)
    refined: Any = None
    for name, prompt in zip(question.answers, question.rounds, strict=True):
        predicted = image.predict(
            points=np.array(prompt.points).reshape(-1, 2) * scale,
            labels=prompt.labels,
            box=None if prompt.box is None else (np.array(prompt.box).reshape(2, 2) * scale).ravel(),
            mask=refined_masks.get(name, refined),
            multimask=question.multimask,
        )
        refined = predicted.logits[predicted.best]
        yield name, {"logits": predicted.logits, "iou": predicted.iou, "masks": predicted.masks}
