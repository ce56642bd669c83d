"""Answers the requests of a session with the compiled model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.core.program import Arrays
from harness.models.sam3.video.questions import Pixels
from harness.models.sam3.video.sessions.answers import number_frames
from harness.models.sam3.video.sessions.scripts import Request, Script, mask_of, pixels_of
from harness.runtime.sam3.model import Sam3
from harness.runtime.sam3.video.session import Session, TrackedFrame


def answers(model: Sam3, script: Script, frames: Sequence[Pixels]) -> Arrays:
    """Returns the compiled model's answers to the requests of a script.

    Args:
        model: The model.
        script: The requests.
        frames: The frames, uint8 [h, w, 3].

    Returns:
        The numbered arrays of `arrays_of` of every returned frame.
    """
    session = model.start_session(list(frames), keep=True)
    size = frames[0].shape[:2]
    return number_frames(
        (position, arrays_of(frame))
        for position, request in enumerate(script.requests)
        for frame in _send(session, request, size)
    )


def arrays_of(frame: TrackedFrame) -> Arrays:
    """Returns the judged arrays of a frame: `index` int64 [1], `ids`, `scores`, `boxes` (x0, y0, x1, y1), `masks`."""
    return {
        "index": np.array([frame.index]),
        **{name: getattr(frame, name) for name in ("ids", "scores", "boxes", "masks")},
    }


def _send(session: Session, request: Request, size: tuple[int, int]) -> list[TrackedFrame]:
    if request.type == "propagate_in_video":
        return list(session.propagate(start=request.frame, reverse=request.reverse))
    if request.text is not None:
        return [session.add_prompt(request.frame, request.text)]
    assert request.object is not None
    if request.type == "remove_object":
        session.remove_object(request.object)
        return []
    prompted = session.add_prompt(
        request.frame,
        object_id=request.object,
        points=pixels_of(request.points, size).tolist() if request.points else None,
        labels=list(request.labels) or None,
        box=None if request.box is None else pixels_of(request.box, size).ravel().tolist(),
        mask=None if request.mask is None else mask_of(request.mask, size),
    )
    return [prompted]
