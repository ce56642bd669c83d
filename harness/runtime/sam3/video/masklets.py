"""Tracks masklets: the objects of one text or box, or those that were clicked, with their memories.

VB is upstream's model/sam3_video_base.py and VI its model/sam3_video_inference.py, with the lines of sam3 0.1.4.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from harness.runtime.sam3.interactive import LARGEST_LOGIT, MASK_SIZE, ObjectPrompt
from harness.runtime.sam3.resizing import resize, resize_antialiased
from harness.runtime.sam3.video.bucket import Bucket, mask_to_logits, new_bucket, resize_to_video
from harness.runtime.sam3.video.detector import DetectorOutput, EncodedFrame
from harness.runtime.sam3.video.masks import (
    SUPPRESSED_LOGIT,
    object_logits,
    suppress_shrunken,
    without_holes_and_sprinkles,
)
from harness.runtime.sam3.video.memory_bank import MemoryBank, PromptOutput
from harness.runtime.sam3.video.memory_selection import Retention
from harness.runtime.sam3.video.objects import CLICKED_SCORE, VideoState, state_after_click, state_after_removal
from harness.runtime.sam3.video.outputs import VisibleObject, refined_object, sigmoid, visible_objects
from harness.runtime.sam3.video.planner import FramePlan, Observations, plan_frame
from harness.runtime.sam3.video.rules import Reconditioning, Rules
from harness.runtime.sam3.video.tracker import INPUT_MASK_SIZE, Tracker

if TYPE_CHECKING:
    from harness.runtime.sam3.image_model import ImageModel

Floats = npt.NDArray[np.float32]
Masks = npt.NDArray[np.bool_]


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
        self, frame: EncodedFrame, detected: DetectorOutput | None, next_id: int, length: int | None, reverse: bool
    ) -> dict[int, VisibleObject]:
        """Tracks the objects on a frame, plans, encodes memories, and returns the visible objects (VB:151).

        Args:
            frame: The frame.
            detected: The detector's output; None if it did not run.
            next_id: The id of the next object that is found.
            length: The length of the video; None if it is not known.
            reverse: Whether frames are processed backwards.
        """
        previous_state = replace(self.state, next_id=next_id)
        logits, presence = self._track(frame, length, reverse)
        logits = without_holes_and_sprinkles(logits)
        detections = None if detected is None else detected.detections
        observations = Observations(frame.index, logits > 0, presence, detections, reverse)
        state, plan = plan_frame(previous_state, observations, self._rules)
        # Only kept frames need the ids of removed objects.
        drops_removed = self._retention is Retention.FORWARD
        self.state = replace(state, removed=frozenset()) if drops_removed else state
        for correction in plan.reconditionings:
            self._recondition(frame, detected, correction)
        logits[plan.suppressed] = SUPPRESSED_LOGIT
        self._encode_memories(frame, logits)
        birth_logits = self._add_objects(frame, detected, previous_state, plan)
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

    def _recondition(self, frame: EncodedFrame, detected: DetectorOutput | None, correction: Reconditioning) -> None:
        """Makes the frame conditioning with the mask of a detection, as if the user had given it (VB:475)."""
        assert detected is not None
        number = next(number for number, bucket in self.buckets.items() if correction.object_id in bucket.bank.objects)
        mask = resize(detected.logits[[correction.detection]], INPUT_MASK_SIZE, INPUT_MASK_SIZE) > 0
        output = self._tracker.use_mask(frame.features, mask[0].astype(np.float32))
        logits = mask_to_logits(resize_to_video(mask, frame.image.size))[0]
        self.buckets[number] = self.buckets[number].condition(
            self._tracker, frame.features, frame.index, {correction.object_id: (output, logits)}
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
        self, frame: EncodedFrame, detected: DetectorOutput | None, previous_state: VideoState, plan: FramePlan
    ) -> Floats:
        """Adds new objects in a bucket; returns the logits [births, 288, 288] of their detections."""
        if detected is None or not plan.births:
            return np.zeros((0, MASK_SIZE, MASK_SIZE), np.float32)
        bank = MemoryBank(tuple(birth.object_id for birth in plan.births), self._retention)
        logits = detected.logits[[birth.detection for birth in plan.births]]
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
