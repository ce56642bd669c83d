"""What rounding decides: how far logits may be moved, and which objects a memory has or has not within that."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from harness.runtime.sam3.video.masks import REMAINING_SHARE

Array = npt.NDArray[Any]

NEAR = 1e-3
"""Share of the largest logit of a frame by which logits are moved up and down: rounding of memories moved one a fifth
of that in 36 frames."""
ABSENT_LOGIT = 1024
"""Magnitude of the logits of an object that is not there."""


def leeway(logits: Array) -> float:
    """Returns by how much the mask logits [H, W] of an object may be moved."""
    return float(NEAR * np.abs(np.where(np.abs(logits) < ABSENT_LOGIT, logits, 0)).max())


def undecided_shares(logits: Array) -> Array:
    """Returns for which objects rounding decides whether they keep enough of their pixels to be remembered.

    Each pixel goes to the highest logit (`without_shrunken`). Between the logits of an object and all others moved
    apart, and moved together, the share of its pixels that it keeps has a least and a most; the decision is open where
    the threshold lies between them.

    Args:
        logits: fp32 or float64 [N, H, W].

    Returns:
        bool [N].
    """
    if len(logits) < 2:
        return np.zeros(len(logits), bool)
    moves = np.array([leeway(each) for each in logits], logits.dtype)[:, None, None]
    above, below = logits + moves, logits - moves
    won = (below > 0) & (below > _highest_other(above))
    winnable = (above > 0) & (above >= _highest_other(below))
    least = _share(won, above > 0)
    most = _share(winnable, (below > 0) | winnable)
    undecided: Array = (least < REMAINING_SHARE) & (most >= REMAINING_SHARE)
    return undecided


def _highest_other(values: Array) -> Array:
    """The highest value that the other objects have of a pixel, [N, H, W]."""
    second, highest = np.partition(values, -2, axis=0)[-2:]
    return np.where(values == highest, second, highest)


def _share(part: Array, whole: Array) -> Array:
    counts = [np.count_nonzero(each, axis=(1, 2)) for each in (part, whole)]
    share: Array = counts[0] / np.maximum(counts[1], 1)
    return share
