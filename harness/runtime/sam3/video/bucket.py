"""A bucket: objects that were found on the same frame, and are tracked together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from harness.runtime.artifact import Tensors
from harness.runtime.sam3.interactive import MASK_SIZE
from harness.runtime.sam3.resizing import resize, resize_antialiased
from harness.runtime.sam3.video.consolidation import MISSING_MASK_LOGIT, Answer, consolidated, merged
from harness.runtime.sam3.video.memory_bank import MemoryBank, tracked_entry
from harness.runtime.sam3.video.occlusion import without_lower
from harness.runtime.sam3.video.reconditioning import cleared_by_click
from harness.runtime.sam3.video.retention import Retention
from harness.runtime.sam3.video.tracker import GIVEN_MASK, PREDICTED_MASK, Tracker

Floats = npt.NDArray[np.float32]
Masks = npt.NDArray[np.bool_]

_PRESENT_MASK_LOGIT = -MISSING_MASK_LOGIT


@dataclass(frozen=True, eq=False)
class Bucket:
    """The objects of a bucket and what is remembered of them.

    Attributes:
        bank: Their memories.
        shown: By frame, the masks as logits fp32 [B, 288, 288] that a click refines: of every frame that is remembered,
            or of the latest one alone, as the bank's retention says.
        by_user: (frame, object) for each click and mask of the user.
        cleared: Frames whose masks a click does not refine (`_clear_non_cond_mem_around_input`, TP:1301).
    """

    bank: MemoryBank
    shown: Mapping[int, Floats] = field(default_factory=dict)
    by_user: frozenset[tuple[int, int]] = frozenset()
    cleared: frozenset[int] = frozenset()

    @property
    def nbytes(self) -> int:
        """Bytes of all that is remembered."""
        return self.bank.nbytes + sum(logits.nbytes for logits in self.shown.values())

    def seen(
        self, tracker: Tracker, features: Tensors, frame: int, length: int | None, reverse: bool
    ) -> tuple[Bucket, Floats, Floats]:
        """The objects on a frame: mask logits [B, 288, 288] and object logits [B].

        A conditioning frame is not tracked again; its masks are those that were found before (TP:836).
        """
        if frame in self.bank.conditioning:
            bucket = self._with_cleared_around(frame)
            return bucket, self.shown[frame], self.bank.conditioning[frame].object_logits[:, 0]
        attended = self.bank.read(self.bank.plan(frame, num_frames=length, reverse=reverse))
        found = tracker.track(features, attended)
        entry = tracked_entry(found.pointers, found.object_logits, found.iou)
        bucket = self._showing(self.bank.track(frame, entry), frame, found.logits)
        return bucket, found.logits, found.object_logits[:, 0]

    def before(self, frame: int, object_id: int) -> Floats | None:
        """The mask logits [288, 288] that a click on an object refines; None if there are none."""
        if frame in self.cleared or frame not in self.shown:
            return None
        mask: Floats = self.shown[frame][self.bank.objects.index(object_id)]
        return mask

    def conditioned(
        self, tracker: Tracker, features: Tensors, frame: int, answers: Mapping[int, tuple[Answer, Floats]]
    ) -> Bucket:
        """The frame becomes conditioning for the whole bucket; its memory must be encoded afterwards (TP:491, VB:497).

        Args:
            tracker: The model.
            features: The frame's.
            frame: Its number.
            answers: By object, what the model answered, and its mask logits [288, 288].
        """
        objects, earlier = self.bank.objects, self.bank.entry(frame)
        empty = np.zeros((1, 0), np.float32)  # nobody needs it where every object is known
        if earlier is None and len(answers) < len(objects):
            empty = tracker.given(features, np.zeros((GIVEN_MASK, GIVEN_MASK), np.float32)).pointer
        entry = consolidated(objects, {each: answer for each, (answer, _) in answers.items()}, earlier, empty)
        unknown = np.full((1, MASK_SIZE, MASK_SIZE), MISSING_MASK_LOGIT)
        given = {each: logits[None] for each, (_, logits) in answers.items()}
        logits = merged(objects, given, self.shown.get(frame), unknown)
        bank = self.bank.condition(frame, entry, tuple(answers))
        return self._showing(bank, frame, logits)._with_cleared_around(frame)

    def prompted(
        self, tracker: Tracker, features: Tensors, frame: int, object_id: int, answer: Answer, logits: Floats
    ) -> Bucket:
        """One object was prompted by the user; `logits` [288, 288] is its mask. The memory is encoded, too (TP:674)."""
        bucket = self.conditioned(tracker, features, frame, {object_id: (answer, logits)})
        bucket = bucket.remembering_prompts(tracker, features, frame)
        return replace(bucket, by_user=self.by_user | {(frame, object_id)})

    def without_detections_near(self, frame: int, object_id: int) -> Bucket:
        """Takes back what a detection said of an object near a click, so that these frames are tracked again (VI:1675).

        The frames are no longer conditioning for the whole bucket.
        """
        clicked = [each for each, number in self.by_user if number == object_id]
        given = [each for each, ids in self.bank.inputs.items() if object_id in ids]
        bucket = self
        for cleared in cleared_by_click([each for each in given if each not in clicked], clicked, frame):
            bank = bucket.bank
            for each in bank.objects:
                bank = bank.clear(cleared, each)
            by_user = frozenset(each for each in bucket.by_user if each[0] != cleared)
            bucket = replace(bucket, bank=bank, by_user=by_user)
        return bucket

    def remembering(self, tracker: Tracker, features: Tensors, frame: int, logits: Floats, present: Floats) -> Bucket:
        """The frame's memory is encoded of masks, logits [B, 1152, 1152], and of the object logits [B]."""
        return replace(self, bank=self.bank.with_memory(frame, tracker.memory(features, logits, present)))

    def remembering_prompts(self, tracker: Tracker, features: Tensors, frame: int) -> Bucket:
        """The memory of a conditioning frame is encoded of its masks, of which each pixel has one (TP:617)."""
        enlarged = without_lower(resize(self.shown[frame], PREDICTED_MASK, PREDICTED_MASK))
        present = self.bank.conditioning[frame].object_logits[:, 0]
        return replace(self, bank=self.bank.with_memory(frame, tracker.prompted_memory(features, enlarged, present)))

    def remembering_as_predicted(self, tracker: Tracker, features: Tensors, frame: int) -> Bucket:
        """The memory of a tracked frame is encoded of the masks that the model predicted (TB:1030)."""
        enlarged = resize(self.shown[frame], PREDICTED_MASK, PREDICTED_MASK)
        present = self.bank.tracked[frame].object_logits[:, 0]
        return replace(self, bank=self.bank.with_memory(frame, tracker.predicted_memory(features, enlarged, present)))

    def without(self, object_id: int) -> Bucket:
        """The bucket without an object. What was cleared of the others comes back (TP:1252)."""
        rows = [row for row, each in enumerate(self.bank.objects) if each != object_id]
        bank = self.bank.remove(object_id)
        shown = {frame: logits[rows] for frame, logits in self.shown.items() if bank.entry(frame) is not None}
        return Bucket(bank, shown, frozenset(each for each in self.by_user if each[1] != object_id))

    def _showing(self, bank: MemoryBank, frame: int, logits: Floats) -> Bucket:
        earlier = self.shown if bank.retention is Retention.EVERYTHING else {}
        return replace(self, bank=bank, shown={**earlier, frame: logits}, cleared=self.cleared - {frame})

    def _with_cleared_around(self, frame: int) -> Bucket:
        """Upstream clears what surrounds a conditioning frame in its copies for single objects, if there is one object.

        Nothing attends to these, but a click on such a frame finds no mask to refine.
        """
        if len(self.bank.objects) > 1:
            return self
        near = {each for each in self.bank.tracked if abs(each - frame) <= self.bank.rules.num_maskmem}
        return replace(self, cleared=frozenset(each for each in self.cleared | near if each in self.shown))


