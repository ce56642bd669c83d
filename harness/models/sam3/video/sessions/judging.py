"""Judges sessions: the same frames and objects after every request, and their masks."""

from __future__ import annotations

import numpy as np

from harness.core.outcome import Verdict, VerdictKind
from harness.core.program import Arrays
from harness.models.sam3.video.sessions import SESSION_FRAMES
from harness.models.sam3.video.visible_objects import (
    FramePixels,
    answers_in,
    judge_by_frame,
    judge_visible,
    visible_ids,
)


def judge_session(name: str, actual: Arrays, reference: Arrays) -> tuple[Verdict, ...]:
    """Judges a session.

    Args:
        name: Prefix of the names of the verdicts.
        actual: The result of `harness.models.sam3.video.sessions.compiled_session.answers`.
        reference: The result of `harness.models.sam3.video.sessions.upstream.answers`.
    """
    frames = judge_by_frame(f"{name}/{SESSION_FRAMES}", _frames(actual), _frames(reference))
    ids = judge_by_frame(f"{name}/ids", *visible_ids(actual, reference))
    if not frames.kind is ids.kind is VerdictKind.STRICT:
        return frames, ids
    pixels = {number: _pixels(number, reference) for number in answers_in(reference)}
    return (frames, ids, *judge_visible(name, actual, reference, pixels))


def _frames(arrays: Arrays) -> np.ndarray:
    """Returns the request and the frame of every answer, int64 [answers, 2]."""
    return np.array([[arrays[f"{n}/{key}"][0] for key in ("request", "index")] for n in answers_in(arrays)])


def _pixels(number: int, reference: Arrays) -> FramePixels:
    ids = reference[f"{number}/candidates"].tolist()
    logits = [reference[f"{number}/logits/{object_id}"] for object_id in ids]
    return FramePixels.from_logits(
        ids, logits, reference[f"{number}/tracker_scores"], reference[f"{number}/masks"].shape[1:]
    )
