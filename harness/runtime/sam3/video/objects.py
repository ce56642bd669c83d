"""Defines the state of a video's tracked objects besides their memories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from harness.runtime.errors import ModelError

CLICKED_SCORE = 1.0
"""The score of an object that the user clicked (VI:1506)."""
LARGEST_ID = 2**62
"""The largest id that a user may choose: ids are int64, and objects that are found later get larger ids."""


@dataclass(frozen=True)
class TrackedObject:
    """A tracked object.

    Attributes:
        id: Its number, which is unique in the video.
        bucket: The number of its bucket. The objects of a bucket were found on one frame together, and share
            conditioning frames and selected memories (VB:1532).
        first_frame: The frame on which it was found.
        score: The score of the detection that it was found by, or 1 for a clicked object.
        unmatched: Number of frames on which no detection showed it though its mask had pixels.
        last_occluded: The frame on which its mask was last empty or suppressed, -1 if there is none; None before it has
            been tracked on a frame.
    """

    id: int
    bucket: int
    first_frame: int
    score: float
    unmatched: int = 0
    last_occluded: int | None = None


@dataclass(frozen=True)
class VideoState:
    """The planner's state between two frames. It is never changed; each frame has a new one.

    Attributes:
        objects: The tracked objects, bucket by bucket. Masks and scores of the tracker come in this order.
        next_id: The id of the next object that is found.
        next_bucket: The number of the next bucket.
        removed: Ids of the objects that hotstart removed; their outputs are hidden.
        duplicates: For (older object, younger object) the number of detections that they shared.
    """

    objects: tuple[TrackedObject, ...] = ()
    next_id: int = 0
    next_bucket: int = 0
    removed: frozenset[int] = frozenset()
    duplicates: Mapping[tuple[int, int], int] = field(default_factory=dict)

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of the tracked objects, in their order."""
        return tuple(item.id for item in self.objects)

    @property
    def scores(self) -> dict[int, float]:
        """The score of each tracked object."""
        return {item.id: item.score for item in self.objects}

    @property
    def buckets(self) -> dict[int, tuple[int, ...]]:
        """The ids of the objects of each bucket; a bucket without objects is left out."""
        members: dict[int, tuple[int, ...]] = {}
        for item in self.objects:
            members[item.bucket] = (*members.get(item.bucket, ()), item.id)
        return members


def state_after_click(state: VideoState, object_id: int, frame: int) -> VideoState:
    """Returns the state after a click on a frame: a new object gets its own bucket, a tracked one is refined.

    Its score becomes 1, and an object that hotstart had removed comes back (VI:1478-1513). A new object may be added
    before anything was found, where upstream's assertion fails (VI:553). It has a first frame, which upstream omits.

    Raises:
        ModelError: The id is negative, or too large.
    """
    if object_id < 0:
        raise ModelError(f"The object id is {object_id}; give 0 or a larger number.")
    if object_id > LARGEST_ID:
        raise ModelError(f"The object id is {object_id}; give at most {LARGEST_ID}.")
    if object_id in state.ids:
        refined = (replace(item, score=CLICKED_SCORE) if item.id == object_id else item for item in state.objects)
        return replace(state, objects=tuple(refined))
    added = TrackedObject(object_id, state.next_bucket, frame, CLICKED_SCORE)
    return replace(
        state,
        objects=(*state.objects, added),
        next_id=max(state.next_id, object_id + 1),
        next_bucket=state.next_bucket + 1,
        removed=state.removed - {object_id},
    )


def drop_objects(state: VideoState, object_ids: frozenset[int]) -> VideoState:
    """Returns the state without some objects (VI:1277, VB:1591); counts shared with other objects stay."""
    return replace(
        state,
        objects=tuple(item for item in state.objects if item.id not in object_ids),
        duplicates={pair: count for pair, count in state.duplicates.items() if pair[1] not in object_ids},
    )


def state_after_removal(state: VideoState, object_id: int) -> VideoState:
    """Returns the state after the user removed an object (VI:1277).

    Raises:
        ModelError: No such object is tracked.
    """
    if object_id not in state.ids:
        listed = ", ".join(map(str, state.ids)) or "none"
        raise ModelError(f"Object {object_id} is not tracked; tracked are: {listed}.")
    return drop_objects(state, frozenset({object_id}))
