"""Selects the memories and pointers that a frame attends to, and those that can be dropped.

These are the tracker's rules as functions of frame numbers and scores. TB is upstream's `model/sam3_tracker_base.py`
and TU its `model/sam3_tracker_utils.py`, with the lines of sam3 0.1.4. A conditioning frame has a click or a mask of a
user or of the detector. Every other tracked frame is non-conditioning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from itertools import islice

import numpy as np
import numpy.typing as npt

from harness.runtime.errors import ModelError
from harness.runtime.sam3.video.rules import DISAMBIGUATED

Floats = npt.NDArray[np.float32]

HOTSTART = DISAMBIGUATED.hotstart_frames
"""Frames after its birth within which the planner may remove an object."""


@dataclass(frozen=True)
class MemoryRules:
    """The settings of the rules, by upstream's names (TB:24); the defaults are those of `build_sam3_video_model`.

    Upstream's stride between memories (`memory_temporal_stride_for_eval`) is 1 in every model that it builds.

    Attributes:
        max_cond_frames_in_attn: Maximum number of conditioning frames that a frame attends to.
        num_maskmem: Rows of the table of temporal positions: one for conditioning frames, the others for other frames.
        max_obj_ptrs_in_encoder: Maximum number of pointers of non-conditioning frames, plus one.
        use_memory_selection: Whether non-conditioning frames are selected by their scores.
        mf_threshold: A score above it makes a frame valid; PyTorch compares in float32.
    """

    max_cond_frames_in_attn: int = 4
    num_maskmem: int = 7
    max_obj_ptrs_in_encoder: int = 16
    use_memory_selection: bool = True
    mf_threshold: float = 0.01

    def pointer_span(self, num_frames: int | None) -> int:
        """Returns the pointers of a video, fewer in a shorter one (TB:524, TB:696); a stream counts as a long video."""
        return self.max_obj_ptrs_in_encoder if num_frames is None else min(num_frames, self.max_obj_ptrs_in_encoder)


RULES = MemoryRules()


@dataclass(frozen=True)
class AttentionPlan:
    """The memories and pointers that a frame attends to, in upstream's order.

    Attributes:
        memories: (frame, rank) each; the rank is the row of `maskmem_tpos_enc`.
        pointers: (frame, time) each; the time is a float32 that `_get_tpos_enc` encodes (TB:162).
    """

    memories: tuple[tuple[int, int], ...]
    pointers: tuple[tuple[int, float], ...]


def plan_attention(
    frame: int,
    conditioning: Sequence[int],
    scores: Mapping[int, np.float32 | None],
    *,
    num_frames: int | None = None,
    reverse: bool = False,
    rules: MemoryRules = RULES,
) -> AttentionPlan:
    """Selects what a frame attends to, as `_prepare_memory_conditioned_features` does (TB:560).

    Upstream divides the times of pointers by one less than their number (TB:166). A clip of fewer than 16 frames
    therefore differs from the beginning of a longer one. This is followed. A video of one frame would divide by zero
    upstream; here its only time is 0.

    Args:
        frame: The tracked frame.
        conditioning: Conditioning frames in the order in which they became so.
        scores: The score of every non-conditioning frame; None for a frame without one.
        num_frames: Frames of the video; None for a stream, whose end is unknown and which upstream cannot track.
        reverse: Whether the video is tracked backwards.
        rules: The settings.

    Raises:
        ModelError: The frame is not in the video, or no frame is conditioning.
    """
    if frame < 0 or (num_frames is not None and frame >= num_frames):
        raise ModelError(f"Frame {frame} is not in this video of {num_frames} frames; the first one is frame 0.")
    if not conditioning:
        raise ModelError(f"Frame {frame} cannot be tracked because no frame has a click or a mask; give one first.")
    selected = closest_conditioning_frames(frame, conditioning, rules.max_cond_frames_in_attn)
    # A conditioning frame that is not selected counts as any other frame (TB:649).
    available = {*scores, *conditioning} - set(selected)
    span = rules.pointer_span(num_frames)
    recent = recent_frames(frame, scores, span, reverse, rules)

    # Conditioning frames share the last row (TB:675); the row of the others grows with their rank in age (TB:616).
    memories = [(index, rules.num_maskmem - 1) for index in selected]
    recent_memories = [
        (index, rank) for rank, index in enumerate(recent[: rules.num_maskmem - 1]) if index in available
    ]
    memories.extend(reversed(recent_memories))  # the oldest one first

    # Pointers of conditioning frames that are still to come are left out (TB:700).
    ages = [(index, (index - frame) if reverse else (frame - index)) for index in selected]
    pointers = [(index, age) for index, age in ages if age >= 0]
    # With memory selection upstream stops one short of the oldest (TB:724). The age of the others is their rank.
    pointer_frames = recent[:-1] if rules.use_memory_selection else recent
    pointers.extend((index, age) for age, index in enumerate(pointer_frames, start=1) if index in available)
    largest_age = np.float32(max(span - 1, 1))
    return AttentionPlan(
        tuple(memories), tuple((index, float(np.float32(age) / largest_age)) for index, age in pointers)
    )


def closest_conditioning_frames(frame: int, conditioning: Sequence[int], limit: int) -> tuple[int, ...]:
    """Returns all conditioning frames in their order, or the closest if there are more than `limit` (TU:270).

    These are the nearest one before the frame, the nearest one that is not before it, and then the closest others. Of
    two frames at the same distance, the one that became conditioning earlier comes first.
    """
    if len(conditioning) <= limit:
        return tuple(conditioning)
    nearest_before = max((index for index in conditioning if index < frame), default=None)
    nearest_after = min((index for index in conditioning if index >= frame), default=None)
    nearest = [index for index in (nearest_before, nearest_after) if index is not None]
    farther = sorted((index for index in conditioning if index not in nearest), key=lambda index: abs(index - frame))
    return (*nearest, *farther)[:limit]


def recent_frames(
    frame: int, scores: Mapping[int, np.float32 | None], span: int, reverse: bool, rules: MemoryRules
) -> tuple[int, ...]:
    """Returns the non-conditioning frames that may be read, the nearest one first.

    With memory selection these are the adjacent frame, whatever its score is, and the `span` - 1 nearest valid frames,
    among which it may be (`frame_filter`, TB:518). Forwards frame 0 is never valid (TB:530). Without memory selection
    these are the `span` - 1 adjacent frames, one after another (TB:622, TB:720).
    """
    step = 1 if reverse else -1
    adjacent = frame + step
    if not rules.use_memory_selection:
        return tuple(range(adjacent, frame + step * span, step))
    passed = [index for index in scores if (index > frame if reverse else 0 < index < frame)]
    valid = (index for index in sorted(passed, reverse=not reverse) if is_valid(scores[index], rules))
    nearest = tuple(islice(valid, span - 1))
    return nearest if adjacent in nearest else (adjacent, *nearest)


def is_valid(score: np.float32 | None, rules: MemoryRules) -> bool:
    """Returns whether a frame's score is high enough for the frame to be read later (TB:543, TB:549)."""
    return score is not None and bool(score > np.float32(rules.mf_threshold))


