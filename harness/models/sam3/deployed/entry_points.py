"""The entry points of the compiled model that come from PyTorch: what they take and give, and how to build them.

One image is encoded once and then asked many prompts, so encoding an image, encoding a text and grounding are separate.
How many points and boxes a prompt has is fixed when the model is compiled; shorter prompts are padded and masked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.core.case import Case
from harness.core.settings import Settings
from harness.core.subject import Program, Symbolic
from harness.deployment.deployable import KernelFunction
from harness.models.sam3.components.mask_pointer import MASK_POINTER as MASK_POINTER_COMPONENT
from harness.models.sam3.components.memory_attention import MEMORY_ATTENTION as MEMORY_ATTENTION_COMPONENT
from harness.models.sam3.components.object_pointers import OBJECT_POINTERS as OBJECT_POINTERS_COMPONENT
from harness.runtime.manifest import Capacity
from harness.runtime.sam3.video.tracker import GIVEN_MASK, POINTERS, PREDICTED_MASK

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
MEMORY_CHANNELS = 64
MEMORIES = 10
"""The most memories that upstream's rules give a frame."""


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
        symbolic: Axes of inputs whose extents are not fixed when the model is compiled.
    """

    name: str
    outputs: tuple[str, ...]
    build: Callable[[Any], torch.nn.Module]
    inputs: Callable[[Capacity], dict[str, torch.Tensor]]
    uses_rope: bool = False
    symbolic: Symbolic = field(default_factory=dict)

    def program(self, model: Any, capacity: Capacity) -> Program:
        """Returns the entry point of upstream's image model, for prompts of a capacity."""
        module = self.build(model).eval()
        return Program(self.name, module, self.inputs(capacity), self.outputs, self.uses_rope, self.symbolic)


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
        "attended": torch.zeros(FEATURE_SIZES[-1] ** 2, 1, CHANNELS),
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


ENCODE_IMAGE = EntryPoint(
    "encode_image", ("fpn_0", "fpn_1", "fpn_2", "attended"), _image_encoding, _pixels, uses_rope=True
)
"""pixels fp32 [1, 3, 1008, 1008] to feature maps fp32 [1, 256, S, S], S = 288, 144, 72, and tokens fp32 [5184, 1, 256].

`attended` has the tokens of fpn_2 behind the fusion encoder's first self-attention, which is the same for every prompt.
"""

ENCODE_TEXT = EntryPoint("encode_text", ("text_features", "text_mask"), _text_encoding, _tokens)
"""tokens int64 [1, 32] to features fp32 [32, 1, 256] and mask bool [1, 32], True where padded."""

