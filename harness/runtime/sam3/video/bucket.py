"""A bucket: objects that were found on the same frame, and are tracked together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from harness.runtime.artifact import Tensors
from harness.runtime.sam3.resizing import resized, resized_with_antialias
from harness.runtime.sam3.video.consolidation import MISSING_MASK_LOGIT, Answer, consolidated
from harness.runtime.sam3.video.memory_bank import MemoryBank, tracked_entry
from harness.runtime.sam3.video.occlusion import SUPPRESSED_LOGIT
from harness.runtime.sam3.video.tracker import GIVEN_MASK, PROMPTED_MASK, Tracker

Floats = npt.NDArray[np.float32]
Masks = npt.NDArray[np.bool_]

_MASK_SIZE = 288
_PRESENT_MASK_LOGIT = -MISSING_MASK_LOGIT


@dataclass(frozen=True, eq=False)
class Bucket:
    """The objects of a bucket and what is remembered of them.

    Attributes:
        bank: Their memories.
        shown: By frame, for conditioning frames that may be processed again, the masks as logits fp32 [B, 288, 288].
    """

    bank: MemoryBank
    shown: Mapping[int, Floats]

    @property
    def nbytes(self) -> int:
        """Bytes of all that is remembered."""
        return self.bank.nbytes + sum(logits.nbytes for logits in self.shown.values())

    def seen(
        self, tracker: Tracker, features: Tensors, frame: int, length: int | None
    ) -> tuple[Bucket, Floats, Floats]:
        """The objects on a frame: mask logits [B, 288, 288] and object logits [B].

        A conditioning frame is not tracked again; its masks are those that were found before (TP:836).
        """
        if frame in self.bank.conditioning:
            return self, self.shown[frame], self.bank.conditioning[frame].object_logits[:, 0]
        attended = self.bank.read(self.bank.plan(frame, num_frames=length))
        found = tracker.track(features, attended)
        entry = tracked_entry(found.pointers, found.object_logits, found.iou)
        # What was shown of earlier frames is not asked for any more.
        return Bucket(self.bank.track(frame, entry), {}), found.logits, found.object_logits[:, 0]

    def corrected(
        self, tracker: Tracker, features: Tensors, frame: int, object_id: int, mask: Masks, size: tuple[int, int]
    ) -> Bucket:
        """One object gets a mask bool [1152, 1152]; the frame becomes conditioning for the whole bucket (VB:497).

        The frame's memory must be encoded afterwards.
        """
        entry = consolidated(
            self.bank.objects,
            {object_id: tracker.given(features, mask)},
            self.bank.entry(frame),
            np.zeros((1, 0), np.float32),  # every object of the bucket was tracked on this frame
        )
        bank = self.bank.condition(frame, entry, [object_id])
        shown = dict(self.shown)
        if frame in shown:
            row = self.bank.objects.index(object_id)
            shown[frame] = shown[frame].copy()
            shown[frame][row] = given_logits(mask[None], size)[0]
        return Bucket(bank, shown)

    def remembering(self, tracker: Tracker, features: Tensors, frame: int, logits: Floats, present: Floats) -> Bucket:
        """The frame's memory is encoded of masks, logits [B, 1152, 1152], and of the object logits [B]."""
        return replace(self, bank=self.bank.with_memory(frame, tracker.memory(features, logits, present)))

    def without(self, object_id: int) -> Bucket:
        """The bucket without an object."""
        rows = [row for row, each in enumerate(self.bank.objects) if each != object_id]
        shown = {frame: logits[rows] for frame, logits in self.shown.items()}
        return Bucket(self.bank.remove(object_id), shown)


def born(
    tracker: Tracker,
    features: Tensors,
    frame: int,
    ids: Sequence[int],
    logits: Floats,
    bank: MemoryBank,
    size: tuple[int, int],
) -> Bucket:
    """New objects, each with the mask of a detection (`_tracker_add_new_objects`, VB:1517).

    Args:
        tracker: The model.
        features: The frame's.
        frame: Its number.
        ids: Of the new objects.
        logits: fp32 [B, 288, 288], the detections' masks.
        bank: An empty bank for these objects.
        size: Width and height of the video, in which upstream takes pixels of several masks away from the earlier ones.
    """
    masks = resized(logits, GIVEN_MASK, GIVEN_MASK) > 0
    answers: dict[int, Answer] = {each: tracker.given(features, mask) for each, mask in zip(ids, masks, strict=True)}
    entry = consolidated(ids, answers, None, np.zeros((1, 0), np.float32))
    shown = given_logits(masks, size)
    enlarged = without_lower(resized(shown, PROMPTED_MASK, PROMPTED_MASK))
    memory = tracker.prompted_memory(features, enlarged, entry.object_logits[:, 0])
    return Bucket(bank.condition(frame, replace(entry, memory=memory), ids), {frame: shown})


def given_logits(masks: Masks, size: tuple[int, int]) -> Floats:
    """The logits [B, 288, 288] of masks [B, 1152, 1152] that are given (`add_new_mask`, TP:357; TP:600).

    The masks are brought to the video's size, where a pixel of several of them belongs to the last one, and then made
    small, both with antialiasing.
    """
    width, height = size
    at_size = resized_with_antialias(masks.astype(np.float32), height, width) > 0.5
    taken = np.logical_or.accumulate(at_size[::-1])[::-1]
    at_size[:-1] &= ~taken[1:]
    return resized_with_antialias(np.where(at_size, _PRESENT_MASK_LOGIT, MISSING_MASK_LOGIT), _MASK_SIZE, _MASK_SIZE)


def without_lower(logits: Floats) -> Floats:
    """Logits [B, h, w] of which each pixel keeps the highest one; others are at most -10 (TB:1113)."""
    if len(logits) < 2:
        return logits
    highest = logits.argmax(axis=0) == np.arange(len(logits))[:, None, None]
    return np.where(highest, logits, np.minimum(logits, SUPPRESSED_LOGIT))