def effective_iou(object_logits: Floats, iou: Floats) -> np.float32:
    """Returns the score of a frame for a bucket of B objects (`cal_mem_score`, model/sam3_tracker_base.py:509).

    The presence of an object is 2·sigmoid(logit) − 1 where its logit is above zero, and 0 elsewhere. Upstream keeps the
    IoU of a tracked frame as [B], while logits are [B, 1]. Their product is then [B, B], and its mean is the mean
    presence times the mean IoU. A frame that several clicks were consolidated on has its IoU as [B, 1], and the mean of
    the products. An absent object thus lowers the score of the present ones. This is followed, because it decides which
    frames upstream attends to.

    Args:
        object_logits: fp32 [B, 1].
        iou: fp32 [B] or [B, 1], predicted by the mask decoder.
    """
    positive = np.where(object_logits > 0, object_logits, np.float32(0))
    presence = np.float32(2) / (np.float32(1) + np.exp(-positive)) - np.float32(1)
    return np.float32((presence * iou).mean(dtype=np.float32))


class Retention(Enum):
    """The future use of a memory bank, which decides what is kept.

    Attributes:
        EVERYTHING: Any use: the video may be tracked backwards or again, and users may click any frame and remove
            clicks. Then every frame can be read again, and nothing is dropped.
        FORWARD: Later frames alone, each once; a mask or a click on the latest frame makes it conditioning. Dropped
            entries are never read again, with one exception: a user removes an object more than `HOTSTART` frames after
            its birth. Then other frames of its bucket may become valid or stop being conditioning, and upstream reads
            older ones instead, which may have been dropped. At least one conditioning frame of each object is always
            kept.
    """

    EVERYTHING = "everything"
    FORWARD = "forward"


@dataclass(frozen=True)
class Reach:
    """Frames by what can still be read of them.

    Attributes:
        memories: Frames whose memory and pointer can be read.
        pointers: Frames whose pointer can be read, including those of `memories`.
        scored: Frames whose existence and score can be read, including all others.
    """

    memories: frozenset[int]
    pointers: frozenset[int]
    scored: frozenset[int]


def forward_reach(
    conditioning: Mapping[int, Set[int]],
    scores: Mapping[int, np.float32 | None],
    latest: int,
    rules: MemoryRules,
) -> Reach:
    """Returns what `plan_attention` can read for frames after the latest one, whatever the latest one becomes.

    The latest four conditioning frames are always the closest (TU:270); whether there is a fifth one decides their
    order. Among the frames before the latest one, 15 valid ones decide where the scan ends (TB:552). The pointers of 14
    and the memories of 5 of them can be read. The frame beside the tracked one comes first, whether it is valid or not,
    and the pointer of the oldest one is left out (TB:555, TB:618, TB:724).

    Args:
        conditioning: The objects that have a click or a mask on each conditioning frame.
        scores: The score of every non-conditioning frame; None for a frame without one.
        latest: The latest frame, which may still become conditioning.
        rules: The settings.
    """
    closest = sorted(conditioning, reverse=True)
    limit, spatial, span = rules.max_cond_frames_in_attn, rules.num_maskmem - 1, rules.max_obj_ptrs_in_encoder - 1
    memories = {latest, *closest[:limit], *_latest_per_object(closest, conditioning)}
    scored = set(closest[: limit + 1])
    if rules.use_memory_selection:
        earlier_frames = (frame for frame in sorted(scores, reverse=True) if 0 < frame < latest)
        valid = tuple(islice((frame for frame in earlier_frames if is_valid(scores[frame], rules)), span))
        memories.update(valid[: spatial - 1])
        pointers = {*valid[: span - 1]}
        scored.update(valid)
    else:
        recent = [frame for frame in (*scores, *conditioning) if frame > latest - span]
        memories.update(frame for frame in recent if frame > latest - spatial)
        pointers = {*recent}
    return Reach(frozenset(memories), frozenset(pointers | memories), frozenset(scored | pointers | memories))


def _latest_per_object(closest: Sequence[int], conditioning: Mapping[int, Set[int]]) -> set[int]:
    """Returns the latest conditioning frame of each object, which it needs when its bucket's others are removed."""
    objects = frozenset[int]().union(*conditioning.values())
    return {next(frame for frame in closest if object_id in conditioning[frame]) for object_id in objects}
