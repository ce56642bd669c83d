"""Upstream's side of a half-precision case: one round at a time, on a mask that is given, and masks of given logits.

A round refines the best mask of the round before. In half precision the scores of two masks may be so near to each
other that rounding decides which is the best, and another mask makes another question of all that follows. So every
round is given upstream's own mask of the round before, under autocast: upstream, float64 and the compiled model alike.
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

from harness.models.sam3.images import RESOLUTION
from harness.models.sam3.interactive.questions import Question
from harness.models.sam3.interactive.upstream import Predicting
from harness.parity.detections import UNDECIDED
from harness.runtime.sam3.interactive import LARGEST_LOGIT

Masks = npt.NDArray[np.bool_]


class Refining(Predicting):
    """One round of a question about an encoded photograph."""

    def __init__(
        self, model: Any, question: Question, size: tuple[int, int], number: int, refined: npt.NDArray[Any] | None
    ) -> None:
        """Takes the photograph's width and height, the number of the round, and the logits [288, 288] that it refines.

        Without logits it is asked without a mask.
        """
        super().__init__(model, question, size)
        self._number = number
        self._refined = None if refined is None else torch.from_numpy(refined)[None]

    def forward(self, *features: Tensor) -> tuple[Tensor, ...]:
        """What `Encoding` returns to logits [n, 288, 288] and IoU [n]."""
        logits, iou, _ = self._predict(features, self._question.rounds[self._number], self._refined)
        return logits, iou


def decided(logits: npt.NDArray[np.float32], size: tuple[int, int]) -> tuple[Masks, Masks]:
    """Decides on logits as upstream's predictor does, with its own code.

    Args:
        logits: [n, 288, 288], cut off at `LARGEST_LOGIT` on both sides.
        size: The photograph's width and height.

    Returns:
        Masks [n, h, w], and where a pixel may fall on either side: its logit is within `UNDECIDED` of zero, or made of
        one that was cut off.
    """
    width, height = size
    # Nothing of its model is read.
    predictor = SAM3InteractiveImagePredictor(SimpleNamespace(image_size=RESOLUTION))
    given = torch.from_numpy(logits)[None]
    at_size = predictor._transforms.postprocess_masks(given, (height, width))[0]
    cut = (given.abs() >= LARGEST_LOGIT).float()
    near = (at_size.abs() <= UNDECIDED) | (functional.interpolate(cut, (height, width), mode="bilinear")[0] > 0)
    return (at_size > 0).numpy(), near.numpy()
