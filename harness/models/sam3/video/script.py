"""Asks the compiled model about videos, in sessions and step by step, and judges its answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from harness.core.expectations import Expectation
from harness.core.outcome import Verdict
from harness.core.program import Arrays
from harness.models.sam3.scripted import Answer, Script
from harness.models.sam3.source import UpstreamModel
from harness.models.sam3.video.compiled import answer_question, answer_session, compute_step
from harness.models.sam3.video.judging import judge_step, judge_video
from harness.models.sam3.video.questions import QUESTIONS, SESSIONS, Question, SessionQuestion, VideoQuestion
from harness.parity.references import Reference, add_prefix, select
from harness.runtime.sam3.model import Sam3

UPSTREAM = "harness.models.sam3.video.answers"
"""The module that asks upstream about videos."""


def _ask_compiled(model: Sam3, question: Question, upstream: UpstreamModel) -> Arrays:
    """Returns the compiled model's answer: `frames/…`, and each step from PyTorch's own state, `steps/…`."""
    arrays = answer_question(model, question)
    reference = upstream.answer(UPSTREAM, question)
    for step in _steps(reference):
        state = reference.part(f"{step}/state").first
        arrays |= add_prefix(step, compute_step(model, state, question.length))
    return arrays


def _judge(
    answers: Iterable[Answer[VideoQuestion]], expectation: Expectation | None, _by_oracle: bool
) -> Iterator[Verdict]:
    for answer in answers:
        name, reference = answer.question.name, answer.reference
        followed = select(reference.first, "followed")
        yield from judge_video(name, select(answer.actual, "frames"), reference.part("frames"), followed)
        for step, actual, expected in answer.parts(_steps(reference)):
            yield from judge_step(step.replace("steps", name, 1), actual, expected, expectation)


def _steps(reference: Reference) -> list[str]:
    """Returns the names of the steps, `steps/frame_8/bucket_0` and so on."""
    end = "/state/frame"
    return [name.removesuffix(end) for name in reference.first if name.endswith(end)]


SCRIPTS: tuple[Script[Any], ...] = (
    Script(QUESTIONS, Question, UPSTREAM, _ask_compiled, _judge),
    Script(
        SESSIONS, SessionQuestion, UPSTREAM, lambda model, session, _upstream: answer_session(model, session), _judge
    ),
)
