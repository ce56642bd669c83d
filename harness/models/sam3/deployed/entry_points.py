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
TRUNK_CHANNELS = 1024
QUERIES = 200
"""Object queries of the decoder (`num_queries` of upstream's TransformerDecoder)."""
CORNERS_AND_PAD = 3
"""Places of a box's two corners, and of the point that upstream adds to every prompt with points or a box."""


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

    return {
        "fpn_2": torch.zeros(1, CHANNELS, FEATURE_SIZES[-1], FEATURE_SIZES[-1]),
        "text_features": torch.zeros(TEXT_TOKENS, 1, CHANNELS),
        "text_mask": torch.zeros(1, TEXT_TOKENS, dtype=torch.bool),
        "points": torch.full((capacity.points, 1, 2), 0.5),
        "points_mask": torch.zeros(1, capacity.points, dtype=torch.bool),
        "point_labels": torch.ones(capacity.points, 1, dtype=torch.int64),
        "boxes": torch.full((capacity.boxes, 1, 4), 0.5),
        "boxes_mask": torch.zeros(1, capacity.boxes, dtype=torch.bool),
        "box_labels": torch.ones(capacity.boxes, 1, dtype=torch.int64),
    }


def _segmentation(model: Any) -> torch.nn.Module:
    from harness.models.sam3.components.segmentation_head import build

    return build(model)


def _grounded(capacity: Capacity) -> dict[str, torch.Tensor]:
    import torch

    largest, middle, smallest = FEATURE_SIZES
    tokens = TEXT_TOKENS + capacity.points + capacity.boxes + 1
    return {
        "fpn_0": torch.zeros(1, CHANNELS, largest, largest),
        "fpn_1": torch.zeros(1, CHANNELS, middle, middle),
        "memory": torch.zeros(smallest * smallest, 1, CHANNELS),
        "hs": torch.zeros(1, 1, QUERIES, CHANNELS),
        "prompt": torch.zeros(tokens, 1, CHANNELS),
        "prompt_mask": torch.zeros(1, tokens, dtype=torch.bool),
    }


ENCODE_IMAGE = EntryPoint("encode_image", ("fpn_0", "fpn_1", "fpn_2"), _image_encoding, _pixels, uses_rope=True)
"""pixels fp32 [1, 3, 1008, 1008] to feature maps fp32 [1, 256, S, S], S = 288, 144, 72."""

ENCODE_TEXT = EntryPoint("encode_text", ("text_features", "text_mask"), _text_encoding, _tokens)
"""tokens int64 [1, 32] to features fp32 [32, 1, 256] and mask bool [1, 32], True where padded."""

GROUND = EntryPoint(
    "ground",
    ("logits", "boxes", "presence", "scores", "boxes_xyxy", "memory", "hs", "prompt", "prompt_mask"),
    _grounding,
    _prompt,
)
"""Features, text and geometric prompt to what was found; N = capacity.points, M = capacity.boxes.

Inputs: fpn_2 and the outputs of `ENCODE_TEXT`; points fp32 [N, 1, 2] (x, y), boxes fp32 [M, 1, 4] (cx, cy, w, h), both
normalized to [0, 1]; masks bool [1, N] and [1, M], True where padded; labels int64 [N, 1] and [M, 1], 1 for positive.

Outputs: logits [1, 200, 1] (upstream's `pred_logits`), boxes [1, 200, 4] as (cx, cy, w, h), presence logit [1, 1],
scores [1, 200] as `Sam3Processor` computes them, boxes_xyxy [1, 200, 4] (x0, y0, x1, y1), all fp32, boxes normalized;
and what `SEGMENTATION_HEAD` reads.
"""

SEGMENTATION_HEAD = EntryPoint("segmentation_head", ("masks", "semantic"), _segmentation, _grounded)
"""What was found to its masks, which nobody needs where nothing was found; T = 33 + N + M.

Inputs: fpn_0, fpn_1, and the outputs of `GROUND`: memory fp32 [5184, 1, 256], hs fp32 [1, 1, 200, 256], prompt fp32
[T, 1, 256], prompt_mask bool [1, T]. Outputs: logits fp32 [1, 200, 288, 288] of the masks and [1, 1, 288, 288] of the
semantic map.
"""

GROUNDING = (ENCODE_TEXT, GROUND, SEGMENTATION_HEAD)
"""Find everything that a text, boxes and points mean."""

