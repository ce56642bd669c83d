"""Answers questions with upstream's own `Sam3Processor` and model, as modules whose inputs and outputs are tensors.

As modules they run in fp32, under autocast and, through `harness.parity.oracle`, in float64.

In half precision and in float64 only the raw outputs are of interest. A score or a pixel near its threshold may fall on
either side there, so the detections of two models are not compared: those of the compiled model are held to upstream's
on the same raw outputs (`decide_detections`). On both sides feature maps are float32 between encoding and the question.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from inspect import unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sam3.model.geometry_encoders import Prompt
from sam3.model.sam3_image_processor import Sam3Processor
from torch import Tensor, nn

from harness.core.program import Arrays
from harness.models.sam3.capture import find_stage
from harness.models.sam3.detections import UNDECIDED
from harness.models.sam3.end_to_end import FINAL, RAW
from harness.models.sam3.end_to_end.questions import Question
from harness.models.sam3.patches.patch import recorded_methods
from harness.parity.oracle import reference
from harness.parity.references import Reference, RunModule
from harness.runtime.sam3.images import load_image

if TYPE_CHECKING:
    from harness.models.sam3.source import UpstreamModel

PARTS = (*RAW, *FINAL, "undecided")
"""Names of the outputs of `Grounding` for each answer."""
THRESHOLD = 0.5
"""Score above which queries are kept: the default of `Sam3Processor`."""
LEVELS = 3
"""Number of feature maps, and of position encodings, of an encoded image."""


def answer(upstream: UpstreamModel, question: Question, _actual: Arrays) -> Reference:
    """Returns upstream's answers by `answer/part`; in half precision and in float64, the raw outputs alone."""

    def ask(run: RunModule, features: Sequence[Tensor], first: Arrays | None) -> Arrays:
        raw_only = upstream.half or first is not None
        threshold = 1.0 if raw_only else THRESHOLD  # no score is above 1
        grounding = Grounding(upstream.image, question, load_image(question.image).size, threshold)
        arrays = run(grounding, features, [f"{name}/{part}" for name in question.answers for part in PARTS])
        parts = RAW if raw_only else PARTS
        return {f"{name}/{part}": arrays[f"{name}/{part}"] for name in question.answers for part in parts}

    return upstream.ask_photograph(__name__, question, lambda: Encoding(upstream.image), ask)


def decide_detections(raw: Arrays, size: tuple[int, int]) -> Arrays:
    """Returns the detections of upstream's `Sam3Processor` for raw outputs, with the names in `PARTS`.

    Args:
        raw: The outputs `RAW` of one answer, fp32.
        size: Width and height of the photograph.
    """
    return reference(Grounding(_FixedAnswer(raw), Question("", Path(), texts=("visual",)), size), (), PARTS)


class _Processor(Sam3Processor):  # type: ignore[misc]  # sam3 has no types
    """Upstream's processor without inference mode, because the oracle cannot widen tensors made in inference mode."""

    set_image = unwrap(Sam3Processor.set_image)
    set_text_prompt = unwrap(Sam3Processor.set_text_prompt)
    add_geometric_prompt = unwrap(Sam3Processor.add_geometric_prompt)
    _forward_grounding = unwrap(Sam3Processor._forward_grounding)


