"""Runs upstream's own `predict_inst` on encoded photographs, as modules whose inputs and outputs are tensors.

As modules they run in fp32 and, through `harness.parity.oracle`, in float64.
"""

from __future__ import annotations

from inspect import unwrap
from typing import Any

import numpy as np
from sam3.model.sam3_image_processor import Sam3Processor
from torch import Tensor, nn

from harness.models.sam3.detections import UNDECIDED
from harness.models.sam3.interactive.questions import Question, Round

LEVELS = 3
"""Feature maps of the SAM 2 neck that `predict_inst` reads."""


class Encoding(nn.Module):
    """The features of the SAM 2 neck from `Sam3Processor.set_image`, which `predict_inst` reads."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Maps uint8 [3, h, w] to [1, 32, 288, 288], [1, 64, 144, 144] and [1, 256, 72, 72]."""
        # Without inference mode, because the oracle cannot widen tensors made in it.
        set_image = unwrap(Sam3Processor.set_image)
        encoded = set_image(Sam3Processor(self.model, device="cpu"), image)["backbone_out"]
        return tuple(encoded["sam2_backbone_out"]["backbone_fpn"])


class InteractivePrediction(nn.Module):
    """All rounds of a question about an encoded photograph, answered by `predict_inst`."""

    def __init__(self, model: Any, question: Question, size: tuple[int, int]) -> None:
        """Takes the photograph's width and height."""
        super().__init__()
        self.model = model
        self._question = question
        self._size = size

    def forward(self, *features: Tensor) -> tuple[Tensor, ...]:
        """Maps the features of `Encoding` to four outputs for each round.

        Returns:
            Logits [n, 288, 288], IoU [n], masks bool [n, h, w], and bool [n, h, w] where a pixel's logit is within
            `UNDECIDED` of zero.
        """
        outputs: list[Tensor] = []
        refined: Tensor | None = None
        for prompt in self._question.rounds:
            logits, iou, at_size = self._predict(features, prompt, refined)
            outputs += [logits, iou, at_size > 0, at_size.abs() <= UNDECIDED]
            refined = logits[int(iou.argmax())][None]
        return tuple(outputs)

    def _predict(
        self, features: tuple[Tensor, ...], prompt: Round, refined: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logits at 288 x 288, IoU and logits at the photograph's size."""
        width, height = self._size
        predictor = self.model.inst_interactive_predictor
        outputs: list[tuple[Tensor, Tensor, Tensor]] = []
        predict = predictor._predict

        def recorded_predict(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
            # `predict_inst` converts the tensors to fp32 arrays, which would round the oracle's.
            outputs.append(predict(*args, **kwargs))
            return outputs[-1]

        state = {
            "original_height": height,
            "original_width": width,
            "backbone_out": {"sam2_backbone_out": {"backbone_fpn": list(features), "vision_pos_enc": list(features)}},
        }
        scale = np.array([width, height], np.float64)
        predictor._predict = recorded_predict
        try:
            self.model.predict_inst(
                state,
                point_coords=np.array(prompt.points) * scale if prompt.points else None,
                point_labels=np.array(prompt.labels) if prompt.points else None,
                box=None if prompt.box is None else (np.array(prompt.box).reshape(2, 2) * scale).ravel(),
                mask_input=refined,
                multimask_output=self._question.multimask,
                return_logits=True,
            )
        finally:
            del predictor._predict
        masks, iou, logits = outputs[0]
        return logits[0], iou[0], masks[0]