GROUND = EntryPoint(
    "ground",
    ("logits", "boxes", "presence", "scores", "boxes_xyxy", "memory", "hs", "prompt", "prompt_mask"),
    _grounding,
    _prompt,
)
"""Features, text and geometric prompt to what was found; N = capacity.points, M = capacity.boxes.

Inputs: fpn_2, attended, and the outputs of `ENCODE_TEXT`; points fp32 [N, 1, 2] (x, y), boxes fp32 [M, 1, 4]
(cx, cy, w, h), both normalized to [0, 1]; masks bool [1, N] and [1, M], True where padded; labels int64 [N, 1] and
[M, 1], 1 for positive.

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
    from harness.models.sam3.deployed.modules import ImageEncoding

    return ImageEncoding(model, with_trunk=True)


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


def _video_features(model: Any) -> torch.nn.Module:
    from harness.models.sam3.deployed.interactive import InteractiveFeatures

    return InteractiveFeatures(model, with_features=True)


def _pointed_masks(model: Any) -> torch.nn.Module:
    from harness.models.sam3.deployed.interactive import MaskPrediction

    return MaskPrediction(model, with_pointers=True)


def _memory_of_frame(model: Any) -> torch.nn.Module:
    from harness.models.sam3.deployed.video import MemoryOfFrame

    return MemoryOfFrame(model)


def _frame_and_mask(size: int) -> dict[str, torch.Tensor]:
    import torch

    return {
        "features": torch.zeros(1, CHANNELS, FEATURE_SIZES[-1], FEATURE_SIZES[-1]),
        "masks": torch.zeros(1, 1, size, size),
        "object_logits": torch.zeros(1, 1),
    }


def _object_pointers(_capacity: Capacity) -> dict[str, torch.Tensor]:
    import torch

    return {"pointers": torch.zeros(POINTERS, 1, CHANNELS), "times": torch.zeros(POINTERS)}


def _memories(_capacity: Capacity) -> dict[str, torch.Tensor]:
    import torch

    side, tokens = FEATURE_SIZES[-1], POINTERS * CHANNELS // MEMORY_CHANNELS
    return {
        "features": torch.zeros(1, CHANNELS, side, side),
        "memories": torch.zeros(MEMORIES, 1, MEMORY_CHANNELS, side, side),
        "ranks": torch.zeros(MEMORIES, dtype=torch.int64),
        "pointers": torch.zeros(tokens, 1, MEMORY_CHANNELS),
        "pointer_pos": torch.zeros(tokens, 1, MEMORY_CHANNELS),
    }


def _given_mask(_capacity: Capacity) -> dict[str, torch.Tensor]:
    import torch

    largest, middle, smallest = FEATURE_SIZES
    return {
        "features": torch.zeros(1, CHANNELS, smallest, smallest),
        "high_res_0": torch.zeros(1, CHANNELS // 8, largest, largest),
        "high_res_1": torch.zeros(1, CHANNELS // 4, middle, middle),
        "masks": torch.zeros(1, 1, GIVEN_MASK, GIVEN_MASK),
    }


VIDEO_FEATURES = EntryPoint(
    INTERACTIVE_FEATURES.name, (*INTERACTIVE_FEATURES.outputs, "features"), _video_features, _trunk
)
"""As `INTERACTIVE_FEATURES`, with the features fp32 [1, 256, 72, 72] that attend to memories."""

POINTED_MASKS = EntryPoint(PREDICT_MASKS.name, (*PREDICT_MASKS.outputs, "pointers"), _pointed_masks, _object_prompt)
"""As `PREDICT_MASKS`, with the object pointer fp32 [1, 4, 256] of each mask."""

OBJECT_POINTERS = EntryPoint(
    "object_pointers",
    ("pointer_tokens", "pointer_pos"),
    OBJECT_POINTERS_COMPONENT.build,
    _object_pointers,
    symbolic=OBJECT_POINTERS_COMPONENT.symbolic,
)
"""pointers fp32 [20, B, 256] of any number of objects and times fp32 [20] to four tokens of each, and their positions,
fp32 [80, B, 64]."""

MEMORY_ATTENTION = EntryPoint(
    "memory_attention",
    ("conditioned",),
    MEMORY_ATTENTION_COMPONENT.build,
    _memories,
    uses_rope=True,
    symbolic=MEMORY_ATTENTION_COMPONENT.symbolic,
)
"""A frame in the light of M memories and P pointers of an object; the inputs and the output are the component's."""

MEMORY_ENCODER = EntryPoint("encode_memory", ("memory",), _memory_of_frame, lambda _: _frame_and_mask(GIVEN_MASK))
"""features fp32 [1, 256, 72, 72], mask logits fp32 [1, 1, 1152, 1152], object logits [1, 1] to fp32 [1, 64, 72, 72]."""

PREDICTED_MEMORY_ENCODER = EntryPoint(
    "encode_predicted_memory", ("memory",), _memory_of_frame, lambda _: _frame_and_mask(PREDICTED_MASK)
)
"""As `MEMORY_ENCODER`, for an object that a prompt was given for, mask logits fp32 [1, 1, 1008, 1008].

The mask of a prompt itself is decided: its logits are -1024 and 1024. Those of the frames that are tracked again after
a click are what the mask decoder gives.
"""

MASK_POINTER = EntryPoint("mask_pointer", MASK_POINTER_COMPONENT.outputs, MASK_POINTER_COMPONENT.build, _given_mask)
"""A frame and a given mask, fp32 [1, 1, 1152, 1152], to a pointer fp32 [1, 256] and the object logit [1, 1]."""

VIDEO_ENTRY_POINTS = (
    INTERACTIVE_ENCODE_IMAGE,
    *GROUNDING,
    VIDEO_FEATURES,
    POINTED_MASKS,
    OBJECT_POINTERS,
    MEMORY_ATTENTION,
    MEMORY_ENCODER,
    PREDICTED_MEMORY_ENCODER,
    MASK_POINTER,
)
"""What takes the place of `ENTRY_POINTS` where the model tracks objects through videos too."""


def entry_points(capacity: Capacity) -> tuple[EntryPoint, ...]:
    """The entry points of a model of this capacity that are exported from PyTorch."""
    if capacity.video:
        return VIDEO_ENTRY_POINTS
    return INTERACTIVE_ENTRY_POINTS if capacity.clicks else ENTRY_POINTS


def programs(case: Case, settings: Settings, capacity: Capacity) -> Iterator[Program]:
    """Builds the model of a case and yields its entry points; to be used inside `harness.models.sam3.upstream`."""
    from harness.models.sam3.build import build_model

    model = build_model(
        case.scale,
        case.seed,
        settings.checkpoint,
        weights=case.weights,
        interactive=capacity.clicks > 0,
        allow_partial=settings.allow_partial,
    )
    for entry_point in entry_points(capacity):
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
