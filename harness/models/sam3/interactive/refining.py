"""Runs upstream one round at a time in half precision, on the mask of the previous round, and decides masks on logits.

A round refines the best mask of the previous round. In half precision two masks may have such similar scores that
rounding decides which is the best, and another mask changes all later questions. Therefore upstream, float64 and the
compiled model all refine upstream's own mask of the previous round, under autocast.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sam3.model.sam1_task_predictor import SAM3InteractiveImagePredictor
from torch import Tensor
from torch.nn import functional

from harness.models.sam3.detections import UNDECIDED
from harness.models.sam3.images import RESOLUTION
from harness.models.sam3.interactive.questions import Question
from harness.models.sam3.interactive.upstream import InteractivePrediction
from harness.runtime.sam3.interactive import LARGEST_LOGIT

Masks = npt.NDArray[np.bool_]


class Refinement(InteractivePrediction):
    """One round of a question about an encoded photograph."""

    def __init__(
        self, model: Any, question: Question, size: tuple[int, int], number: int, refined: npt.NDArray[Any] | None
    ) -> None:
        """Takes the photograph's width and height, the round's number, and the logits [288, 288] to refine, if any."""
        super().__init__(model, question, size)
        self._number = number
        self._refined = None if refined is None else torch.from_numpy(refined)[None]

    def forward(self, *features: Tensor) -> tuple[Tensor, ...]:
        """Returns logits [n, 288, 288] and IoU [n] for the features of `Encoding`."""
        logits, iou, _ = self._predict(features, self._question.rounds[self._number], self._refined)
        return logits, iou


def decide_masks(logits: npt.NDArray[np.float32], size: tuple[int, int]) -> tuple[Masks, Masks]:
    """Decides masks on logits as upstream's predictor does, with its own code.

    Args:
        logits: fp32 [n, 288, 288], clamped to ±`LARGEST_LOGIT`.
        size: The photograph's width and height.

    Returns:
        Masks [n, h, w], and the undecided pixels [n, h, w]: their logit is within `UNDECIDED` of zero, or interpolated
        from a clamped logit.
    """
    width, height = size
    # postprocess_masks reads only the image size of the model.
    predictor = SAM3InteractiveImagePredictor(SimpleNamespace(image_size=RESOLUTION))
    tensor = torch.from_numpy(logits)[None]
    at_size = predictor._transforms.postprocess_masks(tensor, (height, width))[0]
    clamped = (tensor.abs() >= LARGEST_LOGIT).float()
    near = (at_size.abs() <= UNDECIDED) | (functional.interpolate(clamped, (height, width), mode="bilinear")[0] > 0)
    return (at_size > 0).numpy(), near.numpy()
