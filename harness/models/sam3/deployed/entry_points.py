"""The entry points of the compiled model that come from PyTorch: what they take and give, and how to build them.

One image is encoded once and then asked many prompts, so encoding an image, encoding a text and grounding are separate.
How many points and boxes a prompt has is fixed when the model is compiled; shorter prompts are padded and masked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.core.case import Case
from harness.core.settings import Settings
from harness.core.subject import Program
from harness.deployment.deployable import KernelFunction
from harness.runtime.manifest import Capacity

if TYPE_CHECKING:
    import torch
    import tvm

TEXT_TOKENS = 32
"""Length of a tokenized text (`context_length` of upstream's VETextEncoder)."""
FEATURE_SIZES = (288, 144, 72)
"""Height and width of the feature maps that grounding reads."""
CHANNELS = 256


_CPU = "cpu"
"""Among the keys of TVM's target for a CPU, which runs loops in the order in which they are written."""


@dataclass(frozen=True)
class EntryPoint:
    """A function of the compiled model.

    Attributes:
        name: What it is called in the library.
        outputs: Names of its results, in order.
        build: Takes upstream's image model, returns the module: tensors in, tuple of tensors out.
        inputs: Takes the capacity, returns inputs by name to export the module with; only shapes and dtypes matter.
        uses_rope: Whether rotary position encoding is inside.
    """

    name: str
    outputs: tuple[str, ...]
    build: Callable[[Any], torch.nn.Module]
    inputs: Callable[[Capacity], dict[str, torch.Tensor]]
    uses_rope: bool = False

    def program(self, model: Any, capacity: Capacity) -> Program:
        """Returns the entry point of upstream's image model, for prompts of a capacity."""
        return Program(self.name, self.build(model).eval(), self.inputs(capacity), self.outputs, self.uses_rope)


def _image_encoding(model: Any) -> torch.nn.Module:
    from harness.models.sam3.deployed.modules import ImageEncoding

    return ImageEncoding(model)


def _text_encoding(model: Any) -> torch.nn.Module:
    from harness.models.sam3.components.text_encoder import build

    return build(model)


def _grounding(model: Any) -> torch.nn.Module:
    from harness.models.sam3.deployed.modules import Grounding

    return Grounding(model)


def _pixels(_capacity: Capacity) -> dict[str, torch.Tensor]:
    import torch

    from harness.models.sam3.images import RESOLUTION

    return {"pixels": torch.zeros(1, 3, RESOLUTION, RESOLUTION)}


def _tokens(_capacity: Capacity) -> dict[str, torch.Tensor]:
    import torch

    return {"tokens": torch.ones(1, TEXT_TOKENS, dtype=torch.int64)}


def _prompt(capacity: Capacity) -> dict[str, torch.Tensor]:
    import torch

    features = {f"fpn_{level}": torch.zeros(1, CHANNELS, size, size) for level, size in enumerate(FEATURE_SIZES)}
    return features | {
        "text_features": torch.zeros(TEXT_TOKENS, 1, CHANNELS),
        "text_mask": torch.zeros(1, TEXT_TOKENS, dtype=torch.bool),
        "points": torch.full((capacity.points, 1, 2), 0.5),
        "points_mask": torch.zeros(1, capacity.points, dtype=torch.bool),
        "point_labels": torch.ones(capacity.points, 1, dtype=torch.int64),
        "boxes": torch.full((capacity.boxes, 1, 4), 0.5),
        "boxes_mask": torch.zeros(1, capacity.boxes, dtype=torch.bool),
        "box_labels": torch.ones(capacity.boxes, 1, dtype=torch.int64),
    }


ENCODE_IMAGE = EntryPoint("encode_image", ("fpn_0", "fpn_1", "fpn_2"), _image_encoding, _pixels, uses_rope=True)
"""pixels fp32 [1, 3, 1008, 1008] to feature maps fp32 [1, 256, S, S], S = 288, 144, 72."""

ENCODE_TEXT = EntryPoint("encode_text", ("text_features", "text_mask"), _text_encoding, _tokens)
"""tokens int64 [1, 32] to features fp32 [32, 1, 256] and mask bool [1, 32], True where padded."""

GROUND = EntryPoint(
    "ground", ("logits", "boxes", "masks", "presence", "semantic", "scores", "boxes_xyxy"), _grounding, _prompt
)
"""Feature maps, text and geometric prompt to what was found; N = capacity.points, M = capacity.boxes.

Inputs: the outputs of the encoders; points fp32 [N, 1, 2] (x, y), boxes fp32 [M, 1, 4] (cx, cy, w, h), both normalized
to [0, 1]; masks bool [1, N] and [1, M], True where padded; labels int64 [N, 1] and [M, 1], 1 for positive.

Outputs: logits [1, 200, 1] (upstream's `pred_logits`), boxes [1, 200, 4] as
(cx, cy, w, h), mask logits [1, 200, 288, 288], presence logit [1, 1], semantic logits [1, 1, 288, 288], scores [1, 200]
as `Sam3Processor` computes them, boxes_xyxy [1, 200, 4] (x0, y0, x1, y1), all fp32, boxes normalized.
"""

ENTRY_POINTS = (ENCODE_IMAGE, ENCODE_TEXT, GROUND)
"""The entry points that are exported from PyTorch."""


def programs(case: Case, settings: Settings, capacity: Capacity) -> Iterator[Program]:
    """Builds the model of a case and yields its entry points; to be used inside `harness.models.sam3.upstream`."""
    from harness.models.sam3.build import build_model

    model = build_model(case.scale, case.seed, settings.checkpoint, allow_partial=settings.allow_partial)
    for entry_point in ENTRY_POINTS:
        yield entry_point.program(model, capacity)


def _preprocess(target: tvm.target.Target) -> tvm.IRModule:
    from harness.models.sam3.deployed import data_parallel, preprocessing

    if _CPU in target.keys:
        return preprocessing.preprocess_module()
    return data_parallel.preprocess_module(str(target.kind.name))


def _resize_masks(target: tvm.target.Target) -> tvm.IRModule:
    from harness.models.sam3.deployed import data_parallel, mask_resizing

    if _CPU in target.keys:
        return mask_resizing.resize_masks_module()
    return data_parallel.resize_masks_module(str(target.kind.name))


PREPROCESS = KernelFunction("preprocess", ("pixels",), _preprocess)
"""image uint8 [h, w, 3] to pixels fp32 [1, 3, 1008, 1008], as `Sam3Processor` resizes and normalizes them."""

RESIZE_MASKS = KernelFunction("resize_masks", ("masks",), _resize_masks)
"""mask logits fp32 [1, 200, 288, 288], kept int64 [k] and an image uint8 [h, w, 3] to masks bool [k, h, w]."""

IMAGE_FUNCTIONS = (PREPROCESS, RESIZE_MASKS)
