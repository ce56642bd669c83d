"""Videos as a workload: compiled into a folder, loaded, driven through every video, session and step, judged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.core.case import Case
from harness.core.expectations import Expectation
from harness.core.outcome import Verdict
from harness.core.program import Program
from harness.core.settings import Settings
from harness.models.sam3.deployed.entry_points.programs import programs
from harness.models.sam3.deployed.running import deployed_model
from harness.models.sam3.video import CAPACITY
from harness.models.sam3.video.judging import judged, judged_step
from harness.models.sam3.video.questions import frames_of, load_questions
from harness.models.sam3.video.sessions import compiled
from harness.models.sam3.video.sessions import judging as sessions
from harness.models.sam3.video.sessions.scripts import load_scripts
from harness.models.sam3.video.source import Answer, AskedStep, VideoSource
from harness.models.sam3.video.tracked import answered, stepped
from harness.parity.saved_outputs import load_outputs, save_outputs, saved_folder

if TYPE_CHECKING:
    from harness.execution.run import Run


class VideoWorkload:
    """Questions and scripts of a case, asked of the compiled model through sessions, and each step by itself."""

    def __init__(self, case: Case, settings: Settings) -> None:
        """Reads the questions; upstream's model is built when the first answer is not in the cache.

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
        """The entry points of a model that tracks, built anew."""
        return {program.name: program for program in programs(self._case, self._settings, CAPACITY)}

    def run(self, run: Run) -> bool:
        """See `harness.models.subject.Workload`."""
        with deployed_model(run, self._saved / "model") as model:
            if model is None:
                return False
            answers = {question.name: answered(model, question) for question in self._questions}
            for name, answer in answers.items():
                save_outputs(self._saved / name, answer)
            for script in self._scripts:
                save_outputs(self._saved / script.name, compiled.answers(model, script, frames_of(script)))
            # PyTorch's states are in the cache, or are made now.
            for question in self._questions:
                for name, step in _steps(self._source.answer(question, answers[question.name])):
                    save_outputs(self._saved / name, stepped(model, step, question.length))
        return True

    def judge(self, expectation: Expectation | None) -> tuple[Verdict, ...]:
        """See `harness.models.subject.Workload`."""
        verdicts: list[Verdict] = []
        for question in self._questions:
            actual = load_outputs(self._saved / question.name)
            answer = self._source.answer(question, actual)
            verdicts += judged(actual, answer)
            for name, step in _steps(answer):
                verdicts += judged_step(name, load_outputs(self._saved / name), step, expectation)
        for script in self._scripts:
            actual = load_outputs(self._saved / script.name)
            verdicts += sessions.judged(script.name, actual, self._source.session(script))
        return tuple(verdicts)


def _steps(answer: Answer) -> list[tuple[str, AskedStep]]:
    """The steps of an answer by name; those of several buckets on a frame are numbered by the bucket."""
    names: dict[str, AskedStep] = {}
    for step in answer.steps:
        name = f"{answer.question.name}/frame_{step.frame}"
        bucket = sum(known.startswith(f"{name}/") for known in names)
        names[f"{name}/bucket_{bucket}"] = step
    return list(names.items())
