"""Verifies whole models that are asked questions: upstream's and the compiled model answer, and a judge compares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from harness.core.case import Case
from harness.core.expectations import Expectation
from harness.core.names import select_names
from harness.core.outcome import Verdict
from harness.core.precision import PRECISIONS
from harness.core.program import Array, Arrays, Program
from harness.core.settings import Settings
from harness.models.sam3.deployed.options import Sam3Options
from harness.models.sam3.deployed.running import deployable_of, deployed_model
from harness.models.sam3.fixtures import PhotographQuestion, Question, read_questions
from harness.models.sam3.source import UpstreamModel
from harness.parity.cache import load_outputs, save_outputs, saved_folder
from harness.parity.references import Reference, select
from harness.parity.verdict import judge, judge_by_gate

if TYPE_CHECKING:
    from harness.compiler.execution.run import Run


@dataclass(frozen=True, eq=False)
class Answer(Generic[Question]):
    """The answers of both models to a question.

    Attributes:
        question: The question.
        actual: The compiled model's arrays by name.
        reference: Upstream's arrays.
    """

    question: Question
    actual: Arrays
    reference: Reference

    def parts(self, names: Iterable[str]) -> Iterator[tuple[str, Arrays, Reference]]:
        """Yields the parts with these names, as the compiled model and as upstream answers them."""
        for name in names:
            yield name, select(self.actual, name), self.reference.part(name)


@dataclass(frozen=True)
class Script(Generic[Question]):
    """Defines what is asked, how both models are asked, and how their answers are judged.

    Attributes:
        file: The file of the questions.
        kind: The class of the questions.
        upstream: The module whose function `answer` gives upstream's answers, see `UpstreamModel.answer`.
        ask_compiled: Returns the compiled model's answer to a question. It takes the encoded photograph of a
            `PhotographQuestion`, or else the model; upstream's model is for questions that contain upstream's answers.
        judge: Returns the verdicts on all answers; an expectation may allow the oracle verdict, and a case in half
            precision (`by_oracle`) does.
        asks_upstream_first: Whether the compiled model's questions contain upstream's answers in half precision.
    """

    file: Path
    kind: type[Question]
    upstream: str
    ask_compiled: Callable[[Any, Question, UpstreamModel], Arrays]
    judge: Callable[[Iterable[Answer[Question]], Expectation | None, bool], Iterable[Verdict]]
    asks_upstream_first: bool = False

    @property
    def about_photographs(self) -> bool:
        """Returns whether the questions are about photographs, of which the settings of a case may name another."""
        return issubclass(self.kind, PhotographQuestion)

    def questions(self, case: Case, settings: Settings) -> tuple[Question, ...]:
        """Reads the questions of a case; those about one photograph or video follow each other."""
        questions = read_questions(self.file, self.kind, settings.image if self.about_photographs else None)
        return tuple(question for question in questions if question.is_asked(case))


class ScriptedWorkload:
    """The questions of a case, answered by the compiled model through the runtime as users ask it."""

    def __init__(
        self, scripts: Sequence[Script[Any]], options: Sam3Options, builder: str, case: Case, settings: Settings
    ) -> None:
        """Reads the questions; upstream's model is built for the first answer that is not in the cache.

        Args:
            scripts: The kinds of questions.
            options: The options that the compiled model must have.
            builder: The module that builds upstream's model.
            case: The case.
            settings: Its settings.

        Raises:
            HarnessError: Questions or cache cannot be used, or there is no question of a name that is chosen.
        """
        self._options = options
        self._case = case
        self._settings = settings
        loaded = [(script, script.questions(case, settings)) for script in scripts]
        known = [question.name for _, questions in loaded for question in questions]
        names = select_names("question", settings.questions, known)
        self._questions = [
            (script, [question for question in questions if question.name in names]) for script, questions in loaded
        ]
        self._upstream = UpstreamModel(case, settings, builder)
        self._saved = saved_folder(case)

    @property
    def programs(self) -> dict[str, Program]:
        """Builds and returns the entry points of the compiled model that the questions need."""
        programs = deployable_of(self._case).programs(self._case, self._settings, self._options)
        return {program.name: program for program in programs}

    def run(self, run: Run) -> bool:
        """Compiles the folder, asks every question and saves the answers; returns False if code cannot be run here."""
        for script, questions in self._questions:
            if script.asks_upstream_first and self._upstream.half:
                for question in questions:  # into the cache, before a device is taken
                    self._upstream.answer(script.upstream, question)
        with deployed_model(run, self._saved / "model") as model:
            if model is None:
                return False
            for script, questions in self._questions:
                for path, image_questions in groupby(questions, lambda question: question.image):
                    subject = model.set_image(path) if script.about_photographs else model
                    for question in image_questions:
                        arrays = script.ask_compiled(subject, question, self._upstream)
                        save_outputs(self._saved / question.name, arrays)
        return True

    def judge(self, expectation: Expectation | None) -> tuple[Verdict, ...]:
        """Returns the verdicts on the saved answers."""
        by_oracle = PRECISIONS[self._case.precision].judged_by_oracle
        return tuple(
            verdict
            for script, questions in self._questions
            for verdict in script.judge(self._answers(script, questions), expectation, by_oracle)
        )

    def _answers(self, script: Script[Any], questions: Sequence[Any]) -> Iterator[Answer[Any]]:
        for question in questions:
            actual = load_outputs(self._saved / question.name)
            yield Answer(question, actual, self._upstream.answer(script.upstream, question, actual))


def judge_numbers(
    actual: Arrays, reference: Reference, expectation: Expectation | None = None, *, by_oracle: bool = False
) -> tuple[Verdict, ...]:
    """Judges outputs against two runs and float64, or by the strict gate alone where upstream did not run in float64.

    Args:
        actual: The compiled model's outputs by name.
        reference: Upstream's outputs with the same names.
        expectation: If it allows the oracle verdict, outputs may pass on it.
        by_oracle: Whether every output may pass by the oracle, as in half precision.
    """
    if not reference.exact:
        return judge_by_gate(actual, reference)
    return judge(actual, reference, expectation=expectation, by_oracle=by_oracle)


def pool(arrays: Iterable[Array]) -> Array:
    """Joins outputs that are judged as one array, because one of them has too few numbers.

    The error of a few numbers says little about its usual size, by which the oracle verdict divides. A component draws
    further errors there (`harness.parity.monte_carlo`); the whole model has others of the same kind.
    """
    return np.concatenate([array.ravel() for array in arrays])
