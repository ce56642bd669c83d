"""Says how far rounding may move the logits of a mask."""

from __future__ import annotations

import numpy as np

from harness.core.program import Array

NEAR = 1e-3
"""Share of the largest logit of a frame by which logits are moved up and down: rounding of memories moved a logit by a
fifth of that in 36 frames."""
ABSENT_LOGIT = 1024
"""Magnitude of the logits of an absent object."""


def leeway(logits: Array) -> float:
    """Returns the distance by which the mask logits [H, W] of an object may be moved."""
    return float(NEAR * np.abs(np.where(np.abs(logits) < ABSENT_LOGIT, logits, 0)).max())
