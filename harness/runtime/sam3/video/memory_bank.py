"""Stores the memory of a bucket, objects that were found on the same frame and are tracked together, and selects of it.

The rules of the selection are functions of frame numbers and scores. A conditioning frame has a click or a mask of a
user or of the detector. Every other tracked frame is non-conditioning. TB is upstream's `model/sam3_tracker_base.py`,
TU its `model/sam3_tracker_utils.py`, TP its `model/sam3_tracking_predictor.py` and VB its `model/sam3_video_base.py`,
with the lines of sam3 0.1.4.

Upstream stores the memory in `output_dict` of an inference state. Its copies for single objects (`output_dict_per_obj`)
are slices of these entries. The attention to memories reads the copies only where clicks use earlier frames
(`use_prev_mem_frame`), which the video model switches off (`model/sam3_video_inference.py:965`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.runtime.arrays import Array, Floats
from harness.runtime.errors import ModelError
from harness.runtime.sam3.video.rules import DISAMBIGUATED
from harness.runtime.sam3.video.slots import Slots

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
        use_maskmem_tpos_v2: Whether a conditioning frame has the rank of its age, and the last row only where its
            age has none (`use_maskmem_tpos_v2` of SAM 3.1).
        only_obj_ptrs_in_the_past_for_eval: Whether pointers of conditioning frames still to come are left out.
    """

    max_cond_frames_in_attn: int = 4
    num_maskmem: int = 7
    max_obj_ptrs_in_encoder: int = 16
    use_memory_selection: bool = True
    mf_threshold: float = 0.01
    use_maskmem_tpos_v2: bool = False
    only_obj_ptrs_in_the_past_for_eval: bool = True

    def pointer_span(self, num_frames: int | None) -> int:
        """Returns the pointers of a video, fewer in a shorter one (TB:524, TB:696); a stream counts as a long video."""
        return self.max_obj_ptrs_in_encoder if num_frames is None else min(num_frames, self.max_obj_ptrs_in_encoder)


RULES = MemoryRules()
MULTIPLEX_RULES = MemoryRules(
    use_memory_selection=False, use_maskmem_tpos_v2=True, only_obj_ptrs_in_the_past_for_eval=False
)
"""Those of `build_sam3_multiplex_video_model`, which builds SAM 3.1."""


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
        frame: The tracked frame, one of the video.
        conditioning: Conditioning frames in the order in which they became so.
        scores: The score of every non-conditioning frame; None for a frame without one.
        num_frames: Frames of the video; None for a stream, whose end is unknown and which upstream cannot track.
        reverse: Whether the video is tracked backwards.
        rules: The settings.

    Raises:
        ModelError: No frame is conditioning.
    """
    if not conditioning:
        raise ModelError(f"Frame {frame} cannot be tracked because no frame has a click or a mask; give one first.")
    selected = closest_conditioning_frames(frame, conditioning, rules.max_cond_frames_in_attn)
    # A conditioning frame that is not selected counts as any other frame (TB:649).
    available = {*scores, *conditioning} - set(selected)
    span = rules.pointer_span(num_frames)
    recent = recent_frames(frame, scores, span, reverse, rules)

    # Conditioning frames share the last row (TB:675); the row of the others grows with their rank in age (TB:616).
    ages = [(index, (index - frame) if reverse else (frame - index)) for index in selected]
    memories = [(index, _conditioning_rank(age, rules)) for index, age in ages]
    recent_memories = [
        (index, rank) for rank, index in enumerate(recent[: rules.num_maskmem - 1]) if index in available
    ]
    memories.extend(reversed(recent_memories))  # the oldest one first

    # SAM 3 leaves out pointers of conditioning frames that are still to come (TB:700).
    pointers = [(index, abs(age)) for index, age in ages if age >= 0 or not rules.only_obj_ptrs_in_the_past_for_eval]
    # With memory selection upstream stops one short of the oldest (TB:724). The age of the others is their rank.
    pointer_frames = recent[:-1] if rules.use_memory_selection else recent
    pointers.extend((index, age) for age, index in enumerate(pointer_frames, start=1) if index in available)
    largest_age = np.float32(max(span - 1, 1))
    return AttentionPlan(
        tuple(memories), tuple((index, float(np.float32(age) / largest_age)) for index, age in pointers)
    )


def _conditioning_rank(age: int, rules: MemoryRules) -> int:
    """Returns the row of a conditioning frame; with the rank of its age, the row falls where that of others grows."""
    last = rules.num_maskmem - 1
    return last - age if rules.use_maskmem_tpos_v2 and 0 < age <= last else last


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


def forward_reach(
    conditioning: Mapping[int, Set[int]], scores: Mapping[int, np.float32 | None], latest: int, rules: MemoryRules
) -> tuple[set[int], set[int], set[int]]:
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

    Returns:
        The frames whose memory and pointer can be read; those whose pointer can be read, including the former; and
        those whose existence and score can be read, including all others.
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
    return memories, pointers | memories, scored | pointers | memories


def _latest_per_object(closest: Sequence[int], conditioning: Mapping[int, Set[int]]) -> set[int]:
    """Returns the latest conditioning frame of each object, which it needs when its bucket's others are removed."""
    objects = frozenset[int]().union(*conditioning.values())
    return {next(frame for frame in closest if object_id in conditioning[frame]) for object_id in objects}


