"""Propagation: which frames are processed in which order, and what is computed again of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.runtime.errors import Sam3Error

ActionKind = Literal["add", "refine", "remove", "full", "partial", "fetch"]
PropagationKind = Literal["full", "partial", "fetch"]


@dataclass(frozen=True)
class Action:
    """What the user did with a video since its last text or box.

    Attributes:
        kind: An object was added, refined or removed; or a propagation ran: of everything ("full"), of some objects
            ("partial"), or of nothing, with the outputs taken from before ("fetch").
        objects: The objects that it was about; none for "full" and "fetch".
        start: For a propagation the frame that the user asked to start from, None for the default.
    """

    kind: ActionKind
    objects: frozenset[int] = frozenset()
    start: int | None = None


@dataclass(frozen=True)
class Propagation:
    """What a propagation computes.

    Attributes:
        kind: "full": detector and tracker run, and the planner decides. "partial": the tracker runs for some objects,
            and the others' outputs are kept. "fetch": the outputs are those that are kept.
        objects: The objects of "partial".
    """

    kind: PropagationKind
    objects: frozenset[int] = frozenset()


def next_propagation(history: Sequence[Action], frames: int) -> Propagation:
    """What the next propagation computes, by what happened before (`parse_action_history_for_propagation`, VI:1219).

    - The first one is full.
    - After objects were added or refined, it is partial, of these objects. After objects were only removed, outputs
      are fetched. On frames that were never computed everything is computed, whatever this says (`VideoProcessor`).
    - After a propagation it is the same kind again, for the other direction. It is a fetch if two of them ran
      already, if the last one was asked to start at the first or the last frame, or was a fetch itself.

    An object that was added before the first propagation makes it partial; then the detector is never asked.

    Args:
        history: All actions since the last text or box, oldest first.
        frames: The number of frames of the video.
    """
    if not history:
        return Propagation("full")
    last = history[-1]
    if last.kind == "fetch":
        return Propagation("fetch")
    if last.kind in ("full", "partial"):
        both = len(history) > 1 and history[-2].kind in ("full", "partial")
        if both or last.start in (0, frames - 1):
            return Propagation("fetch")
        return Propagation("full" if last.kind == "full" else "partial", last.objects)
    changed: set[int] = set()
    for action in reversed(history):
        if action.kind in ("full", "partial", "fetch"):
            break
        if action.kind in ("add", "refine"):
            changed |= action.objects
    return Propagation("partial", frozenset(changed)) if changed else Propagation("fetch")


def processing_order(
    start: int | None, limit: int | None, frames: int, reverse: bool, processed: Sequence[int]
) -> range:
    """The frames that a propagation goes through (`_get_processing_order`, VI:221).

    Forwards it begins with `start` and goes on for `limit` frames after it. Backwards it begins with the frame before
    `start`.

    Args:
        start: The frame to start from; None for the first one that was processed before.
        limit: How far to go; None for to the end.
        frames: The number of frames of the video.
        reverse: Whether to go backwards.
        processed: The frames that were processed before, for a prompt or by a propagation.

    Raises:
        Sam3Error: Nothing was asked yet, or there is no such frame.
    """
    if start is None and not processed:
        raise Sam3Error("Nothing is asked of this video; add a text, a box or points first.")
    first = min(processed) if start is None else start
    if not 0 <= first < frames:
        raise Sam3Error(f"The frame to start from is {first}; the video has frames 0 to {frames - 1}.")
    reach = frames if limit is None else limit
    if reach < 0:
        raise Sam3Error(f"The number of frames to process is {reach}; give 0 or a larger number.")
    if reverse:
        return range(first - 1, max(first - reach, 0) - 1, -1)
    return range(first, min(first + reach, frames - 1) + 1)


def prompts_of_detections(known: Mapping[int, int], frame: int, frames: int, reverse: bool) -> dict[int, int]:
    """Of which frame the boxes are that the detector has for each frame, when a frame's detections are needed.

    Upstream's detector runs one frame ahead, with the boxes of the frame that is processed
    (sam3/model/sam3_image.py:728-788). Beside a text, the boxes of one frame thus decide also about the next frame,
    unless that was looked at before. This project follows it; a text applies to all frames, and without boxes there
    is no difference.

    Args:
        known: What this function returned for the frame before; nothing after a new text or box.
        frame: The frame whose detections are needed.
        frames: The number of frames of the video.
        reverse: Whether frames are processed backwards.

    Returns:
        For this frame and the next one, and others that are still remembered, the frame whose boxes the detector had.
    """
    step = -1 if reverse else 1
    prompts = {frame: frame, **known}
    prompts.pop(frame - step, None)
    if 0 <= frame + step < frames:
        prompts.setdefault(frame + step, frame)
    return prompts