class Encoding(nn.Module):
    """The features of `Sam3Processor.set_image`."""

    outputs = tuple(f"{kind}_{level}" for kind in ("fpn", "pos") for level in range(LEVELS))

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Encodes uint8 [3, h, w] to feature maps and position encodings [1, 256, S, S], S = 288, 144, 72."""
        encoded = _Processor(self.model, device="cpu").set_image(image)["backbone_out"]
        return (*encoded["backbone_fpn"], *encoded["vision_pos_enc"])


class Grounding(nn.Module):
    """One question about an encoded image, answered by `Sam3Processor`."""

    def __init__(self, model: Any, question: Question, size: tuple[int, int], threshold: float = THRESHOLD) -> None:
        """Takes the photograph's width and height, and the threshold, which may be one that no query passes."""
        super().__init__()
        self.model = model
        self._question = question
        self._size = size
        self._threshold = threshold

    def forward(self, *encoded: Tensor) -> tuple[Tensor, ...]:
        """Computes raw outputs and detections from the features of `Encoding`.

        Returns:
            For each text, the tensors of `PARTS`: logits [1, 200, 1], boxes [1, 200, 4] (cx, cy, w, h), masks
            [1, 200, 288, 288], presence [1, 1], semantic map [1, 1, 288, 288], kept queries bool [200], masks bool
            [K, h, w], boxes [K, 4] (x0, y0, x1, y1 in pixels), scores [K], and pixels whose logit is within `UNDECIDED`
            of zero, bool [K, h, w].
        """
        processor = _Processor(self.model, device="cpu", confidence_threshold=self._threshold)
        width, height = self._size
        state: dict[str, Any] = {
            "original_width": width,
            "original_height": height,
            "backbone_out": {"backbone_fpn": list(encoded[:LEVELS]), "vision_pos_enc": list(encoded[LEVELS:])},
        }
        with recorded_methods(self.model, "forward_grounding") as calls:
            _ask(processor, state, self._question)
        raw = calls["forward_grounding"][-1].result
        logits, presence = raw["pred_logits"], raw["presence_logit_dec"]
        kept_queries = (logits.sigmoid() * presence.sigmoid().unsqueeze(1)).squeeze(-1) > self._threshold
        # Sam3Processor's `masks_logits` are probabilities. Detections come one text after another.
        undecided = _near_half(state["masks_logits"].squeeze(1))
        detections = (state["masks"].squeeze(1), state["boxes"], state["scores"], undecided)
        outputs = (logits, raw["pred_boxes"], raw["pred_masks"], presence, raw["semantic_seg"])
        counts = kept_queries.sum(dim=1).tolist()
        texts = zip(
            *(output.split(1) for output in outputs),
            kept_queries,
            *(found.split(counts) for found in detections),
            strict=True,
        )
        return tuple(tensor for tensors in texts for tensor in tensors)


class _FixedAnswer:
    """A stand-in for upstream's model that returns known raw outputs."""

    def __init__(self, raw: Arrays) -> None:
        self._raw = raw
        self.backbone = self

    def forward_text(self, _texts: list[str], device: str) -> dict[str, Any]:
        return {}

    def _get_dummy_prompt(self) -> None:
        return None

    def forward_grounding(self, **_arguments: Any) -> dict[str, Tensor]:
        names = ("pred_logits", "pred_boxes", "pred_masks", "presence_logit_dec", "semantic_seg")
        return {name: torch.from_numpy(self._raw[raw]) for name, raw in zip(names, RAW, strict=True)}


def _ask(processor: Any, state: dict[str, Any], question: Question) -> None:
    """Asks by `set_text_prompt` and `add_geometric_prompt`.

    Each call answers anew, so that all prompts before the last one are written into the state as these methods would
    do.
    """
    if len(question.texts) > 1:
        _ask_batch(processor, state, question.texts)
    elif not question.boxes and not question.points:
        processor.set_text_prompt(question.texts[0], state)
    else:
        _ask_geometry(processor, state, question)


def _ask_geometry(processor: Any, state: dict[str, Any], question: Question) -> None:
    """Asks with boxes and points; `Sam3Processor` takes no points, but the prompts of its model do."""
    model = processor.model
    if question.texts:
        state["backbone_out"].update(model.backbone.forward_text(list(question.texts), device="cpu"))
    prompt: Prompt = model._get_dummy_prompt()
    state["geometric_prompt"] = prompt
    for point, positive in zip(question.points, question.point_labels, strict=True):
        prompt.append_points(torch.tensor(point).view(1, 1, 2), torch.tensor([[positive]]))
    boxes = list(zip(question.boxes, question.box_labels, strict=True))
    for box, positive in boxes[:-1]:
        prompt.append_boxes(torch.tensor(box).view(1, 1, 4), torch.tensor([[positive]]))
    if boxes:
        processor.add_geometric_prompt(list(boxes[-1][0]), boxes[-1][1], state)
        return
    if not question.texts:
        state["backbone_out"].update(model.backbone.forward_text(["visual"], device="cpu"))
    processor._forward_grounding(state)


def _ask_batch(processor: Any, state: dict[str, Any], texts: tuple[str, ...]) -> None:
    """Asks several texts about one image in one call of the model; detections come one text after another."""
    model = processor.model
    state["backbone_out"].update(model.backbone.forward_text(list(texts), device="cpu"))
    state["geometric_prompt"] = model._get_dummy_prompt(len(texts))
    processor.find_stage = find_stage(len(texts))
    processor._forward_grounding(state)


def _near_half(probabilities: Tensor) -> Tensor:
    """Returns where the logit is within `UNDECIDED` of zero, [K, h, w]; one mask at a time saves memory."""
    limit = 1 / (1 + math.exp(-UNDECIDED)) - 0.5
    near = [(mask - 0.5).abs() <= limit for mask in probabilities]
    return torch.stack(near) if near else torch.zeros_like(probabilities, dtype=torch.bool)