MISSING_MASK_LOGIT = np.float32(-1024)
"""`NO_OBJ_SCORE`: the mask logits, before the memory is encoded, of an object without an output on a frame (TP:530)."""
MISSING_OBJECT_LOGIT = np.float32(10)
"""The object logit of such an object; upstream assumes that it is present (TP:544), although its mask is empty."""
MISSING_IOU = np.float32(0)
"""The IoU of such an object (TP:550)."""


@dataclass(frozen=True, eq=False)
class MemoryEntry:
    """The memory of a frame for the B objects of a bucket. Arrays have the objects as their first axis.

    Attributes:
        memory: bfloat16 bits uint16 [B, 64, 72, 72]; None before it is encoded, and after it is dropped.
        pointer: fp32 [B, 256]; None after it is dropped.
        object_logits: fp32 [B, 1], above zero where an object is present.
        iou: fp32 [B] of a tracked frame, [B, 1] of a consolidated one; the score depends on it.
        score: `effective_iou`; None on a consolidated frame, until an object is removed (TP:1267).
        features: SAM 3.1 alone: fp32 [1, 256, 72, 72] of the frame; dropped together with the memory.
        given: SAM 3.1 alone: the objects with a click or a mask on the frame.

    SAM 3.1 has memories [buckets, 256, 72, 72] and pointers [buckets, 16, 256], zero where a slot had no object.
    Objects that were added later have no rows in earlier frames.
    """

    memory: Array | None
    pointer: Array | None
    object_logits: Floats
    iou: Floats
    score: np.float32 | None = None
    features: Array | None = None
    given: frozenset[int] = frozenset()

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        arrays = (self.memory, self.pointer, self.object_logits, self.iou, self.features)
        return sum(array.nbytes for array in arrays if array is not None)

    def select(self, rows: Sequence[int], buckets: Sequence[int] | None = None) -> MemoryEntry:
        """Returns the entry of some of the objects, and for SAM 3.1 of some buckets, with their score (TP:1252)."""
        known = [row for row in rows if row < len(self.object_logits)]
        logits, iou = self.object_logits[known], self.iou[known]
        first_axis = known if buckets is None else list(buckets)
        return replace(
            self,
            memory=None if self.memory is None else self.memory[first_axis],
            pointer=None if self.pointer is None else self.pointer[first_axis],
            object_logits=logits,
            iou=iou,
            score=effective_iou(logits, iou) if known else None,
        )


def tracked_entry(pointer: Array, object_logits: Floats, iou: Floats, memory: Array | None = None) -> MemoryEntry:
    """Makes a tracked frame's entry from the mask decoder's output (`track_step`, model/sam3_tracker_base.py:1015).

    Args:
        pointer: fp32 [B, 256].
        object_logits: fp32 [B, 1].
        iou: fp32 [B, n], of the n candidate masks; the best one counts.
        memory: bfloat16 bits uint16 [B, 64, 72, 72], if it is already encoded.
    """
    best = iou.max(axis=-1)
    return MemoryEntry(memory, pointer, object_logits, best, effective_iou(object_logits, best))


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """The arrays that a frame attends to, as the entry points of the attention to memories take them.

    Attributes:
        memories: bfloat16 bits uint16 [M, B, 64, 72, 72].
        ranks: int64 [M].
        pointers: fp32 [P, B, 256].
        times: fp32 [P].
        features: SAM 3.1 alone: fp32 [M, 256, 72, 72] of the memories' frames. Its memories are
            [M, buckets, 256, 72, 72] and its pointers [P, buckets, 16, 256].
    """

    memories: Array
    ranks: npt.NDArray[np.int64]
    pointers: Array
    times: Floats
    features: Array | None = None


