"""Asks the compiled model about videos, in sessions and step by step, and judges its answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from harness.core.case import Case
from harness.core.expectations import Expectation
from harness.core.outcome import Verdict
from harness.core.program import Arrays
from harness.core.settings import Settings
from harness.models.sam3.scripted import Answer, Script
from harness.models.sam3.source import UpstreamModel
from harness.models.sam3.video.compiled import answer_question, answer_session, compute_step
from harness.models.sam3.video.judging import judge_session, judge_step, judge_video
from harness.models.sam3.video.questions import Question, SessionQuestion, load_questions, load_sessions
from harness.parity.references import Reference, add_prefix, select
from harness.runtime.sam3.model import Sam3

UPSTREAM = "harness.models.sam3.video.upstream"
"""The module that asks upstream about videos."""


def _load_questions(case: Case, _settings: Settings) -> Sequence[Question]:
    return load_questions(case.scale)


def _ask_compiled(model: Sam3, questions: Sequence[Question], upstream: UpstreamModel) -> Iterator[Arrays]:
    """Yields the compiled model's answers: `frames/…`, and each step from PyTorch's own state, `steps/…`."""
    for question in questions:
        arrays = add_prefix("frames", answer_question(model, question))
        reference = upstream.answer(UPSTREAM, question, arrays)
        for step in _steps(reference):
            state = reference.part(f"{step}/state").first
            arrays |= add_prefix(step, compute_step(model, state, question.length))
        yield arrays


def _judge(answers: Iterable[Answer[Question]], expectation: Expectation | None, _case: Case) -> Iterator[Verdict]:
    for answer in answers:
        name, reference = answer.question.name, answer.reference
        yield from judge_video(name, select(answer.actual, "frames"), reference.part("frames"))
        for step in _steps(reference):
            step_name = step.replace("steps", name, 1)
            yield from judge_step(step_name, select(answer.actual, step), reference.part(step), expectation)


def _steps(reference: Reference) -> list[str]:
    """Returns the names of the steps, `steps/frame_8/bucket_0` and so on."""
    end = "/state/frame"
    return [name.removesuffix(end) for name in reference.first if name.endswith(end)]


def _load_sessions(case: Case, _settings: Settings) -> Sequence[SessionQuestion]:
    return load_sessions(case.scale)


def _ask_compiled_session(
    model: Sam3, questions: Sequence[SessionQuestion], _upstream: UpstreamModel
) -> Iterator[Arrays]:
    for question in questions:
        yield answer_session(model, question)


def _judge_sessions(
    answers: Iterable[Answer[SessionQuestion]], _expectation: Expectation | None, _case: Case
) -> Iterator[Verdict]:
    for answer in answers:
        yield from judge_session(answer.question.name, answer.actual, answer.reference.first)


SCRIPTS = (
    Script(_load_questions, UPSTREAM, _ask_compiled, _judge),
    Script(_load_sessions, "harness.models.sam3.video.upstream_session", _ask_compiled_session, _judge_sessions),
)