def born(
    tracker: Tracker, features: Tensors, frame: int, logits: Floats, bank: MemoryBank, size: tuple[int, int]
) -> Bucket:
    """New objects, each with the mask of a detection (`_tracker_add_new_objects`, VB:1517).

    Args:
        tracker: The model.
        features: The frame's.
        frame: Its number.
        logits: fp32 [B, 288, 288], the detections' masks.
        bank: An empty bank for these objects.
        size: Width and height of the video.
    """
    masks = resize(logits, GIVEN_MASK, GIVEN_MASK) > 0
    answers = [tracker.given(features, mask.astype(np.float32)) for mask in masks]
    given = zip(answers, given_logits(at_video_size(masks, size)), strict=True)
    bucket = Bucket(bank).conditioned(tracker, features, frame, dict(zip(bank.objects, given, strict=True)))
    return bucket.remembering_prompts(tracker, features, frame)


def at_video_size(masks: Masks, size: tuple[int, int]) -> Masks:
    """Masks [B, 1152, 1152] in the video's width and height, where a pixel of several belongs to the last (TP:600)."""
    width, height = size
    at_size = resize_antialiased(masks.astype(np.float32), height, width) > 0.5
    taken = np.logical_or.accumulate(at_size[::-1])[::-1]
    at_size[:-1] &= ~taken[1:]
    return at_size


def given_logits(masks: Masks) -> Floats:
    """The logits [B, 288, 288] of masks [B, height, width] that are given, made small with antialiasing (TP:357)."""
    return resize_antialiased(np.where(masks, _PRESENT_MASK_LOGIT, MISSING_MASK_LOGIT), MASK_SIZE, MASK_SIZE)
