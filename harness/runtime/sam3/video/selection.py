"""Which memories and which object pointers a frame attends to: the tracker's rules as pure functions of frame numbers.

TB is upstream's `model/sam3_tracker_base.py` and TU its `model/sam3_tracker_utils.py`, with the lines of sam3 0.1.4.
A conditioning frame has a click or a mask of a user or of the detector. Every other frame that was tracked is
non-conditioning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from harness.runtime.errors import Sam3Error


@dataclass(frozen=True)
class MemoryRules:
    """The settings of the rules, by upstream's names (TB:24); the defaults are those of `build_sam3_video_model`.

    Upstream's stride between memories (`memory_temporal_stride_for_eval`) is 1 in every model that it builds.

    Attributes:
        max_cond_frames_in_attn: Conditioning frames that a frame attends to, at most.
        num_maskmem: Rows of the table of temporal positions: one for conditioning frames, the others for other frames.
        max_obj_ptrs_in_encoder: Pointers of non-conditioning frames, at most, and one more.
        use_memory_selection: Whether non-conditioning frames are chosen by their scores.
        mf_threshold: A score above it makes a frame valid; PyTorch compares in float32.
    """

    max_cond_frames_in_attn: int = 4
    num_maskmem: int = 7
    max_obj_ptrs_in_encoder: int = 16
    use_memory_selection: bool = True
    mf_threshold: float = 0.01

    def pointer_span(self, num_frames: int | None) -> int:
        """The pointers of a video, fewer in a shorter one (TB:524, TB:696); a stream is as long as a long video."""
        return self.max_obj_ptrs_in_encoder if num_frames is None else min(num_frames, self.max_obj_ptrs_in_encoder)


RULES = MemoryRules()


@dataclass(frozen=True)
class AttentionPlan:
    """What a frame attends to, in upstream's order.

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
    """Chooses what a frame attends to, as `_prepare_memory_conditioned_features` does (TB:560).

    Upstream divides the times of pointers by one less than their number (TB:166). A clip of fewer than 16 frames
    therefore differs from the beginning of a longer one. This is followed. A video of one frame would divide by zero
    upstream; here its only time is 0.

    Args:
        frame: The frame that is tracked.
        conditioning: Conditioning frames in the order in which they became so.
        scores: The score of every non-conditioning frame; None for one that has none.
        num_frames: Frames of the video; None for a stream, whose end is unknown and which upstream cannot track.
        reverse: Whether the video is tracked backwards.
        rules: The settings.

    Raises:
        Sam3Error: The frame is not in the video, or no frame is conditioning.
    """
    if frame < 0 or (num_frames is not None and frame >= num_frames):
        raise Sam3Error(f"Frame {frame} is not in this video of {num_frames} frames; the first one is frame 0.")
    if not conditioning:
        raise Sam3Error(f"Frame {frame} cannot be tracked because no frame has a click or a mask; give one first.")
    selected = closest_conditioning_frames(frame, conditioning, rules.max_cond_frames_in_attn)
    # A conditioning frame that is not selected counts as any other frame (TB:649).
    available = {*scores, *conditioning} - set(selected)
    span = rules.pointer_span(num_frames)
    recent = recent_frames(frame, scores, span, reverse, rules)

    # Conditioning frames share the last row (TB:675); the row of the others grows with their rank in age (TB:616).
    memories = [(each, rules.num_maskmem - 1) for each in selected]
    others = [(each, rank) for rank, each in enumerate(recent[: rules.num_maskmem - 1]) if each in available]
    memories.extend(reversed(others))  # the oldest one first

    # Pointers of conditioning frames that are still to come are left out (TB:700).
    ages = [(each, (each - frame) if reverse else (frame - each)) for each in selected]
    pointers = [(each, age) for each, age in ages if age >= 0]
    # With memory selection upstream stops one short of the oldest (TB:724). The age of the others is their rank.
    with_pointers = recent[:-1] if rules.use_memory_selection else recent
    pointers.extend((each, age) for age, each in enumerate(with_pointers, start=1) if each in available)
    longest = np.float32(max(span - 1, 1))
    return AttentionPlan(tuple(memories), tuple((each, float(np.float32(age) / longest)) for each, age in pointers))


def closest_conditioning_frames(frame: int, conditioning: Sequence[int], most: int) -> tuple[int, ...]:
    """All conditioning frames in their order, or the closest if there are more than `most` (TU:270).

    These are the nearest one before the frame, the nearest one that is not before it, and then the closest others. Of
    two that are equally far, the one that became conditioning earlier comes first.
    """
    if len(conditioning) <= most:
        return tuple(conditioning)
    before = max((each for each in conditioning if each < frame), default=None)
    after = min((each for each in conditioning if each >= frame), default=None)
    nearest = [each for each in (before, after) if each is not None]
    others = sorted((each for each in conditioning if each not in nearest), key=lambda each: abs(each - frame))
    return (*nearest, *others)[:most]


def recent_frames(
    frame: int, scores: Mapping[int, np.float32 | None], span: int, reverse: bool, rules: MemoryRules
) -> tuple[int, ...]:
    """The frames that may be read beside the conditioning ones, the nearest one first.

    With memory selection these are the frame beside this one, whatever its score is, and the `span` - 1 nearest valid
    frames, among which it may be (`frame_filter`, TB:518). Forwards frame 0 is never valid (TB:530). Without memory
    selection these are the `span` - 1 frames beside this one, one after another (TB:622, TB:720).
    """
    step = 1 if reverse else -1
    beside = frame + step
    if not rules.use_memory_selection:
        return tuple(range(beside, frame + step * span, step))
    passed = [each for each in scores if (each > frame if reverse else 0 < each < frame)]
    valid = (each for each in sorted(passed, reverse=not reverse) if is_valid(scores[each], rules))
    nearest = tuple(islice(valid, span - 1))
    return nearest if beside in nearest else (beside, *nearest)


def is_valid(score: np.float32 | None, rules: MemoryRules) -> bool:
    """Whether the objects were seen in a frame well enough for it to be read later (TB:543, TB:549)."""
    return score is not None and bool(score > np.float32(rules.mf_threshold))
