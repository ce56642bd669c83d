"""Finds decisions of rounding: how far logits may be moved, and which objects' presence in a memory that can change."""

from __future__ import annotations

import numpy as np

from harness.core.program import Array
from harness.runtime.sam3.video.masks import REMAINING_SHARE

NEAR = 1e-3
"""Share of the largest logit of a frame by which logits are moved up and down: rounding of memories moved a logit by a
fifth of that in 36 frames."""
ABSENT_LOGIT = 1024
"""Magnitude of the logits of an absent object."""


def leeway(logits: Array) -> float:
    """Returns the distance by which the mask logits [H, W] of an object may be moved."""
    return float(NEAR * np.abs(np.where(np.abs(logits) < ABSENT_LOGIT, logits, 0)).max())


def undecided_shares(logits: Array) -> Array:
    """Returns the objects for which rounding decides whether they keep enough of their pixels to be remembered.

    Each pixel belongs to the object with the highest logit (`suppress_shrunken`). Lowering an object's logits and
    raising all others gives the least share of its pixels that it keeps, and the opposite gives the largest share. The
    decision is open where the threshold lies between the two shares.

    Args:
        logits: fp32 or float64 [N, H, W].

    Returns:
        bool [N].
    """
    if len(logits) < 2:
        return np.zeros(len(logits), bool)
    moves = np.array([leeway(object_logits) for object_logits in logits], logits.dtype)[:, None, None]
    above, below = logits + moves, logits - moves
    won = (below > 0) & (below > _highest_other(above))
    winnable = (above > 0) & (above >= _highest_other(below))
    least_share = _share(won, above > 0)
    largest_share = _share(winnable, (below > 0) | winnable)
    undecided: Array = (least_share < REMAINING_SHARE) & (largest_share >= REMAINING_SHARE)
    return undecided


def _highest_other(values: Array) -> Array:
    """Returns, for each object and pixel, the highest value of the other objects, [N, H, W]."""
    second, highest = np.partition(values, -2, axis=0)[-2:]
    return np.where(values == highest, second, highest)


def _share(part: Array, whole: Array) -> Array:
    counts = [np.count_nonzero(masks, axis=(1, 2)) for masks in (part, whole)]
    share: Array = counts[0] / np.maximum(counts[1], 1)
    return share
