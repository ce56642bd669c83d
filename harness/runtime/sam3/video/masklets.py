"""Masklets: the objects that one text or box means, or that were clicked on, with what is remembered of them.

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
from harness.runtime.sam3.video.bucket import Bucket, at_video_size, born, given_logits
from harness.runtime.sam3.video.consolidation import Answer
from harness.runtime.sam3.video.detector import EncodedFrame, Found
from harness.runtime.sam3.video.masks import without_holes_and_sprinkles
from harness.runtime.sam3.video.memory_bank import MemoryBank
from harness.runtime.sam3.video.objects import CLICKED_SCORE, VideoState, with_clicked, without_chosen
from harness.runtime.sam3.video.occlusion import SUPPRESSED_LOGIT, object_logits, without_shrunken
from harness.runtime.sam3.video.outputs import ShownObject, refined_object, shown_objects, sigmoid
from harness.runtime.sam3.video.planner import Observations, Plan, plan_frame
from harness.runtime.sam3.video.reconditioning import Reconditioning
from harness.runtime.sam3.video.retention import Retention
from harness.runtime.sam3.video.rules import Rules
from harness.runtime.sam3.video.tracker import GIVEN_MASK, Tracker

if TYPE_CHECKING:
    from harness.runtime.sam3.image_model import ImageModel

Floats = npt.NDArray[np.float32]
Masks = npt.NDArray[np.bool_]


class Masklets:
    """The objects of one prompt through a video.

    Attributes:
        text: What they are; None if a box or clicks say it.
        state: What decides about them.
        buckets: Their memories, by the number of the bucket.
    """

    def __init__(
        self, model: ImageModel, tracker: Tracker, rules: Rules, retention: Retention, text: str | None
    ) -> None:
        """Takes what computes and decides, and what is still to come; there are no objects yet."""
        self.text = text
        self.state = VideoState()
        self.buckets: dict[int, Bucket] = {}
        self._model, self._tracker = model, tracker
        self._rules, self._retention = rules, retention

    @property
    def nbytes(self) -> int:
        """Bytes of what is remembered."""
        return sum(bucket.nbytes for bucket in self.buckets.values())

    def process(
        self, frame: EncodedFrame, found: Found | None, next_id: int, length: int | None, reverse: bool
    ) -> dict[int, ShownObject]:
        """Tracks the objects on a frame, decides, remembers, and returns what may be shown (VB:151).

        Args:
            frame: The frame.
            found: What the detector found; None if it was not asked.
            next_id: The id of the next object that is found.
            length: The length of the video; None if it is not known.
            reverse: Whether frames are processed backwards.
        """
        before = replace(self.state, next_id=next_id)
        logits, present = self._seen(frame, length, reverse)
        logits = without_holes_and_sprinkles(logits)
        detections = None if found is None else found.detections
        observed = Observations(frame.index, logits > 0, present, detections, reverse)
        state, plan = plan_frame(before, observed, self._rules)
        # Only frames that are kept need to know what was removed.
        forgets = self._retention is Retention.FORWARD
        self.state = replace(state, removed=frozenset()) if forgets else state
        for correction in plan.reconditionings:
            self._correct(frame, found, correction)
        logits[plan.suppressed] = SUPPRESSED_LOGIT
        self._remember(frame, logits)
        births = self._born(frame, found, before, plan)
        for gone in plan.removed:
            self._drop(gone)
        tracked, new = self._at_size(logits, frame), self._at_size(without_holes_and_sprinkles(births), frame)
        return shown_objects(before, plan, tracked, sigmoid(present), new)

    def refine(
        self, frame: EncodedFrame, ids: Collection[int], length: int | None, reverse: bool
    ) -> dict[int, ShownObject]:
        """Tracks some objects on a frame, with the others of their buckets, and returns what they look like (VI:1086).

        Nothing is decided, and memories are encoded of the masks as the model predicts them.
        """
        refined: dict[int, ShownObject] = {}
        for number, bucket in self.buckets.items():
            asked = [each for each in bucket.bank.objects if each in ids]
            if not asked:
                continue
            bucket, logits, present = bucket.seen(self._tracker, frame.features, frame.index, length, reverse)
            if frame.index not in bucket.bank.conditioning:
                bucket = bucket.remembering_as_predicted(self._tracker, frame.features, frame.index)
            self.buckets[number] = bucket
            rows = [bucket.bank.objects.index(each) for each in asked]
            masks = self._at_size(without_holes_and_sprinkles(logits[rows]), frame)
            for each, mask, logit in zip(asked, masks, present[rows], strict=True):
                refined[each] = refined_object(mask, float(logit))
        return refined

    def click(self, frame: EncodedFrame, object_id: int, prompt: ObjectPrompt) -> ShownObject:
        """Adds or corrects an object by points or a box on a frame; what it was there before is refined (VI:1397).

        Raises:
            Sam3Error: The prompt or the id makes no sense; nothing has changed.
        """
        bucket = self._bucket_of(object_id)
        earlier = None if bucket is None else bucket.before(frame.index, object_id)
        if earlier is not None:
            prompt = replace(prompt, mask=np.clip(earlier, -LARGEST_LOGIT, LARGEST_LOGIT))
        encoded = self._model.encode_object_prompt(prompt, frame.image.size)
        answer, logits = self._tracker.prompted(frame.features, encoded)
        width, height = frame.image.size
        return self._prompted(frame, object_id, answer, logits, resize(logits[None], height, width))

    def give(self, frame: EncodedFrame, object_id: int, mask: Masks) -> ShownObject:
        """Adds or corrects an object by its mask bool [height, width] on a frame.

        Upstream gives a detector's masks alone to its tracker in a video; a user's is treated as a click is.

        Raises:
            Sam3Error: The id makes no sense; nothing has changed.
        """
        given = mask[None].astype(np.float32)
        answer = self._tracker.given(frame.features, resize_antialiased(given, GIVEN_MASK, GIVEN_MASK)[0])
        return self._prompted(frame, object_id, answer, given_logits(mask[None])[0], 2 * given - 1)

    def remove(self, object_id: int) -> None:
        """Forgets an object.

        Raises:
            Sam3Error: No such object is tracked.
        """
        self.state = without_chosen(self.state, object_id)
        self._drop(object_id)

    def _prompted(
        self, frame: EncodedFrame, object_id: int, answer: Answer, logits: Floats, at_size: Floats
    ) -> ShownObject:
        """The object as it was answered, logits [288, 288] and [1, height, width], from now on (VI:1506-1560)."""
        state = with_clicked(self.state, object_id, frame.index)
        number = next(each.bucket for each in state.objects if each.id == object_id)
        bucket = self.buckets.get(number) or Bucket(MemoryBank((object_id,), self._retention))
        self.buckets[number] = bucket.prompted(
            self._tracker, frame.features, frame.index, object_id, answer, logits
        ).without_detections_near(frame.index, object_id)
        self.state = state
        return ShownObject(without_holes_and_sprinkles(at_size)[0] > 0, CLICKED_SCORE)

    def _bucket_of(self, object_id: int) -> Bucket | None:
        return next((bucket for bucket in self.buckets.values() if object_id in bucket.bank.objects), None)

    def _seen(self, frame: EncodedFrame, length: int | None, reverse: bool) -> tuple[Floats, Floats]:
        """Mask logits [N, 288, 288] and object logits [N] of all objects, bucket by bucket."""
        masks, present = [np.zeros((0, MASK_SIZE, MASK_SIZE), np.float32)], [np.zeros(0, np.float32)]
        for number, bucket in self.buckets.items():
            self.buckets[number], logits, scores = bucket.seen(
                self._tracker, frame.features, frame.index, length, reverse
            )
            masks.append(logits)
            present.append(scores)
        return np.concatenate(masks), np.concatenate(present)

    def _correct(self, frame: EncodedFrame, found: Found | None, correction: Reconditioning) -> None:
        assert found is not None
        number = next(number for number, each in self.buckets.items() if correction.object_id in each.bank.objects)
        mask = resize(found.logits[[correction.detection]], GIVEN_MASK, GIVEN_MASK) > 0
        answer = self._tracker.given(frame.features, mask[0].astype(np.float32))
        logits = given_logits(at_video_size(mask, frame.image.size))[0]
        self.buckets[number] = self.buckets[number].conditioned(
            self._tracker, frame.features, frame.index, {correction.object_id: (answer, logits)}
        )

    def _remember(self, frame: EncodedFrame, logits: Floats) -> None:
        """Encodes the memories of all objects, of which none may claim what belongs to another one (VB:1437)."""
        if not len(logits):
            return
        enlarged = without_shrunken(resize(logits, GIVEN_MASK, GIVEN_MASK))
        present = object_logits(enlarged)
        start = 0
        for number, bucket in self.buckets.items():
            rows = slice(start, start := start + len(bucket.bank.objects))
            self.buckets[number] = bucket.remembering(
                self._tracker, frame.features, frame.index, enlarged[rows], present[rows]
            )

    def _born(self, frame: EncodedFrame, found: Found | None, before: VideoState, plan: Plan) -> Floats:
        """New objects get a bucket; returns the logits [births, 288, 288] of their detections."""
        if found is None or not plan.births:
            return np.zeros((0, MASK_SIZE, MASK_SIZE), np.float32)
        bank = MemoryBank(tuple(birth.object_id for birth in plan.births), self._retention)
        logits = found.logits[[birth.detection for birth in plan.births]]
        self.buckets[before.next_bucket] = born(
            self._tracker, frame.features, frame.index, logits, bank, frame.image.size
        )
        return logits

    def _drop(self, object_id: int) -> None:
        for number, bucket in list(self.buckets.items()):
            if object_id in bucket.bank.objects:
                remaining = bucket.without(object_id)
                if remaining.bank.objects:
                    self.buckets[number] = remaining
                else:
                    del self.buckets[number]

    def _at_size(self, logits: Floats, frame: EncodedFrame) -> Masks:
        return self._model.resize_masks(logits[None], np.arange(len(logits)), frame.image.pixels)