@dataclass(frozen=True, eq=False)
class MemoryBank:
    """The memory of a bucket. Every change returns a new bank; arrays are shared and never written to.

    Attributes:
        objects: Ids of the objects, in the order of the first axis of all arrays.
        retention: The future use of the bank; entries that it cannot read are dropped.
        rules: The settings of the rules.
        conditioning: By frame, in the order in which frames became conditioning.
        tracked: By frame.
        inputs: The objects that have a click or a mask on each conditioning frame.
        first_frame: The first frame, or the latest on which objects were added; None while there is none.
        slots: The objects' slots; None for SAM 3, which has none.
    """

    objects: tuple[int, ...]
    retention: Retention = Retention.FORWARD
    rules: MemoryRules = RULES
    conditioning: Mapping[int, MemoryEntry] = field(default_factory=dict)
    tracked: Mapping[int, MemoryEntry] = field(default_factory=dict)
    inputs: Mapping[int, frozenset[int]] = field(default_factory=dict)
    first_frame: int | None = None
    slots: Slots | None = None

    @property
    def latest(self) -> int | None:
        """The last frame with an entry; None if there is none."""
        return max((*self.conditioning, *self.tracked), default=None)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(entry.nbytes for entries in (self.conditioning, self.tracked) for entry in entries.values())

    def entry(self, frame: int) -> MemoryEntry | None:
        """Returns the entry of a frame; None if there is none."""
        return self.conditioning.get(frame) or self.tracked.get(frame)

    def plan(self, frame: int, *, num_frames: int | None = None, reverse: bool = False) -> AttentionPlan:
        """Plans what a frame attends to; see `plan_attention`. Dropped arrays are left out; see `Retention.FORWARD`.

        Raises:
            ModelError: The frame cannot be tracked, or arrays that it attends to may have been dropped.
        """
        if self.retention is Retention.FORWARD and (reverse or (self.latest is not None and frame <= self.latest)):
            raise ModelError(
                f"Frame {frame} cannot be tracked {'backwards ' if reverse else ''}after frame {self.latest}, because "
                "this bank keeps what later frames need; make it with Retention.EVERYTHING."
            )
        scores = {index: entry.score for index, entry in self.tracked.items()}
        plan = plan_attention(
            frame, tuple(self.conditioning), scores, num_frames=num_frames, reverse=reverse, rules=self.rules
        )
        # An object that left its bucket in SAM 3.1 has pointers without memories.
        complete = self.retention is Retention.EVERYTHING and self.slots is None
        return plan if complete else self._drop_missing(plan)

    def read(self, plan: AttentionPlan) -> AttentionInputs:
        """Returns the arrays that a plan names.

        Raises:
            ModelError: The memory of a frame is not encoded yet.
        """
        entries = {**self.tracked, **self.conditioning}
        memories = [_require(entries[frame].memory, frame) for frame, _ in plan.memories]
        pointers = [_require(entries[frame].pointer, frame) for frame, _ in plan.pointers]
        # Backwards, a frame may have no pointer at all to attend to.
        template = _require(entries[plan.memories[0][0]].pointer, plan.memories[0][0])
        return AttentionInputs(
            memories=np.stack(memories),
            ranks=np.array([rank for _, rank in plan.memories], np.int64),
            pointers=np.stack(pointers) if pointers else template[None][:0],
            times=np.array([time for _, time in plan.pointers], np.float32),
            features=None
            if self.slots is None
            else np.concatenate([_require(entries[frame].features, frame) for frame, _ in plan.memories]),
        )

    def add(self, frame: int, objects: Sequence[int]) -> MemoryBank:
        """Adds objects that are found on the latest frame to free slots; they have no rows in earlier frames."""
        assert self.slots is not None
        return replace(self, objects=(*self.objects, *objects), slots=self.slots.add(len(objects)), first_frame=frame)

    def track(self, frame: int, entry: MemoryEntry) -> MemoryBank:
        """Stores the entry of a tracked frame that is not conditioning, in place of an earlier one (TP:861).

        Raises:
            ModelError: The frame is earlier than another one of a bank that only goes forward.
        """
        return self._update(frame, tracked={**self.tracked, frame: entry})

    def condition(self, frame: int, entry: MemoryEntry, objects: Sequence[int]) -> MemoryBank:
        """Makes a frame conditioning, because objects of the bucket have a click or a mask on it (TP:707, TP:724).

        Upstream clears the tracked frames around it only in its copies for single objects
        (`_clear_non_cond_mem_around_input`, TP:1301), which the attention to memories does not read. Frames before a
        correction are therefore still attended to. This is followed, because users' masks depend on it.

        Frames that were clicked before they are tracked from become conditioning in the order of a Python set of their
        numbers (TP:699).

        Raises:
            ModelError: The frame is earlier than another one of a bank that only goes forward.
        """
        return self._update(
            frame,
            conditioning={**self.conditioning, frame: entry},
            tracked={index: tracked for index, tracked in self.tracked.items() if index != frame},
            inputs={**self.inputs, frame: self.inputs.get(frame, frozenset()) | frozenset(objects)},
        )

    def with_memory(self, frame: int, memory: Array) -> MemoryBank:
        """Returns the bank with another memory of a frame that it has.

        Upstream encodes the memory of a frame last, from the planned masks. On a reconditioned frame this replaces the
        memory of the detector's masks, so that only their pointers and the kind of the frame remain (VB:1497). This is
        followed.
        """

        def updated(entries: Mapping[int, MemoryEntry]) -> dict[int, MemoryEntry]:
            return {
                index: replace(entry, memory=memory) if index == frame else entry for index, entry in entries.items()
            }

        return replace(self, conditioning=updated(self.conditioning), tracked=updated(self.tracked))

    def clear(self, frame: int, object_id: int) -> MemoryBank:
        """Removes the clicks and the mask of an object from a frame (`clear_all_points_in_frame`, TP:908).

        A frame without clicks and masks becomes a tracked frame with its entry; its score is unknown. A bucket without
        conditioning frames drops all entries (TP:955).

        Raises:
            ModelError: The bank only goes forward, and may have dropped entries that are read instead.
        """
        if self.retention is Retention.FORWARD:
            raise ModelError(
                f"The clicks on frame {frame} cannot be taken back, because this bank keeps what later frames need; "
                "make it with Retention.EVERYTHING."
            )
        return self._clear(frame, object_id)

    def remove(self, object_id: int) -> MemoryBank:
        """Returns the bank without one of its objects (`remove_object`, TP:1183); without objects it is empty.

        The object's clicks and masks are cleared, and every frame, conditioning frames too, gets the score of the
        remaining objects (TP:1267).
        """
        remaining = tuple(member for member in self.objects if member != object_id)
        if not remaining:
            return MemoryBank((), self.retention, self.rules)
        bank = self
        for frame in [frame for frame, ids in self.inputs.items() if object_id in ids]:
            # Objects that were added to a bucket of SAM 3.1 have the memory of its first frame, too.
            if self.slots is None or len(bank.conditioning) > 1 or len(bank.inputs[frame]) > 1:
                bank = bank._clear(frame, object_id)
            else:
                bank = replace(bank, inputs={**bank.inputs, frame: frozenset()})
        rows = [row for row, member in enumerate(self.objects) if member != object_id]
        slots, buckets = (None, None) if self.slots is None else self.slots.remove([self.objects.index(object_id)])
        return replace(
            bank,
            objects=remaining,
            conditioning={frame: entry.select(rows, buckets) for frame, entry in bank.conditioning.items()},
            tracked={frame: entry.select(rows, buckets) for frame, entry in bank.tracked.items()},
            slots=slots,
        )._drop_unreachable()

    def _clear(self, frame: int, object_id: int) -> MemoryBank:
        """Removes the clicks and the mask of an object from a frame, in a bank of any retention; see `clear`."""
        remaining = self.inputs.get(frame, frozenset()) - {object_id}
        if remaining:
            return replace(self, inputs={**self.inputs, frame: remaining})
        conditioning, tracked = dict(self.conditioning), dict(self.tracked)
        if frame in conditioning:
            tracked[frame] = conditioning.pop(frame)
        if not conditioning:
            return replace(self, conditioning={}, tracked={}, inputs={}, first_frame=None)
        inputs = {index: ids for index, ids in self.inputs.items() if index != frame}
        return replace(self, conditioning=conditioning, tracked=tracked, inputs=inputs)

    def _drop_missing(self, plan: AttentionPlan) -> AttentionPlan:
        """Returns a plan without the memories and pointers that were dropped."""
        entries = {**self.tracked, **self.conditioning}
        # A memory that the latest frame lacks was not dropped, but is not encoded yet.
        # One that an object of SAM 3.1 lacks, because it left its bucket, lacks its frame's features as well.
        missing = {
            frame
            for frame, entry in entries.items()
            if entry.memory is None and (frame != self.latest or (self.slots is not None and entry.features is None))
        }
        return AttentionPlan(
            memories=tuple((frame, rank) for frame, rank in plan.memories if frame not in missing),
            pointers=tuple((frame, time) for frame, time in plan.pointers if entries[frame].pointer is not None),
        )

    def _update(self, frame: int, **changes: Any) -> MemoryBank:
        """Returns the bank with changed fields, which have a new entry of a frame, without what can no longer be read.

        Raises:
            ModelError: The frame is earlier than another one of a bank that only goes forward.
        """
        if self.retention is Retention.FORWARD and self.latest is not None and frame < self.latest:
            raise ModelError(
                f"Frame {frame} is before frame {self.latest}, and this bank keeps what later frames need; "
                "make it with Retention.EVERYTHING."
            )
        return replace(
            self, first_frame=frame if self.first_frame is None else min(self.first_frame, frame), **changes
        )._drop_unreachable()

    def _drop_unreachable(self) -> MemoryBank:
        """Drops the entries and arrays that can no longer be read."""
        if self.retention is Retention.EVERYTHING or self.latest is None or self.first_frame is None:
            return self
        # A removal can change every score of a bucket, so nothing is dropped while hotstart may remove an object.
        if len(self.objects) > 1 and self.latest - self.first_frame <= HOTSTART:
            return self
        scores = {frame: entry.score for frame, entry in self.tracked.items()}
        memories, pointers, scored = forward_reach(self.inputs, scores, self.latest, self.rules)

        def readable(frame: int, entry: MemoryEntry) -> MemoryEntry:
            pointer = entry.pointer if frame in pointers else None
            return entry if frame in memories else replace(entry, memory=None, features=None, pointer=pointer)

        return replace(
            self,
            conditioning={frame: readable(frame, item) for frame, item in self.conditioning.items() if frame in scored},
            tracked={frame: readable(frame, item) for frame, item in self.tracked.items() if frame in scored},
            inputs={frame: ids for frame, ids in self.inputs.items() if frame in scored},
        )


