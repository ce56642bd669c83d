"""Resolves overlaps of masks: which objects are suppressed or lose pixels, in memories and in outputs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from harness.runtime.sam3.video.masks import areas
from harness.runtime.sam3.video.rules import Rules

Floats = npt.NDArray[np.float32]
Masks = npt.NDArray[np.bool_]
Frames = npt.NDArray[np.int64]

NEVER_OCCLUDED = -1
ALWAYS_OCCLUDED = 100_000
"""`last_occluded` of an object that hotstart removes before it has been tracked on a frame (VB:847)."""
SUPPRESSED_LOGIT = np.float32(-10.0)
"""`NO_OBJ_LOGIT` (VB:887): the mask logits of a suppressed object."""
PRESENT_LOGIT, ABSENT_LOGIT = np.float32(10.0), np.float32(-10.0)
"""The object logits that the memory encoder gets, by whether the mask has pixels (VB:1466)."""
REMAINING_SHARE = np.float32(0.3)
"""`shrink_threshold` (TP:1321)."""


def suppressed_objects(iou: Floats, last_occluded: Frames, rules: Rules, reverse: bool) -> Masks:
    """Returns which objects are suppressed because they overlap one that was occluded longer ago (VB:1015-1073).

    Of two objects whose IoU is at least `overlap_iou`, the one that was occluded last is suppressed, if the other one
    was occluded at all. A suppressed mask is empty, in the frame's output and in its memory (VB:888).

    Backwards, upstream takes the smaller frame number for the later occlusion, including the -1 of an object that never
    was occluded: such an object is suppressed by one that was. This project follows it.

    Args:
        iou: fp32 [N, N], of the masks.
        last_occluded: int64 [N]; -1 for an object that never was occluded.
        rules: The threshold.
        reverse: Whether frames are processed backwards.

    Returns:
        bool [N].
    """
    overlapping = (iou >= np.float32(rules.overlap_iou)) & ~np.eye(len(iou), dtype=bool)
    rows, columns = last_occluded[:, None], last_occluded[None]
    later = rows < columns if reverse else rows > columns
    return np.asarray(np.any(overlapping & later & (columns > NEVER_OCCLUDED), axis=1))


def update_last_occluded(last_occluded: Frames, nonempty: Masks, hidden: Masks, frame: int) -> Frames:
    """Returns the frame of each object's last occlusion, int64 [N]; empty or suppressed masks are occluded (VB:876)."""
    return np.where(~nonempty | hidden, frame, last_occluded)


def suppress_shrunken(logits: Floats) -> Floats:
    """Clamps the mask logits [N, H, W] of objects that lose most of their pixels to -10, for the memory encoder.

    Each pixel goes to the object of the highest logit. An object that keeps less than 0.3 of its pixels is absent; the
    others keep also the pixels that they lost (`_suppress_object_pw_area_shrinkage`, TP:1320-1348).
    """
    masks = logits > 0
    won = masks & _is_highest(logits)
    share = areas(won).astype(np.float32) / np.maximum(areas(masks), 1).astype(np.float32)
    clamped = logits.copy()
    for row in np.flatnonzero(share < REMAINING_SHARE):
        np.minimum(clamped[row], SUPPRESSED_LOGIT, out=clamped[row])
    return clamped


def object_logits(logits: Floats) -> Floats:
    """Returns the object logits for the memory encoder, fp32 [N], of mask logits [N, H, W] (VB:1466)."""
    return np.where(areas(logits > 0) > 0, PRESENT_LOGIT, ABSENT_LOGIT)


def remove_mask_overlaps(masks: Masks, scores: Floats) -> Masks:
    """Assigns each pixel of masks bool [N, H, W] to the object of the highest score, fp32 [N] (TP:1350-1371).

    Of equal scores the first one counts. An object whose score is 0 loses all of its pixels, if there are others.
    """
    if len(masks) < 2:
        return masks
    by_score = np.argsort(-scores, kind="stable")
    return _assign_pixels(masks, by_score[scores[by_score] > 0])


def remove_logit_overlaps(logits: Floats) -> Floats:
    """Keeps the highest of the logits [N, H, W] at each pixel; the others are clamped to -10 (TB:1118)."""
    if len(logits) < 2:
        return logits
    return np.where(_is_highest(logits), logits, np.minimum(logits, SUPPRESSED_LOGIT))


def _is_highest(values: Floats) -> Masks:
    """Returns whether a value [N, H, W] is the highest of its pixel; of equal ones the first is."""
    if not len(values):
        return np.zeros(values.shape, np.bool_)
    return _assign_pixels(values == values.max(axis=0), np.arange(len(values)))


def _assign_pixels(masks: Masks, order: npt.NDArray[np.int64]) -> Masks:
    """Assigns each pixel of masks bool [N, H, W] to the first of the ordered masks that has it; others are empty."""
    assigned, covered = np.zeros_like(masks), np.zeros(masks.shape[1:], np.bool_)
    for row in order:
        np.greater(masks[row], covered, out=assigned[row])
        covered |= masks[row]
    return assigned
