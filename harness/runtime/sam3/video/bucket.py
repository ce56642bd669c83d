"""Tracks a bucket: objects that were found on the same frame, whose memories are read together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from harness.runtime.artifact import Tensors
from harness.runtime.sam3.interactive import MASK_SIZE
from harness.runtime.sam3.resizing import resize, resize_antialiased
from harness.runtime.sam3.video.masks import remove_logit_overlaps
from harness.runtime.sam3.video.memory_bank import (
    MISSING_MASK_LOGIT,
    MemoryBank,
    PromptOutput,
    consolidate,
    merge_rows,
    tracked_entry,
)
from harness.runtime.sam3.video.memory_selection import Retention
from harness.runtime.sam3.video.rules import cleared_by_click
from harness.runtime.sam3.video.tracker import INPUT_MASK_SIZE, PROMPT_MASK_SIZE, Tracker

Floats = npt.NDArray[np.float32]
Masks = npt.NDArray[np.bool_]

_PRESENT_MASK_LOGIT = -MISSING_MASK_LOGIT


@dataclass(frozen=True, eq=False)
class Bucket:
    """The objects of a bucket and their memories.

    Attributes:
        bank: The memories of the objects.
        mask_logits: By frame, the masks as logits fp32 [B, 288, 288] that a click refines: of every remembered frame,
            or of the latest one alone, as the bank's retention says.
        user_prompts: (frame, object) for each click and mask of the user.
        cleared_frames: Frames whose masks a click does not refine (`_clear_non_cond_mem_around_input`, TP:1301).
    """

    bank: MemoryBank
    mask_logits: Mapping[int, Floats] = field(default_factory=dict)
    user_prompts: frozenset[tuple[int, int]] = frozenset()
    cleared_frames: frozenset[int] = frozenset()

    @property
    def nbytes(self) -> int:
        """Bytes of the memories and masks."""
        return self.bank.nbytes + sum(logits.nbytes for logits in self.mask_logits.values())

    def track_frame(
        self, tracker: Tracker, features: Tensors, frame: int, length: int | None, reverse: bool
    ) -> tuple[Bucket, Floats, Floats]:
        """Tracks the objects on a frame; returns mask logits [B, 288, 288] and object logits [B].

        A conditioning frame is not tracked again; its masks stay as they are (TP:836).
        """
        if frame in self.bank.conditioning:
            bucket = self._clear_around(frame)
            return bucket, self.mask_logits[frame], self.bank.conditioning[frame].object_logits[:, 0]
        attended = self.bank.read(self.bank.plan(frame, num_frames=length, reverse=reverse))
        output = tracker.track(features, attended)
        entry = tracked_entry(output.pointers, output.object_logits, output.iou)
        bucket = self._with_logits(self.bank.track(frame, entry), frame, output.logits)
        return bucket, output.logits, output.object_logits[:, 0]

    def previous_logits(self, frame: int, object_id: int) -> Floats | None:
        """Returns the mask logits [288, 288] that a click on an object refines; None if there are none."""
        if frame in self.cleared_frames or frame not in self.mask_logits:
            return None
        mask: Floats = self.mask_logits[frame][self.bank.objects.index(object_id)]
        return mask

    def condition(
        self, tracker: Tracker, features: Tensors, frame: int, outputs: Mapping[int, tuple[PromptOutput, Floats]]
    ) -> Bucket:
        """Returns the bucket with the frame as a conditioning frame of all its objects (TP:491, VB:497).

        The frame's memory must be encoded afterwards. Objects without an output keep their earlier output on the frame,
        or are empty there.

        Args:
            tracker: The tracker.
            features: The frame's.
            frame: Its number.
            outputs: By object, the model's output for its prompt, and its mask logits [288, 288].
        """
        object_ids, previous = self.bank.objects, self.bank.entry(frame)
        empty = np.zeros((1, 0), np.float32)  # not needed where every object is known
        if previous is None and len(outputs) < len(object_ids):
            empty = tracker.use_mask(features, np.zeros((INPUT_MASK_SIZE, INPUT_MASK_SIZE), np.float32)).pointer
        entry = consolidate(
            object_ids, {object_id: output for object_id, (output, _) in outputs.items()}, previous, empty
        )
        missing = np.full((1, MASK_SIZE, MASK_SIZE), MISSING_MASK_LOGIT)
        masks = {object_id: logits[None] for object_id, (_, logits) in outputs.items()}
        logits = merge_rows(object_ids, masks, self.mask_logits.get(frame), missing)
        bank = self.bank.condition(frame, entry, tuple(outputs))
        return self._with_logits(bank, frame, logits)._clear_around(frame)

    def add_prompt(
        self, tracker: Tracker, features: Tensors, frame: int, object_id: int, output: PromptOutput, logits: Floats
    ) -> Bucket:
        """Adds the user's prompt of one object, with its mask `logits` [288, 288], and encodes the memory (TP:674)."""
        bucket = self.condition(tracker, features, frame, {object_id: (output, logits)})
        bucket = bucket.encode_prompt_memory(tracker, features, frame)
        return replace(bucket, user_prompts=self.user_prompts | {(frame, object_id)})

    def clear_detections_near(self, frame: int, object_id: int) -> Bucket:
        """Clears detections of an object near a click, so that these frames are tracked again (VI:1675).

        The frames are no longer conditioning for the whole bucket.
        """
        clicked = [index for index, prompted_id in self.user_prompts if prompted_id == object_id]
        masked = [index for index, ids in self.bank.inputs.items() if object_id in ids]
        bucket = self
        for cleared in cleared_by_click(masked, clicked, frame):
            bank = bucket.bank
            for member in bank.objects:
                bank = bank.clear(cleared, member)
            user_prompts = frozenset(prompt for prompt in bucket.user_prompts if prompt[0] != cleared)
            bucket = replace(bucket, bank=bank, user_prompts=user_prompts)
        return bucket

    def encode_memory(
        self, tracker: Tracker, features: Tensors, frame: int, logits: Floats, object_logits: Floats
    ) -> Bucket:
        """Encodes the frame's memory from mask logits [B, 1152, 1152] and object logits [B]."""
        return replace(self, bank=self.bank.with_memory(frame, tracker.encode_memory(features, logits, object_logits)))

    def encode_prompt_memory(self, tracker: Tracker, features: Tensors, frame: int) -> Bucket:
        """Encodes the memory of a conditioning frame from its masks without overlaps (TP:617)."""
        enlarged = remove_logit_overlaps(resize(self.mask_logits[frame], PROMPT_MASK_SIZE, PROMPT_MASK_SIZE))
        object_logits = self.bank.conditioning[frame].object_logits[:, 0]
        return replace(
            self, bank=self.bank.with_memory(frame, tracker.encode_prompt_memory(features, enlarged, object_logits))
        )

    def encode_predicted_memory(self, tracker: Tracker, features: Tensors, frame: int) -> Bucket:
        """Encodes the memory of a tracked frame from the masks that the model predicted (TB:1030)."""
        enlarged = resize(self.mask_logits[frame], PROMPT_MASK_SIZE, PROMPT_MASK_SIZE)
        object_logits = self.bank.tracked[frame].object_logits[:, 0]
        return replace(
            self, bank=self.bank.with_memory(frame, tracker.encode_predicted_memory(features, enlarged, object_logits))
        )

    def remove(self, object_id: int) -> Bucket:
        """Returns the bucket without an object; masks that were cleared for other objects come back (TP:1252)."""
        rows = [row for row, member in enumerate(self.bank.objects) if member != object_id]
        bank = self.bank.remove(object_id)
        mask_logits = {
            frame: logits[rows] for frame, logits in self.mask_logits.items() if bank.entry(frame) is not None
        }
        return Bucket(bank, mask_logits, frozenset(prompt for prompt in self.user_prompts if prompt[1] != object_id))

    def _with_logits(self, bank: MemoryBank, frame: int, logits: Floats) -> Bucket:
        """Returns the bucket with another bank and mask logits [B, 288, 288] of a frame, which a click refines."""
        previous = self.mask_logits if bank.retention is Retention.EVERYTHING else {}
        return replace(
            self, bank=bank, mask_logits={**previous, frame: logits}, cleared_frames=self.cleared_frames - {frame}
        )

    def _clear_around(self, frame: int) -> Bucket:
        """Clears the masks around a conditioning frame if the bucket has one object.

        Upstream clears these frames in its copies for single objects. Nothing attends to these copies, but a click on
        such a frame finds no mask to refine.
        """
        if len(self.bank.objects) > 1:
            return self
        near = {index for index in self.bank.tracked if abs(index - frame) <= self.bank.rules.num_maskmem}
        return replace(
            self, cleared_frames=frozenset(index for index in self.cleared_frames | near if index in self.mask_logits)
        )


