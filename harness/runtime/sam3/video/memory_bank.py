"""The memory of a bucket: objects that were born on the same frame and are tracked together.

Upstream keeps the same in `output_dict` of an inference state. TP is its `model/sam3_tracking_predictor.py` and VB its
`model/sam3_video_base.py`, with the lines of sam3 0.1.4. Its copies for single objects (`output_dict_per_obj`) are
slices of these; the attention to memories reads them only where clicks use earlier frames (`use_prev_mem_frame`), which
the video model switches off (`model/sam3_video_inference.py:965`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.runtime.errors import Sam3Error
from harness.runtime.sam3.video.memory_scores import Floats, effective_iou
from harness.runtime.sam3.video.retention import HOTSTART, Reach, Retention, forward_reach
from harness.runtime.sam3.video.selection import RULES, AttentionPlan, MemoryRules, plan_attention

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Entry:
    """What is remembered of a frame for the B objects of a bucket. Arrays have the objects as their first axis.

    Attributes:
        memory: bfloat16 bits uint16 [B, 64, 72, 72]; None before it is encoded, and after it is forgotten.
        pointer: fp32 [B, 256]; None after it is forgotten.
        object_logits: fp32 [B, 1], above zero where an object is there.
        iou: fp32 [B] of a tracked frame, [B, 1] of a consolidated one, which the score depends on.
        score: `effective_iou`; None on a consolidated frame, until an object is removed (TP:1267).
    """

    memory: Array | None
    pointer: Array | None
    object_logits: Floats
    iou: Floats
    score: np.float32 | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        arrays = (self.memory, self.pointer, self.object_logits, self.iou)
        return sum(array.nbytes for array in arrays if array is not None)

    def of(self, rows: Sequence[int]) -> Entry:
        """The same for some of the objects, with their score (TP:1252)."""
        logits, iou = self.object_logits[list(rows)], self.iou[list(rows)]
        return Entry(
            memory=None if self.memory is None else self.memory[list(rows)],
            pointer=None if self.pointer is None else self.pointer[list(rows)],
            object_logits=logits,
            iou=iou,
            score=effective_iou(logits, iou),
        )


def tracked_entry(pointer: Array, object_logits: Floats, iou: Floats, memory: Array | None = None) -> Entry:
    """What the mask decoder found on a tracked frame (`track_step`, model/sam3_tracker_base.py:1015).

    Args:
        pointer: fp32 [B, 256].
        object_logits: fp32 [B, 1].
        iou: fp32 [B, n], of the n masks that it chose among; the best one counts.
        memory: bfloat16 bits uint16 [B, 64, 72, 72], if it is already encoded.
    """
    best = iou.max(axis=-1)
    return Entry(memory, pointer, object_logits, best, effective_iou(object_logits, best))


@dataclass(frozen=True, eq=False)
class Attended:
    """The arrays that a frame attends to, as the entry points of the attention to memories take them.

    Attributes:
        memories: bfloat16 bits uint16 [M, B, 64, 72, 72].
        ranks: int64 [M].
        pointers: fp32 [P, B, 256].
        times: fp32 [P].
    """

    memories: Array
    ranks: npt.NDArray[np.int64]
    pointers: Array
    times: Floats


@dataclass(frozen=True, eq=False)
class MemoryBank:
    """The memory of a bucket. Every change returns a new bank; arrays are shared and never written to.

    A frame is conditioning or tracked, never both: one that becomes conditioning is no longer tracked (TP:724), and
    upstream does not track a conditioning frame again (TP:834).

    Attributes:
        objects: Their ids, in the order of the first axis of all arrays.
        retention: What is still to come; what it cannot read is forgotten.
        rules: The settings of the rules.
        conditioning: By frame, in the order in which frames became conditioning.
        tracked: By frame.
        inputs: The objects that have a click or a mask on each conditioning frame.
        born: The first frame; None while there is none.
    """

    objects: tuple[int, ...]
    retention: Retention = Retention.FORWARD
    rules: MemoryRules = RULES
    conditioning: Mapping[int, Entry] = field(default_factory=dict)
    tracked: Mapping[int, Entry] = field(default_factory=dict)
    inputs: Mapping[int, frozenset[int]] = field(default_factory=dict)
    born: int | None = None

    @property
    def latest(self) -> int | None:
        """The last frame that is remembered; None if there is none."""
        return max((*self.conditioning, *self.tracked), default=None)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(entry.nbytes for entries in (self.conditioning, self.tracked) for entry in entries.values())

    def entry(self, frame: int) -> Entry | None:
        """What is remembered of a frame; None if nothing is."""
        return self.conditioning.get(frame) or self.tracked.get(frame)

    def plan(self, frame: int, *, num_frames: int | None = None, reverse: bool = False) -> AttentionPlan:
        """What a frame attends to; see `plan_attention`. What was forgotten is left out; see `Retention.FORWARD`.

        Raises:
            Sam3Error: The frame cannot be tracked, or what it attends to may have been forgotten.
        """
        if self.retention is Retention.FORWARD and (reverse or (self.latest is not None and frame <= self.latest)):
            raise Sam3Error(
                f"Frame {frame} cannot be tracked {'backwards ' if reverse else ''}after frame {self.latest}, because "
                "this bank keeps what later frames need; make it with Retention.EVERYTHING."
            )
        scores = {each: entry.score for each, entry in self.tracked.items()}
        plan = plan_attention(
            frame, tuple(self.conditioning), scores, num_frames=num_frames, reverse=reverse, rules=self.rules
        )
        return plan if self.retention is Retention.EVERYTHING else self._without_forgotten(plan)

    def read(self, plan: AttentionPlan) -> Attended:
        """The arrays that a plan names.

        Raises:
            Sam3Error: The memory of a frame is not encoded yet.
        """
        entries = {**self.tracked, **self.conditioning}
        memories = [_present(entries[frame].memory, frame) for frame, _ in plan.memories]
        pointers = [_present(entries[frame].pointer, frame) for frame, _ in plan.pointers]
        # Backwards, a frame may have no pointer at all to attend to.
        like = _present(entries[plan.memories[0][0]].pointer, plan.memories[0][0])
        return Attended(
            memories=np.stack(memories),
            ranks=np.array([rank for _, rank in plan.memories], np.int64),
            pointers=np.stack(pointers) if pointers else like[None][:0],
            times=np.array([time for _, time in plan.pointers], np.float32),
        )

    def track(self, frame: int, entry: Entry) -> MemoryBank:
        """Remembers a tracked frame, in place of what was remembered of it (TP:861).

        Raises:
            Sam3Error: The frame is conditioning, or earlier than another one of a bank that only goes forward.
        """
        if frame in self.conditioning:
            raise Sam3Error(f"Frame {frame} has a click or a mask and is not tracked; take them back first.")
        return self._with(frame, tracked={**self.tracked, frame: entry})

    def condition(self, frame: int, entry: Entry, objects: Sequence[int]) -> MemoryBank:
        """Makes a frame conditioning, because these objects have a click or a mask on it (TP:707, TP:724).

        Upstream clears the tracked frames around it only in its copies for single objects
        (`_clear_non_cond_mem_around_input`, TP:1301), which the attention to memories does not read. So what objects
        looked like before a correction is still attended to. This is followed, because users' masks depend on it.

        Frames that were clicked on before they are tracked from become conditioning in the order of a Python set of
        their numbers (TP:699).

        Raises:
            Sam3Error: An object is not in this bucket, or the frame is earlier than another one of a bank that only
                goes forward.
        """
        unknown = [each for each in objects if each not in self.objects]
        if unknown:
            raise Sam3Error(f"Object {unknown[0]} is not in this bucket; its objects are {self._names}.")
        return self._with(
            frame,
            conditioning={**self.conditioning, frame: entry},
            tracked={each: known for each, known in self.tracked.items() if each != frame},
            inputs={**self.inputs, frame: self.inputs.get(frame, frozenset()) | frozenset(objects)},
        )

    def with_memory(self, frame: int, memory: Array) -> MemoryBank:
        """The same with another memory of a frame.

        Upstream encodes the memory of a frame last, from the masks that it decided on. On a frame that was
        reconditioned this replaces the memory of the detector's masks, so that only pointers and the status remain of
        those (VB:1497). This is followed.

        Raises:
            Sam3Error: Nothing is remembered of the frame.
        """
        if self.entry(frame) is None:
            raise Sam3Error(f"Frame {frame} is not remembered, and cannot get a memory.")

        def updated(entries: Mapping[int, Entry]) -> dict[int, Entry]:
            return {each: replace(e, memory=memory) if each == frame else e for each, e in entries.items()}

        return replace(self, conditioning=updated(self.conditioning), tracked=updated(self.tracked))

    def clear(self, frame: int, object_id: int) -> MemoryBank:
        """Takes the clicks and the mask of an object on a frame back (`clear_all_points_in_frame`, TP:908).

        A frame without any is tracked from now on, with what is remembered of it; its score is unknown. A bucket
        without any conditioning frame forgets everything (TP:955).

        Raises:
            Sam3Error: The bank only goes forward, and may have forgotten what is read instead.
        """
        if self.retention is Retention.FORWARD:
            raise Sam3Error(
                f"The clicks on frame {frame} cannot be taken back, because this bank keeps what later frames need; "
                "make it with Retention.EVERYTHING."
            )
        return self._cleared(frame, object_id)

    def remove(self, object_id: int) -> MemoryBank:
        """The bank without an object (`remove_object`, TP:1183); without objects it is empty.

        Its clicks and masks are taken back, and every frame gets the score of the objects that remain, conditioning
        frames too (TP:1267).

        Raises:
            Sam3Error: The object is not in this bucket.
        """
        if object_id not in self.objects:
            raise Sam3Error(f"Object {object_id} is not in this bucket; its objects are {self._names}.")
        remaining = tuple(each for each in self.objects if each != object_id)
        if not remaining:
            return MemoryBank((), self.retention, self.rules)
        bank = self
        for frame in [frame for frame, ids in self.inputs.items() if object_id in ids]:
            bank = bank._cleared(frame, object_id)
        rows = [row for row, each in enumerate(self.objects) if each != object_id]
        return replace(
            bank,
            objects=remaining,
            conditioning={frame: entry.of(rows) for frame, entry in bank.conditioning.items()},
            tracked={frame: entry.of(rows) for frame, entry in bank.tracked.items()},
        )._forgotten()

    def _cleared(self, frame: int, object_id: int) -> MemoryBank:
        left = self.inputs.get(frame, frozenset()) - {object_id}
        if left:
            return replace(self, inputs={**self.inputs, frame: left})
        conditioning, tracked = dict(self.conditioning), dict(self.tracked)
        if frame in conditioning:
            tracked[frame] = conditioning.pop(frame)
        if not conditioning:
            return replace(self, conditioning={}, tracked={}, inputs={}, born=None)
        inputs = {each: ids for each, ids in self.inputs.items() if each != frame}
        return replace(self, conditioning=conditioning, tracked=tracked, inputs=inputs)

    @property
    def _names(self) -> str:
        return ", ".join(map(str, self.objects)) or "none"

    def _without_forgotten(self, plan: AttentionPlan) -> AttentionPlan:
        entries = {**self.tracked, **self.conditioning}
        # A memory that the latest frame lacks is not forgotten, but not encoded yet.
        forgotten = {frame for frame, entry in entries.items() if entry.memory is None and frame != self.latest}
        return AttentionPlan(
            memories=tuple((frame, rank) for frame, rank in plan.memories if frame not in forgotten),
            pointers=tuple((frame, time) for frame, time in plan.pointers if entries[frame].pointer is not None),
        )

    def _with(self, frame: int, **changed: Any) -> MemoryBank:
        if self.retention is Retention.FORWARD and self.latest is not None and frame < self.latest:
            raise Sam3Error(
                f"Frame {frame} is before frame {self.latest}, and this bank keeps what later frames need; "
                "make it with Retention.EVERYTHING."
            )
        return replace(self, born=frame if self.born is None else min(self.born, frame), **changed)._forgotten()

    def _forgotten(self) -> MemoryBank:
        """Without what can no longer be read."""
        if self.retention is Retention.EVERYTHING or self.latest is None or self.born is None:
            return self
        # A removal can change every score of a bucket, so nothing is forgotten while one is to be expected.
        if len(self.objects) > 1 and self.latest - self.born <= HOTSTART:
            return self
        scores = {frame: entry.score for frame, entry in self.tracked.items()}
        reach = forward_reach(self.inputs, scores, self.latest, self.rules)
        return replace(
            self,
            conditioning=_reachable(self.conditioning, reach),
            tracked=_reachable(self.tracked, reach),
            inputs={frame: ids for frame, ids in self.inputs.items() if frame in reach.known},
        )


def _present(array: Array | None, frame: int) -> Array:
    if array is None:
        raise Sam3Error(f"Frame {frame} has no memory; encode it before the next frame is tracked.")
    return array


def _reachable(entries: Mapping[int, Entry], reach: Reach) -> dict[int, Entry]:
    return {frame: _part(entry, frame, reach) for frame, entry in entries.items() if frame in reach.known}


def _part(entry: Entry, frame: int, reach: Reach) -> Entry:
    if frame in reach.memories:
        return entry
    return replace(entry, memory=None, pointer=entry.pointer if frame in reach.pointers else None)
