"""Answers questions about one object with upstream's own `predict_inst`, as modules that map tensors to tensors.

As modules they run in fp32, under autocast and, through `harness.parity.oracle`, in float64.

A round refines the best mask of the previous round. In half precision two masks may have such similar scores that
rounding decides which is the best, and another mask changes all later questions. Therefore upstream, float64 and the
compiled model all refine upstream's own mask of the previous round, under autocast. Masks are no part of such an
answer: they are decided on logits in fp32, and held to upstream's decision on the same logits (`decide_masks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import unwrap
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sam3.model.sam1_task_predictor import SAM3InteractiveImagePredictor
from sam3.model.sam3_image_processor import Sam3Processor
from torch import Tensor, nn
from torch.nn import functional

from harness.core.program import Arrays
from harness.models.sam3.detections import UNDECIDED
from harness.models.sam3.interactive.questions import Question, Round
from harness.models.sam3.patches.patch import recorded_methods
from harness.parity.references import Reference, RunModule
from harness.runtime.arrays import Floats, Masks
from harness.runtime.sam3.images import RESOLUTION, load_image
from harness.runtime.sam3.interactive import LARGEST_LOGIT

if TYPE_CHECKING:
    from harness.models.sam3.source import UpstreamModel

NUMBERS = ("logits", "iou")
"""Outputs that are floats; masks are decisions on them."""
PARTS = (*NUMBERS, "masks", "undecided")
"""Names of the outputs of `InteractivePrediction` for each round."""


def answer(upstream: UpstreamModel, question: Question, _actual: Arrays) -> Reference:
    """Returns upstream's answers by `answer/part`; in half precision and in float64, the parts `NUMBERS` alone."""

    def ask(run: RunModule, features: Sequence[Tensor], first: Arrays | None) -> Arrays:
        def predict(answers: Sequence[str], rounds: Sequence[Round], refined: Tensor | None = None) -> Arrays:
            size = load_image(question.image).size
            module = InteractivePrediction(upstream.interactive, size, rounds, question.multimask, refined)
            return dict(run(module, features, [f"{name}/{part}" for name in answers for part in PARTS]))

        if not upstream.half:
            arrays = predict(question.answers, question.rounds)
            return arrays if first is None else _numbers(arrays)
        arrays, refined = {}, None
        for name, prompt in zip(question.answers, question.rounds, strict=True):
            arrays |= _numbers(predict([name], [prompt], refined))
            refined = torch.from_numpy(best_mask(arrays if first is None else first, name))[None]
        return arrays

    return upstream.ask_photograph(__name__, question, lambda: Encoding(upstream.interactive), ask)


def _numbers(arrays: Arrays) -> Arrays:
    return {name: array for name, array in arrays.items() if name.rpartition("/")[2] in NUMBERS}


def best_mask(arrays: Arrays, answer: str) -> Floats:
    """Returns the logits [288, 288] of an answer's mask with the highest predicted IoU."""
    best: Floats = arrays[f"{answer}/logits"][int(arrays[f"{answer}/iou"].argmax())]
    return best


class Encoding(nn.Module):
    """The features of the SAM 2 neck from `Sam3Processor.set_image`, which `predict_inst` reads."""

    outputs = ("high_res_0", "high_res_1", "features")

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
    """Rounds of a question about an encoded photograph, answered by `predict_inst`."""

    def __init__(
        self,
        model: Any,
        size: tuple[int, int],
        rounds: Sequence[Round],
        multimask: bool,
        refined: Tensor | None = None,
    ) -> None:
        """Takes the photograph's width and height, the rounds, and the logits [1, 288, 288] that the first refines."""
        super().__init__()
        self.model = model
        self._size = size
        self._rounds = rounds
        self._multimask = multimask
        self._refined = refined

    def forward(self, *features: Tensor) -> tuple[Tensor, ...]:
        """Maps the features of `Encoding` to four outputs for each round.

        Returns:
            Logits [n, 288, 288], IoU [n], masks bool [n, h, w], and bool [n, h, w] where a pixel's logit is within
            `UNDECIDED` of zero.
        """
        outputs: list[Tensor] = []
        refined = self._refined
        for prompt in self._rounds:
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
        state = {
            "original_height": height,
            "original_width": width,
            "backbone_out": {"sam2_backbone_out": {"backbone_fpn": list(features), "vision_pos_enc": list(features)}},
        }
        scale = np.array([width, height], np.float64)
        # `predict_inst` converts the tensors to fp32 arrays, which would round the oracle's.
        with recorded_methods(predictor, "_predict") as calls:
            self.model.predict_inst(
                state,
                point_coords=np.array(prompt.points) * scale if prompt.points else None,
                point_labels=np.array(prompt.labels) if prompt.points else None,
                box=None if prompt.box is None else (np.array(prompt.box).reshape(2, 2) * scale).ravel(),
                mask_input=refined,
                multimask_output=self._multimask,
                return_logits=True,
            )
        masks, iou, logits = calls["_predict"][0].result
        return logits[0], iou[0], masks[0]


def decide_masks(logits: Floats, size: tuple[int, int]) -> tuple[Masks, Masks]:
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
