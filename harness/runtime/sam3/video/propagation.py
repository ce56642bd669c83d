"""Decides which frames a propagation processes, in which order, and what it computes on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.runtime.errors import ModelError

ActionKind = Literal["add", "refine", "remove", "full", "partial", "fetch"]
PropagationKind = Literal["full", "partial", "fetch"]


@dataclass(frozen=True)
class Action:
    """An action of the user since the last text or box.

    Attributes:
        kind: An object was added, refined or removed; or a propagation ran: of everything ("full"), of some objects
            ("partial"), or of nothing, with the earlier outputs ("fetch").
        objects: The objects of the action; none for "full" and "fetch".
        start: For a propagation the frame that the user asked to start from, None for the default.
    """

    kind: ActionKind
    objects: frozenset[int] = frozenset()
    start: int | None = None


@dataclass(frozen=True)
class PropagationScope:
    """The scope of a propagation.

    Attributes:
        kind: "full": detector and tracker run, and the planner decides. "partial": the tracker runs for some objects,
            and the others' outputs stay. "fetch": the outputs are the earlier ones.
        objects: The objects of "partial".
    """

    kind: PropagationKind
    objects: frozenset[int] = frozenset()


def next_propagation(history: Sequence[Action], frames: int) -> PropagationScope:
    """Returns the scope of the next propagation, by the history (`parse_action_history_for_propagation`, VI:1219).

    - The first one is full.
    - After objects were added or refined, it is partial, of these objects. After objects were only removed, outputs
      are fetched. On frames that were never computed `VideoProcessor` computes everything, whatever the scope is.
    - After a propagation it is the same kind again, for the other direction. It is a fetch if two of them ran
      already, if the last one was asked to start at the first or the last frame, or was a fetch itself.

    An object that was added before the first propagation makes it partial; then the detector never runs.

    Args:
        history: All actions since the last text or box, oldest first.
        frames: The number of frames of the video.
    """
    if not history:
        return PropagationScope("full")
    last = history[-1]
    if last.kind == "fetch":
        return PropagationScope("fetch")
    if last.kind in ("full", "partial"):
        ran_twice = len(history) > 1 and history[-2].kind in ("full", "partial")
        if ran_twice or last.start in (0, frames - 1):
            return PropagationScope("fetch")
        return PropagationScope("full" if last.kind == "full" else "partial", last.objects)
    changed: set[int] = set()
    for action in reversed(history):
        if action.kind in ("full", "partial", "fetch"):
            break
        if action.kind in ("add", "refine"):
            changed |= action.objects
    return PropagationScope("partial", frozenset(changed)) if changed else PropagationScope("fetch")


def processing_order(
    start: int | None, limit: int | None, frames: int, reverse: bool, processed: Sequence[int]
) -> range:
    """Returns the frames of a propagation in order (`_get_processing_order`, VI:221).

    Forwards it begins with `start` and goes on for `limit` frames after it. Backwards it begins with the frame before
    `start`.

    Args:
        start: The frame to start from; None for the first one that was processed before.
        limit: The number of frames to go on; None for all.
        frames: The number of frames of the video.
        reverse: Whether to go backwards.
        processed: The frames that were processed before, for a prompt or by a propagation.

    Raises:
        ModelError: There is no prompt yet, or no such frame.
    """
    if start is None and not processed:
        raise ModelError("Nothing is asked of this video; add a text, a box or points first.")
    first = min(processed) if start is None else start
    if not 0 <= first < frames:
        raise ModelError(f"The frame to start from is {first}; the video has frames 0 to {frames - 1}.")
    reach = frames if limit is None else limit
    if reach < 0:
        raise ModelError(f"The number of frames to process is {reach}; give 0 or a larger number.")
    if reverse:
        return range(first - 1, max(first - reach, 0) - 1, -1)
    return range(first, min(first + reach, frames - 1) + 1)
