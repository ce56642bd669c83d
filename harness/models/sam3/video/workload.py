"""Compiles the model into a folder, runs every video, session and step, and judges the results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.core.case import Case
from harness.core.expectations import Expectation
from harness.core.outcome import Verdict
from harness.core.program import Program
from harness.core.settings import Settings
from harness.models.sam3.deployed.entry_points.programs import programs
from harness.models.sam3.deployed.options import WITH_VIDEO
from harness.models.sam3.deployed.running import deployed_model
from harness.models.sam3.video.compiled_model import answer_question, compute_step
from harness.models.sam3.video.judging import judge_step, judge_video
from harness.models.sam3.video.questions import frames_of, load_questions
from harness.models.sam3.video.sessions import compiled_session
from harness.models.sam3.video.sessions import judging as sessions
from harness.models.sam3.video.sessions.scripts import load_scripts
from harness.models.sam3.video.source import Answer, RecordedStep, VideoSource
from harness.parity.saved_outputs import load_outputs, save_outputs, saved_folder

if TYPE_CHECKING:
    from harness.compiler.execution.run import Run


class VideoWorkload:
    """The questions and scripts of a case, answered by the compiled model through sessions, and each step by itself."""

    def __init__(self, case: Case, settings: Settings) -> None:
        """Reads the questions; upstream's model is built for the first answer that is not in the cache.

        Raises:
            HarnessError: Questions or cache cannot be used.
        """
        self._case = case
        self._settings = settings
        self._questions = load_questions(case.scale)
        self._scripts = load_scripts(case.scale)
        self._source = VideoSource(case, settings)
        self._saved = saved_folder(case)

    @property
    def programs(self) -> dict[str, Program]:
        """Builds and returns the entry points of a model that tracks."""
        return {program.name: program for program in programs(self._case, self._settings, WITH_VIDEO)}

    def run(self, run: Run) -> bool:
        """Compiles the folder, runs videos, sessions and steps, saves the results; returns False if that cannot run."""
        with deployed_model(run, self._saved / "model") as model:
            if model is None:
                return False
            answers = {question.name: answer_question(model, question) for question in self._questions}
            for name, answer in answers.items():
                save_outputs(self._saved / name, answer)
            for script in self._scripts:
                save_outputs(self._saved / script.name, compiled_session.answers(model, script, frames_of(script)))
            # PyTorch's states come from the cache or are computed here.
            for question in self._questions:
                for name, step in _steps(self._source.answer(question, answers[question.name])):
                    save_outputs(self._saved / name, compute_step(model, step, question.length))
        return True

    def judge(self, expectation: Expectation | None) -> tuple[Verdict, ...]:
        """Returns the verdicts on the saved results."""
        verdicts: list[Verdict] = []
        for question in self._questions:
            actual = load_outputs(self._saved / question.name)
            answer = self._source.answer(question, actual)
            verdicts += judge_video(actual, answer)
            for name, step in _steps(answer):
                verdicts += judge_step(name, load_outputs(self._saved / name), step, expectation)
        for script in self._scripts:
            actual = load_outputs(self._saved / script.name)
            verdicts += sessions.judge_session(script.name, actual, self._source.session(script))
        return tuple(verdicts)


def _steps(answer: Answer) -> list[tuple[str, RecordedStep]]:
    """Returns the steps of an answer by name; steps of several buckets on a frame are numbered by the bucket."""
    names: dict[str, RecordedStep] = {}
    for step in answer.steps:
        name = f"{answer.question.name}/frame_{step.frame}"
        bucket = sum(earlier.startswith(f"{name}/") for earlier in names)
        names[f"{name}/bucket_{bucket}"] = step
    return list(names.items())
