"""Overlaps: which objects give way where several claim the same pixels, in memories and in outputs."""

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


def suppressed(iou: Floats, last_occluded: Frames, rules: Rules, reverse: bool) -> Masks:
    """Which objects are suppressed on a frame because they overlap one that was occluded longer ago (VB:1015-1073).

    Of two objects whose IoU is at least `overlap_iou`, the one that was occluded last is suppressed, if the other one
    was occluded at all. A suppressed mask is empty, in the frame's output and in its memory (VB:888).

    Backwards, upstream takes the smaller frame number for the later occlusion, and with it the -1 of an object that
    never was occluded: such an object gives way to one that was. This project follows it.

    Args:
        iou: fp32 [N, N], of the masks.
        last_occluded: int64 [N]; -1 for an object that never was occluded.
        rules: The threshold.
        reverse: Whether frames are processed backwards.

    Returns:
        bool [N].
    """
    overlapping = (iou >= np.float32(rules.overlap_iou)) & ~np.eye(len(iou), dtype=bool)
    mine, others = last_occluded[:, None], last_occluded[None]
    later = mine < others if reverse else mine > others
    return np.asarray(np.any(overlapping & later & (others > NEVER_OCCLUDED), axis=1))


def occluded_by_now(last_occluded: Frames, nonempty: Masks, suppressed: Masks, frame: int) -> Frames:
    """On which frame each object was last occluded, int64 [N]: an empty or suppressed mask is occluded now (VB:876)."""
    return np.where(~nonempty | suppressed, frame, last_occluded)


def without_shrunken(logits: Floats) -> Floats:
    """Mask logits [N, H, W] for the memory encoder, those of an object clamped to -10 if it loses most of its pixels.

    Each pixel goes to the object of the highest logit. An object that keeps less than 0.3 of its pixels is no longer
    there; the others keep also the pixels that they lost (`_suppress_object_pw_area_shrinkage`, TP:1320-1348).
    """
    masks = logits > 0
    won = masks & _is_highest(logits)
    share = areas(won).astype(np.float32) / np.maximum(areas(masks), 1).astype(np.float32)
    kept = logits.copy()
    for gone in np.flatnonzero(share < REMAINING_SHARE):
        np.minimum(kept[gone], SUPPRESSED_LOGIT, out=kept[gone])
    return kept


def object_logits(logits: Floats) -> Floats:
    """The object logits for the memory encoder, fp32 [N], of mask logits [N, H, W] (VB:1466)."""
    return np.where(areas(logits > 0) > 0, PRESENT_LOGIT, ABSENT_LOGIT)


def without_overlaps(masks: Masks, scores: Floats) -> Masks:
    """Masks bool [N, H, W] of which each pixel goes to the object of the highest score, fp32 [N] (TP:1350-1371).

    Of equal scores the first one counts. An object whose score is 0 loses all of its pixels, if there are others.
    """
    if len(masks) < 2:
        return masks
    by_score = np.argsort(-scores, kind="stable")
    return _first_claims(masks, by_score[scores[by_score] > 0])


def without_lower(logits: Floats) -> Floats:
    """Logits [N, H, W] of which each pixel keeps the highest one; others are at most -10 (TB:1118)."""
    if len(logits) < 2:
        return logits
    return np.where(_is_highest(logits), logits, np.minimum(logits, SUPPRESSED_LOGIT))


def _is_highest(values: Floats) -> Masks:
    """Whether a value [N, H, W] is the highest of its pixel; of equal ones the first is."""
    if not len(values):
        return np.zeros(values.shape, np.bool_)
    return _first_claims(values == values.max(axis=0), np.arange(len(values)))


def _first_claims(masks: Masks, order: npt.NDArray[np.int64]) -> Masks:
    """Masks bool [N, H, W] of which each pixel belongs to the first one in an order that has it; others are empty."""
    left, taken = np.zeros_like(masks), np.zeros(masks.shape[1:], np.bool_)
    for each in order:
        np.greater(masks[each], taken, out=left[each])
        taken |= masks[each]
    return left
