"""Answers questions with upstream's video model, which goes on from the compiled model's logits where it must.

Two correct models decide differently where an error of rounding decides: which of two objects owns a pixel, which hole
is filled, which object is remembered. All later frames follow from that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.core.program import Arrays
from harness.models.sam3.video import upstream as tracking
from harness.models.sam3.video import upstream_session
from harness.models.sam3.video.compiled import computed_frames
from harness.models.sam3.video.following import Following, NotRoundingError
from harness.models.sam3.video.judging import is_strict, judge_frames
from harness.models.sam3.video.questions import Question, SessionQuestion
from harness.parity.arrays import arrays_digest
from harness.parity.references import Reference, add_prefix, select

if TYPE_CHECKING:
    from harness.models.sam3.source import UpstreamModel


def answer(upstream: UpstreamModel, question: Question | SessionQuestion, actual: Arrays) -> Reference:
    """Returns upstream's answer to a question about a video or to the requests of a session.

    If the compiled model's answer differs from it, upstream answers again and takes the compiled model's logits on each
    frame, as long as they differ from its own by rounding alone. That answer has the same decisions of rounding.

    Args:
        upstream: Upstream's model.
        question: The question.
        actual: The compiled model's answer; empty for upstream's own answer alone.

    Returns:
        The arrays of `harness.models.sam3.video.upstream.answer` or `upstream_session.answer`; and, where upstream
        answered again, `followed/0/…`, `followed/1/…` and so on.
    """
    module: Any = upstream_session if isinstance(question, SessionQuestion) else tracking
    reference = upstream.cached(module.__name__, question, lambda: module.answer(upstream, question))
    if not actual or is_strict(
        judge_frames(question.name, select(actual, "frames"), select(reference.first, "frames"))
    ):
        return reference
    computed = computed_frames(question, actual)
    digests = [f"{frame} {arrays_digest(arrays)}" for frame, arrays in computed.items()]

    def follow() -> Reference:
        try:
            with Following(computed).running(upstream.video):
                return Reference.from_run(module.answer_frames(upstream, question))
        except NotRoundingError:
            return Reference.from_run({})

    followed = upstream.cached(module.__name__, question, follow, followed=digests)
    return replace(reference, first=reference.first | add_prefix("followed", followed.first))
