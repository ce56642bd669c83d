"""Selects the detections of a frame: queries whose scores count and that no better query covers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.runtime.sam3.video.masks import nms
from harness.runtime.sam3.video.rules import Rules

Floats = npt.NDArray[np.float32]

_EPSILON = np.float32(1e-3)
"""`eps` of upstream's `inverse_sigmoid` (sam3/model/model_misc.py:20)."""


@dataclass(frozen=True, eq=False)
class Detections:
    """The selected detections of one frame, in the order of the detector's queries.

    Attributes:
        queries: int64 [D], the numbers of their queries.
        scores: fp32 [D], each above `Rules.detection_score`.
        masks: bool [D, H, W].
    """

    queries: npt.NDArray[np.int64]
    scores: Floats
    masks: npt.NDArray[np.bool_]


def video_scores(scores: Floats) -> Floats:
    """Returns the scores of a video from those of an image, sigmoid(logit) · sigmoid(presence), fp32 [Q].

    Upstream's video model turns the product into a logit and back, with both odds at least 0.001
    (sam3/model/sam3_image.py:352 and VB:366). A score is therefore at least 0.000999 and at most 0.999001, and one
    between 0.001 and 0.999 keeps its value. Upstream's logarithm and exponential round once more, by some 1e-7.
    """
    odds, against = np.maximum(scores, _EPSILON), np.maximum(1 - scores, _EPSILON)
    return np.asarray(odds / (odds + against), np.float32)


def candidates(scores: Floats, rules: Rules) -> npt.NDArray[np.int64]:
    """Returns the queries whose scores, fp32 [Q], are above `detection_score` (VB:372)."""
    return np.flatnonzero(scores > np.float32(rules.detection_score))


def select_detections(scores: Floats, logits: Floats, rules: Rules) -> Detections:
    """Selects the detections that count among Q queries on one frame.

    A score must be above `detection_score` (VB:372). Then masks are visited from the highest score to the lowest, and
    each remaining mask removes those with which its IoU is above `detection_iou` (sam3/model/sam3_image.py:818-831,
    sam3/perflib/nms.py:70). NumPy's argsort breaks a tie, as upstream's does.

    Args:
        scores: fp32 [Q], see `video_scores`.
        logits: fp32 [Q, H, W], masks; only those of `candidates` are read.
        rules: The thresholds.
    """
    queries = candidates(scores, rules)
    masks = logits[queries] > 0
    best = np.flatnonzero(nms(masks, scores[queries], rules.detection_score, rules.detection_iou))
    return Detections(queries[best], scores[queries[best]], masks[best])
