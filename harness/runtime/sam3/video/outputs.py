"""Computes the output of a frame: its visible objects, their boxes, and the owner of each pixel (VI:427-521)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.runtime.arrays import Floats, Masks
from harness.runtime.sam3.video.masks import boxes_of_masks, remove_mask_overlaps

Bits = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class VisibleObject:
    """An object on a frame.

    Attributes:
        mask: bool [height, width] of the video.
        tracker_score: The tracker's probability that the object is on this frame. For a new object it is its score, and
            for a clicked object on the frame of the click it is 1.
    """

    mask: Masks
    tracker_score: float


class FrameOutput(NamedTuple):
    """The n visible objects of a frame, by rising id.

    Attributes:
        ids: int64 [n].
        scores: fp32 [n], those of the detections that the objects were found by; 1 for a clicked object.
        boxes: fp32 [n, 4]: left, top, width and height, as shares of the video's width and height. A box spans from the
            first pixel to the last one of a mask, and is thus one pixel narrower and lower than the mask. It includes
            pixels that the mask loses to others.
        masks: bool [n, height, width]; no pixel belongs to several of them.
    """

    ids: npt.NDArray[np.int64]
    scores: Floats
    boxes: Floats
    masks: Masks


def visible_objects(ids: Iterable[int], masks: Iterable[Masks], scores: Iterable[float]) -> dict[int, VisibleObject]:
    """Returns the objects of a frame: tracked ones with the tracker's masks, new ones with their detections' (VB:937).

    An object that is removed on this frame is among them; the `removed` of the state after it hides it.

    Args:
        ids: The ids of the tracked objects, and then of the new ones.
        masks: bool [height, width] each, in the video's size: after the plan's suppression, and for new objects with
            holes filled and sprinkles removed.
        scores: The `sigmoid` of the tracker's object logits, and the scores of new objects.
    """
    return {
        object_id: VisibleObject(mask, float(score)) for object_id, mask, score in zip(ids, masks, scores, strict=True)
    }


def frame_output(
    objects: Mapping[int, VisibleObject], scores: Mapping[int, float], size: tuple[int, int]
) -> FrameOutput:
    """Computes the output of a frame.

    Objects with empty masks are left out, and so are objects without a score, which are no longer tracked (VI:465-479).
    Boxes are made of the masks (VI:489). Then each pixel goes to the object whose tracker score is the highest
    (VI:504).

    Args:
        objects: The objects of the frame by id.
        scores: The score of each object that is tracked now, see `VideoState.scores`.
        size: Width and height of the video.
    """
    width, height = size
    ids = [object_id for object_id in sorted(objects) if object_id in scores and objects[object_id].mask.any()]
    masks = np.array([objects[object_id].mask for object_id in ids], np.bool_).reshape(-1, height, width)
    tracker_scores = np.array([objects[object_id].tracker_score for object_id in ids], np.float32)
    return FrameOutput(
        ids=np.array(ids, np.int64),
        scores=np.array([scores[object_id] for object_id in ids], np.float32),
        boxes=relative_boxes(masks),
        masks=remove_mask_overlaps(masks, tracker_scores),
    )


def relative_boxes(masks: Masks) -> Floats:
    """Returns the boxes of masks [n, height, width] with pixels, fp32 [n, 4] as in `FrameOutput` (VI:489-500)."""
    _, height, width = masks.shape
    corners = boxes_of_masks(masks)
    corners[:, 2:] -= corners[:, :2]
    return np.asarray(corners / np.array([width, height, width, height], np.float32), np.float32)


def sigmoid(logits: Floats) -> Floats:
    """Returns the probabilities fp32 of logits, in a form that does not overflow."""
    odds = np.exp(-np.abs(logits.astype(np.float64)))
    return np.asarray(np.where(logits < 0, odds, 1) / (1 + odds), np.float32)


@dataclass(frozen=True, eq=False)
class FrameResult:
    """The objects of a frame, with packed masks.

    Attributes:
        index: Number of the frame.
        size: Width and height.
        bits: The mask of each object, uint8 [(width · height + 7) // 8].
        tracker_scores: See `VisibleObject`.
        is_complete: Whether all objects were computed on the frame, not some alone.
    """

    index: int
    size: tuple[int, int]
    bits: Mapping[int, Bits]
    tracker_scores: Mapping[int, float]
    is_complete: bool

    @classmethod
    def pack(
        cls, index: int, size: tuple[int, int], objects: Mapping[int, VisibleObject], is_complete: bool
    ) -> FrameResult:
        """Packs the objects of a frame."""
        bits = {number: np.packbits(item.mask) for number, item in objects.items()}
        return cls(index, size, bits, {number: item.tracker_score for number, item in objects.items()}, is_complete)

    @property
    def objects(self) -> dict[int, VisibleObject]:
        """The unpacked objects."""
        width, height = self.size
        return {
            number: VisibleObject(
                np.unpackbits(bits, count=height * width).reshape(height, width).astype(bool),
                self.tracker_scores[number],
            )
            for number, bits in self.bits.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the masks."""
        return sum(bits.nbytes for bits in self.bits.values())

    def drop_objects(self, object_ids: Collection[int]) -> FrameResult:
        """Returns the result without some objects."""
        return replace(self, bits={number: bits for number, bits in self.bits.items() if number not in object_ids})
