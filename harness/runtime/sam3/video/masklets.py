"""Tracks masklets: the objects of one text or box, or those that were clicked, with their memories.

Objects that were found on the same frame are a bucket, whose memories are read together. VB is upstream's
model/sam3_video_base.py and VI its model/sam3_video_inference.py, with the lines of sam3 0.1.4.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from harness.runtime.artifact import Tensors
from harness.runtime.sam3.interactive import LARGEST_LOGIT, MASK_SIZE, ObjectPrompt
from harness.runtime.sam3.resizing import resize, resize_antialiased
from harness.runtime.sam3.video.detector import Detections, EncodedFrame
from harness.runtime.sam3.video.masks import (
    SUPPRESSED_LOGIT,
    object_logits,
    remove_logit_overlaps,
    suppress_shrunken,
    without_holes_and_sprinkles,
)
from harness.runtime.sam3.video.memory_bank import (
    MISSING_MASK_LOGIT,
    MemoryBank,
    PromptOutput,
    Retention,
    consolidate,
    merge_rows,
    tracked_entry,
)
from harness.runtime.sam3.video.outputs import VisibleObject, refined_object, sigmoid, visible_objects
from harness.runtime.sam3.video.planner import FramePlan, Observations, plan_frame
from harness.runtime.sam3.video.rules import (
    CLICKED_SCORE,
    Rules,
    VideoState,
    cleared_by_click,
    state_after_click,
    state_after_removal,
)
from harness.runtime.sam3.video.tracker import INPUT_MASK_SIZE, PROMPT_MASK_SIZE, Tracker

if TYPE_CHECKING:
    from harness.runtime.sam3.image_model import ImageModel


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


class Masklets:
    """The objects of one prompt through a video.

    Attributes:
        text: The text that they were found by; None if a box or clicks are the prompt.
        state: The state of the planner.
        buckets: Their memories, by the number of the bucket.
    """

    def __init__(
        self, model: ImageModel, tracker: Tracker, rules: Rules, retention: Retention, text: str | None
    ) -> None:
        """Stores the models, the thresholds and the retention; there are no objects yet."""
        self.text = text
        self.state = VideoState()
        self.buckets: dict[int, Bucket] = {}
        self._model, self._tracker = model, tracker
        self._rules, self._retention = rules, retention

    @property
    def nbytes(self) -> int:
        """Bytes of the memories and masks."""
        return sum(bucket.nbytes for bucket in self.buckets.values())

    def process(
        self, frame: EncodedFrame, detections: Detections | None, next_id: int, length: int | None, reverse: bool
    ) -> dict[int, VisibleObject]:
        """Tracks the objects on a frame, plans, encodes memories, and returns the visible objects (VB:151).

        Args:
            frame: The frame.
            detections: The detections; None if the detector did not run.
            next_id: The id of the next object that is found.
            length: The length of the video; None if it is not known.
            reverse: Whether frames are processed backwards.
        """
        previous_state = replace(self.state, next_id=next_id)
        logits, presence = self._track(frame, length, reverse)
        logits = without_holes_and_sprinkles(logits)
        observations = Observations(frame.index, logits > 0, presence, detections, reverse)
        state, plan = plan_frame(previous_state, observations, self._rules)
        # Only kept frames need the ids of removed objects.
        drops_removed = self._retention is Retention.FORWARD
        self.state = replace(state, removed=frozenset()) if drops_removed else state
        for object_id, detection in plan.reconditionings.items():
            assert detections is not None
            self._recondition(frame, object_id, detections.logits[[detection]])
        logits[plan.suppressed] = SUPPRESSED_LOGIT
        self._encode_memories(frame, logits)
        birth_logits = self._add_objects(frame, detections, previous_state, plan)
        for removed_id in plan.removed:
            self._drop(removed_id)
        tracked, new = self._resize(logits, frame), self._resize(without_holes_and_sprinkles(birth_logits), frame)
        return visible_objects(previous_state, plan, tracked, sigmoid(presence), new)

    def refine(
        self, frame: EncodedFrame, ids: Collection[int], length: int | None, reverse: bool
    ) -> dict[int, VisibleObject]:
        """Tracks some objects on a frame, with the others of their buckets, and returns them (VI:1086).

        Nothing is planned, and memories are encoded from the masks that the model predicts.
        """
        refined: dict[int, VisibleObject] = {}
        for number, bucket in self.buckets.items():
            members = [object_id for object_id in bucket.bank.objects if object_id in ids]
            if not members:
                continue
            bucket, logits, presence = bucket.track_frame(self._tracker, frame.features, frame.index, length, reverse)
            if frame.index not in bucket.bank.conditioning:
                bucket = bucket.encode_predicted_memory(self._tracker, frame.features, frame.index)
            self.buckets[number] = bucket
            rows = [bucket.bank.objects.index(object_id) for object_id in members]
            masks = self._resize(without_holes_and_sprinkles(logits[rows]), frame)
            for object_id, mask, logit in zip(members, masks, presence[rows], strict=True):
                refined[object_id] = refined_object(mask, float(logit))
        return refined

    def click(self, frame: EncodedFrame, object_id: int, prompt: ObjectPrompt) -> VisibleObject:
        """Adds or corrects an object by points or a box on a frame; refines its earlier mask on this frame (VI:1397).

        Raises:
            ModelError: The prompt or the id is invalid; nothing has changed.
        """
        bucket = self._bucket_of(object_id)
        previous = None if bucket is None else bucket.previous_logits(frame.index, object_id)
        if previous is not None:
            prompt = replace(prompt, mask=np.clip(previous, -LARGEST_LOGIT, LARGEST_LOGIT))
        encoded = self._model.encode_object_prompt(prompt, frame.image.size)
        output, logits = self._tracker.decode_prompt(frame.features, encoded)
        width, height = frame.image.size
        return self._apply_prompt(frame, object_id, output, logits, resize(logits[None], height, width))

    def set_mask(self, frame: EncodedFrame, object_id: int, mask: Masks) -> VisibleObject:
        """Adds or corrects an object by its mask bool [height, width] on a frame.

        In a video, upstream gives only a detector's masks to its tracker; a user's mask is treated like a click.

        Raises:
            ModelError: The id is invalid; nothing has changed.
        """
        values = mask[None].astype(np.float32)
        output = self._tracker.use_mask(frame.features, resize_antialiased(values, INPUT_MASK_SIZE, INPUT_MASK_SIZE)[0])
        return self._apply_prompt(frame, object_id, output, mask_to_logits(mask[None])[0], 2 * values - 1)

    def remove(self, object_id: int) -> None:
        """Removes an object.

        Raises:
            ModelError: No such object is tracked.
        """
        self.state = state_after_removal(self.state, object_id)
        self._drop(object_id)

    def _apply_prompt(
        self, frame: EncodedFrame, object_id: int, output: PromptOutput, logits: Floats, resized: Floats
    ) -> VisibleObject:
        """Adds the output for a prompt to an object; returns the object on this frame (VI:1506-1560).

        Args:
            frame: The frame.
            object_id: The object.
            output: The tracker's output.
            logits: fp32 [288, 288], the mask.
            resized: fp32 [1, height, width], the mask in the video's size.
        """
        state = state_after_click(self.state, object_id, frame.index)
        number = next(item.bucket for item in state.objects if item.id == object_id)
        bucket = self.buckets.get(number) or Bucket(MemoryBank((object_id,), self._retention))
        self.buckets[number] = bucket.add_prompt(
            self._tracker, frame.features, frame.index, object_id, output, logits
        ).clear_detections_near(frame.index, object_id)
        self.state = state
        return VisibleObject(without_holes_and_sprinkles(resized)[0] > 0, CLICKED_SCORE)

    def _bucket_of(self, object_id: int) -> Bucket | None:
        """Returns the bucket of an object; None for a new object."""
        return next((bucket for bucket in self.buckets.values() if object_id in bucket.bank.objects), None)

    def _track(self, frame: EncodedFrame, length: int | None, reverse: bool) -> tuple[Floats, Floats]:
        """Returns mask logits [N, 288, 288] and object logits [N] of all objects, bucket by bucket."""
        masks, presence = [np.zeros((0, MASK_SIZE, MASK_SIZE), np.float32)], [np.zeros(0, np.float32)]
        for number, bucket in self.buckets.items():
            self.buckets[number], logits, scores = bucket.track_frame(
                self._tracker, frame.features, frame.index, length, reverse
            )
            masks.append(logits)
            presence.append(scores)
        return np.concatenate(masks), np.concatenate(presence)

    def _recondition(self, frame: EncodedFrame, object_id: int, detected: Floats) -> None:
        """Makes the frame conditioning with a detection's logits [1, 288, 288], as if the user gave it (VB:475)."""
        number = next(number for number, bucket in self.buckets.items() if object_id in bucket.bank.objects)
        mask = resize(detected, INPUT_MASK_SIZE, INPUT_MASK_SIZE) > 0
        output = self._tracker.use_mask(frame.features, mask[0].astype(np.float32))
        logits = mask_to_logits(resize_to_video(mask, frame.image.size))[0]
        self.buckets[number] = self.buckets[number].condition(
            self._tracker, frame.features, frame.index, {object_id: (output, logits)}
        )

    def _encode_memories(self, frame: EncodedFrame, logits: Floats) -> None:
        """Encodes the memories of all objects, suppressing those that lose most of their pixels to others (VB:1437)."""
        if not len(logits):
            return
        enlarged = suppress_shrunken(resize(logits, INPUT_MASK_SIZE, INPUT_MASK_SIZE))
        presence = object_logits(enlarged)
        start = 0
        for number, bucket in self.buckets.items():
            rows = slice(start, start := start + len(bucket.bank.objects))
            self.buckets[number] = bucket.encode_memory(
                self._tracker, frame.features, frame.index, enlarged[rows], presence[rows]
            )

    def _add_objects(
        self, frame: EncodedFrame, detections: Detections | None, previous_state: VideoState, plan: FramePlan
    ) -> Floats:
        """Adds new objects in a bucket; returns the logits [births, 288, 288] of their detections."""
        if detections is None or not plan.births:
            return np.zeros((0, MASK_SIZE, MASK_SIZE), np.float32)
        bank = MemoryBank(tuple(birth.object_id for birth in plan.births), self._retention)
        logits = detections.logits[[birth.detection for birth in plan.births]]
        self.buckets[previous_state.next_bucket] = new_bucket(
            self._tracker, frame.features, frame.index, logits, bank, frame.image.size
        )
        return logits

    def _drop(self, object_id: int) -> None:
        """Removes an object from its bucket, and the bucket if no object is left."""
        for number, bucket in list(self.buckets.items()):
            if object_id in bucket.bank.objects:
                remaining = bucket.remove(object_id)
                if remaining.bank.objects:
                    self.buckets[number] = remaining
                else:
                    del self.buckets[number]

    def _resize(self, logits: Floats, frame: EncodedFrame) -> Masks:
        """Returns masks [N, 288, 288] as bool [N, height, width] of the video."""
        return self._model.resize_masks(logits[None], np.arange(len(logits)), frame.image.pixels)
