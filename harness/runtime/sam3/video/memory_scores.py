"""Scores a frame, which decides whether its memory is read."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def effective_iou(object_logits: Floats, iou: Floats) -> np.float32:
    """Returns the score of a frame for a bucket of B objects (`cal_mem_score`, model/sam3_tracker_base.py:509).

    The presence of an object is 2·sigmoid(logit) − 1 where its logit is above zero, and 0 elsewhere. Upstream keeps the
    IoU of a tracked frame as [B], while logits are [B, 1]. Their product is then [B, B], and its mean is the mean
    presence times the mean IoU. A frame that several clicks were consolidated on has its IoU as [B, 1], and the mean of
    the products. An absent object thus lowers the score of the present ones. This is followed, because it decides which
    frames upstream attends to.

    Args:
        object_logits: fp32 [B, 1].
        iou: fp32 [B] or [B, 1], predicted by the mask decoder.
    """
    positive = np.where(object_logits > 0, object_logits, np.float32(0))
    presence = np.float32(2) / (np.float32(1) + np.exp(-positive)) - np.float32(1)
    return np.float32((presence * iou).mean(dtype=np.float32))