def _require(array: Array | None, frame: int) -> Array:
    """Returns an array of a frame's entry.

    Raises:
        ModelError: It is not encoded yet.
    """
    if array is None:
        raise ModelError(f"Frame {frame} has no memory; encode it before the next frame is tracked.")
    return array


@dataclass(frozen=True, eq=False)
class PromptOutput:
    """The model's output for the clicks or the mask of one object on a frame.

    Attributes:
        pointer: fp32 [1, 256].
        object_logits: fp32 [1, 1].
        iou: fp32 [1, n] of the masks that were candidates; 1 for a given mask.
    """

    pointer: Array
    object_logits: Floats
    iou: Floats


def consolidate(
    objects: Sequence[int], outputs: Mapping[int, PromptOutput], previous: MemoryEntry | None, empty_pointer: Array
) -> MemoryEntry:
    """Returns the memory entry of a frame without its memory (`_consolidate_temp_output_across_obj`, TP:491).

    An object without an output keeps the frame's earlier output. An object without either gets the pointer of an empty
    mask, which is the weight `no_obj_ptr`. Upstream fails there, because `_get_empty_mask_ptr` passes arguments that
    `track_step` no longer has (TP:660), so that objects cannot be clicked on different frames. This is repaired.

    Args:
        objects: The ids of the bucket, in order.
        outputs: By id.
        previous: The earlier entry of the frame; None if there is none.
        empty_pointer: fp32 [1, 256].
    """
    given = {
        object_id: (output.pointer, output.object_logits, output.iou.max(axis=-1).reshape(1, 1))
        for object_id, output in outputs.items()
    }
    earlier: tuple[Array | None, ...] = (None, None, None)
    if previous is not None:
        earlier = previous.pointer, previous.object_logits, previous.iou.reshape(-1, 1)
    missing = empty_pointer, np.full((1, 1), MISSING_OBJECT_LOGIT), np.full((1, 1), MISSING_IOU)
    pointer, object_logits, iou = (
        merge_rows(objects, {object_id: arrays[place] for object_id, arrays in given.items()}, earlier[place], default)
        for place, default in enumerate(missing)
    )
    return MemoryEntry(None, pointer, object_logits, iou)


def merge_rows(objects: Sequence[int], rows: Mapping[int, Array], previous: Array | None, default: Array) -> Array:
    """Merges one row for each object: its given row, otherwise its earlier row, otherwise the default row.

    Args:
        objects: The ids, in order.
        rows: [1, …] by id.
        previous: [B, …] or None.
        default: [1, …].
    """
    defaults = (
        [default] * len(objects)
        if previous is None
        else [previous[number : number + 1] for number in range(len(objects))]
    )
    return np.concatenate([rows.get(object_id, row) for object_id, row in zip(objects, defaults, strict=True)])