def new_bucket(
    tracker: Tracker, features: Tensors, frame: int, logits: Floats, bank: MemoryBank, size: tuple[int, int]
) -> Bucket:
    """Returns a bucket of new objects, each with the mask of a detection (`_tracker_add_new_objects`, VB:1517).

    Args:
        tracker: The tracker.
        features: The frame's.
        frame: Its number.
        logits: fp32 [B, 288, 288], the detections' masks.
        bank: An empty bank for these objects.
        size: Width and height of the video.
    """
    masks = resize(logits, INPUT_MASK_SIZE, INPUT_MASK_SIZE) > 0
    outputs = [tracker.use_mask(features, mask.astype(np.float32)) for mask in masks]
    prompts = zip(outputs, mask_to_logits(resize_to_video(masks, size)), strict=True)
    bucket = Bucket(bank).condition(tracker, features, frame, dict(zip(bank.objects, prompts, strict=True)))
    return bucket.encode_prompt_memory(tracker, features, frame)


def resize_to_video(masks: Masks, size: tuple[int, int]) -> Masks:
    """Resizes masks [B, 1152, 1152] to the video's width and height.

    A pixel of several masks belongs to the last one (TP:600).
    """
    width, height = size
    resized = resize_antialiased(masks.astype(np.float32), height, width) > 0.5
    covered = np.logical_or.accumulate(resized[::-1])[::-1]
    resized[:-1] &= ~covered[1:]
    return resized


def mask_to_logits(masks: Masks) -> Floats:
    """Returns the logits [B, 288, 288] of given masks [B, height, width], shrunk with antialiasing (TP:357)."""
    return resize_antialiased(np.where(masks, _PRESENT_MASK_LOGIT, MISSING_MASK_LOGIT), MASK_SIZE, MASK_SIZE)
