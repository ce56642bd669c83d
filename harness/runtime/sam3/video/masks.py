"""Computes with the masks of a frame: areas, boxes, overlaps, duplicates, holes and sprinkles.

It also decides which objects are suppressed or lose pixels where masks overlap, in memories and in outputs. Functions
that port one of upstream's name its file; the tests compare them bit by bit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from harness.runtime.arrays import Floats, Masks
from harness.runtime.sam3.connected_components import small_components
from harness.runtime.sam3.video.rules import DISAMBIGUATED, Rules

Words = npt.NDArray[np.uint64]
Frames = npt.NDArray[np.int64]

LARGEST_FILLED = DISAMBIGUATED.largest_filled
"""Largest area of a filled hole and of a removed sprinkle (`fill_hole_area`, `sam3/model_builder.py:732`)."""
_INSIDE, _OUTSIDE = np.float32(0.1), np.float32(-0.1)
_WORD = 64

_BITS = np.array([number.bit_count() for number in range(256)], np.uint8)

NEVER_OCCLUDED = -1
ALWAYS_OCCLUDED = 100_000
"""`last_occluded` of an object that hotstart removes before it has been tracked on a frame (VB:847)."""
SUPPRESSED_LOGIT = np.float32(-10.0)
"""`NO_OBJ_LOGIT` (VB:887): the mask logits of a suppressed object."""
PRESENT_LOGIT, ABSENT_LOGIT = np.float32(10.0), np.float32(-10.0)
"""The object logits that the memory encoder gets, by whether the mask has pixels (VB:1466)."""
REMAINING_SHARE = np.float32(0.3)
"""`shrink_threshold` (TP:1321)."""


def areas(masks: Masks) -> npt.NDArray[np.int64]:
    """Counts the pixels of each mask.

    Args:
        masks: bool [n, h, w].

    Returns:
        int64 [n].
    """
    return np.array([np.count_nonzero(mask) for mask in masks], np.int64)


def mask_iou(first: Masks, second: Masks, *, smaller: bool = False) -> Floats:
    """Computes the IoU of each mask of one set with each of another.

    Upstream: `mask_iou` of `sam3/perflib/masks_ops.py`. The IoU of two empty masks is 0. Pixels are counted as bits, so
    that the counts are exact for masks of any size.

    Args:
        first: bool [n, h, w].
        second: bool [m, h, w], of the same size.
        smaller: Whether intersections are divided by the smaller area instead of the union (`mask_iom`).

    Returns:
        fp32 [n, m].
    """
    words = (_packed(first), _packed(second))
    counts = (areas(first), areas(second))
    ious = np.empty((len(first), len(second)), np.float32)
    for row in range(len(first)):
        ious[row] = _overlaps(words[0][row], counts[0][row], words[1], counts[1], smaller)
    return ious


def nms(
    masks: Masks, scores: Floats, score_threshold: float, iou_threshold: float, *, smaller: bool = False
) -> npt.NDArray[np.bool_]:
    """Selects detections by non-maximum suppression.

    Upstream: `nms_masks` and `generic_nms_cpu` of `sam3/perflib/nms.py`. A detection is suppressed if its IoU with a
    better, selected one is above the threshold. Only IoUs with selected detections are computed.

    Args:
        masks: bool [n, h, w].
        scores: fp32 [n].
        score_threshold: Detections that score higher take part.
        iou_threshold: The largest IoU of two selected detections.
        smaller: See `mask_iou`.

    Returns:
        bool [n], whether a detection is selected.
    """
    selected = np.zeros(len(scores), bool)
    valid = np.flatnonzero(scores > np.float32(score_threshold))
    words, counts = _packed(masks[valid]), areas(masks[valid])
    # NumPy's default sort, as upstream's: equal scores come in the same order. SAM 3.1's sort is PyTorch's.
    order = np.argsort(-scores[valid], kind="stable") if smaller else np.argsort(scores[valid])[::-1]
    while len(order):
        best, candidates = order[0], order[1:]
        selected[valid[best]] = True
        ious = _overlaps(words[best], counts[best], words[candidates], counts[candidates], smaller)
        order = candidates[ious <= np.float32(iou_threshold)]
    return selected


def boxes_of_masks(masks: Masks) -> Floats:
    """Finds the first and the last column and row of each mask.

    Upstream: `masks_to_boxes` of `sam3/perflib/masks_ops.py`. The last column and row belong to the mask, so that the
    box of a mask of one pixel has no width. The box of an empty mask is (w, h, 0, 0).

    Args:
        masks: bool [n, h, w].

    Returns:
        fp32 [n, 4], (x0, y0, x1, y1).
    """
    _, height, width = masks.shape
    boxes = np.empty((len(masks), 4), np.float32)
    for box, mask in zip(boxes, masks, strict=True):
        rows = np.flatnonzero(mask.any(axis=1))
        if not len(rows):
            box[:] = (width, height, 0, 0)
            continue
        columns = np.flatnonzero(mask[rows[0] : rows[-1] + 1].any(axis=0))
        box[:] = (columns[0], rows[0], columns[-1], rows[-1])
    return boxes


def without_holes_and_sprinkles(logits: Floats, largest: int = LARGEST_FILLED) -> Floats:
    """Fills small holes of masks, then removes small parts.

    Upstream: `fill_holes_in_mask_scores` of `sam3/model/sam3_tracker_utils.py`. A hole gets the logit 0.1. A part is
    removed, with the logit -0.1, if it also has at most half of the mask's pixels.

    Args:
        logits: fp32 [n, h, w]; pixels above 0 belong to the mask.
        largest: Pixels of the largest hole or part; 0 changes nothing.

    Returns:
        A copy, fp32 [n, h, w].
    """
    cleaned = logits.copy()
    flat = cleaned.reshape(-1)
    flat[small_components(cleaned <= 0, largest)] = _INSIDE
    inside = cleaned > 0
    flat[small_components(inside, np.minimum(areas(inside) // 2, largest))] = _OUTSIDE
    return cleaned


def _packed(masks: Masks) -> Words:
    """Returns the bits of masks [n, h, w] in words, uint64 [n, words]; bits after the last pixel are 0."""
    count, height, width = masks.shape
    bits = np.packbits(masks.reshape(count, height * width), axis=1)
    padded = np.zeros((count, -(-height * width // _WORD) * (_WORD // 8)), np.uint8)
    padded[:, : bits.shape[1]] = bits
    return padded.view(np.uint64)


def _overlaps(
    words: Words, area: np.int64, other_words: Words, other_areas: npt.NDArray[np.int64], smaller: bool
) -> Floats:
    """Returns the IoU fp32 [m] of one mask's words [words] with other masks' [m, words]; `smaller` as in `mask_iou`."""
    common = _bit_counts(other_words & words)
    divisor = np.maximum(np.minimum(other_areas, area) if smaller else other_areas + area - common, 1)
    ious: Floats = common.astype(np.float32) / divisor.astype(np.float32)
    return ious


def _bit_counts(words: Words) -> npt.NDArray[np.int64]:
    """Returns the number of set bits in each row of words [m, words]."""
    has_function = hasattr(np, "bitwise_count")  # NumPy 2
    counts: npt.NDArray[np.uint8] = np.bitwise_count(words) if has_function else _BITS[words.view(np.uint8)]
    total: npt.NDArray[np.int64] = counts.sum(axis=1, dtype=np.int64)
    return total


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


def corrected_logits(logits: Floats, detected: Floats) -> Floats:
    """Returns mask logits [H, W], with a detection's where their signs differ (`_recondition_masklets`, MX:868)."""
    return np.where((logits > 0) == (detected > 0), logits, detected)


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