ENTRY_POINTS = (ENCODE_IMAGE, *GROUNDING)
"""The entry points that are exported from PyTorch."""


def _interactive_image_encoding(model: Any) -> torch.nn.Module:
    from harness.models.sam3.deployed.interactive import InteractiveImageEncoding

    return InteractiveImageEncoding(model)


def _interactive_features(model: Any) -> torch.nn.Module:
    from harness.models.sam3.deployed.interactive import InteractiveFeatures

    return InteractiveFeatures(model)


def _mask_prediction(model: Any) -> torch.nn.Module:
    from harness.models.sam3.deployed.interactive import MaskPrediction

    return MaskPrediction(model)


def _trunk(_capacity: Capacity) -> dict[str, torch.Tensor]:
    import torch

    return {"trunk": torch.zeros(1, TRUNK_CHANNELS, FEATURE_SIZES[-1], FEATURE_SIZES[-1])}


def _object_prompt(capacity: Capacity) -> dict[str, torch.Tensor]:
    import torch

    largest, middle, smallest = FEATURE_SIZES
    places = capacity.clicks + CORNERS_AND_PAD
    return {
        "image_embedding": torch.zeros(1, CHANNELS, smallest, smallest),
        "high_res_0": torch.zeros(1, CHANNELS // 8, largest, largest),
        "high_res_1": torch.zeros(1, CHANNELS // 4, middle, middle),
        "coordinates": torch.full((1, places, 2), 500.0),
        "labels": torch.ones(1, places, dtype=torch.int64),
        "mask": torch.zeros(1, 1, largest, largest),
        "has_mask": torch.ones(1, dtype=torch.bool),
    }


INTERACTIVE_ENCODE_IMAGE = EntryPoint(
    "encode_image", (*ENCODE_IMAGE.outputs, "trunk"), _interactive_image_encoding, _pixels, uses_rope=True
)
"""As `ENCODE_IMAGE`, with the trunk's features fp32 [1, 1024, 72, 72], which `INTERACTIVE_FEATURES` reads."""

INTERACTIVE_FEATURES = EntryPoint(
    "interactive_features", ("image_embedding", "high_res_0", "high_res_1"), _interactive_features, _trunk
)
"""trunk fp32 [1, 1024, 72, 72] to fp32 [1, 256, 72, 72], [1, 32, 288, 288] and [1, 64, 144, 144]."""

PREDICT_MASKS = EntryPoint("predict_masks", ("masks", "iou", "object_score"), _mask_prediction, _object_prompt)
"""The outputs of `INTERACTIVE_FEATURES` and one object's prompt to four masks; P = capacity.clicks + 3.

Inputs besides: coordinates fp32 [1, P, 2] (x, y) in pixels of the 1008x1008 image; labels int64 [1, P]: 1 for a
positive and 0 for a negative point, 2 and 3 for a box's corners, -1 for upstream's padding point, -2 for a place that
is not used; mask, logits fp32 [1, 1, 288, 288], and has_mask bool [1], whether it counts.

Outputs, all fp32: mask logits [1, 4, 288, 288] (upstream's token for a single mask first, then its three for several),
predicted IoU [1, 4] of each, and the logit [1, 1] of whether there is an object.
"""

INTERACTIVE_ENTRY_POINTS = (INTERACTIVE_ENCODE_IMAGE, *GROUNDING, INTERACTIVE_FEATURES, PREDICT_MASKS)
"""What takes the place of `ENTRY_POINTS` where the model answers clicks too."""


def programs(case: Case, settings: Settings, capacity: Capacity) -> Iterator[Program]:
    """Builds the model of a case and yields its entry points; to be used inside `harness.models.sam3.upstream`."""
    from harness.models.sam3.build import build_model

    interactive = capacity.clicks > 0
    model = build_model(
        case.scale, case.seed, settings.checkpoint, interactive=interactive, allow_partial=settings.allow_partial
    )
    for entry_point in INTERACTIVE_ENTRY_POINTS if interactive else ENTRY_POINTS:
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
"""mask logits fp32 [1, q, 288, 288], kept int64 [k] and an image uint8 [h, w, 3] to masks bool [k, h, w]."""

IMAGE_FUNCTIONS = (PREPROCESS, RESIZE_MASKS)
