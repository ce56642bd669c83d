"""Binary masks: their areas and how much they overlap."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Masks = npt.NDArray[np.bool_]


def areas(masks: Masks) -> npt.NDArray[np.int64]:
    """Numbers of pixels of bool masks [N, H, W], int64 [N]."""
    return np.asarray(np.count_nonzero(masks, axis=(1, 2)), np.int64)


def mask_iou(first: Masks, second: Masks) -> npt.NDArray[np.float32]:
    """Intersection over union of bool masks [N, H, W] and [M, H, W], fp32 [N, M]; 0 where both are empty.

    It is upstream's `mask_iou` (sam3/perflib/masks_ops.py:48), with the same rounding: two integers in fp32, divided.
    """
    pixels = first.shape[1] * first.shape[2]
    flat, other = (masks.reshape(len(masks), pixels).astype(np.float64) for masks in (first, second))
    intersection = flat @ other.T
    union = areas(first)[:, None] + areas(second) - intersection
    return np.asarray(intersection.astype(np.float32) / np.maximum(union, 1).astype(np.float32), np.float32)
