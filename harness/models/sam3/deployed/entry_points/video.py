"""Defines the entry points that track objects through a video: pointers, memories and memory attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.models.sam3.components import COMPONENTS
from harness.models.sam3.deployed.entry_points.entry_point import (
    CHANNELS,
    FEATURE_SIZES,
    MEMORIES,
    MEMORY_CHANNELS,
    RANKS,
    EntryPoint,
)
from harness.models.sam3.deployed.entry_points.grounding import GROUNDING
from harness.models.sam3.deployed.entry_points.interactive import (
    INTERACTIVE_ENCODE_IMAGE,
    INTERACTIVE_FEATURES,
    PREDICT_MASKS,
    prompt_inputs,
    trunk_inputs,
)
from harness.runtime.sam3.description import Capacity
from harness.runtime.sam3.video.tracker import INPUT_MASK_SIZE, POINTERS, PROMPT_MASK_SIZE

if TYPE_CHECKING:
    import torch


def _video_features(model: Any) -> torch.nn.Module:
    from harness.models.sam3.deployed.interactive import InteractiveFeatures

    return InteractiveFeatures(model, with_features=True)


def _pointed_masks(model: Any) -> torch.nn.Module:
    from harness.models.sam3.deployed.interactive import MaskPrediction

    return MaskPrediction(model, with_pointers=True)


def _frame_memory(model: Any) -> torch.nn.Module:
    from harness.models.sam3.deployed.video import FrameMemory

    return FrameMemory(model)


def _frame_and_mask(size: int) -> dict[str, torch.Tensor]:
    import torch

    return {
        "features": torch.zeros(1, CHANNELS, FEATURE_SIZES[-1], FEATURE_SIZES[-1]),
        "masks": torch.zeros(1, 1, size, size),
        "object_logits": torch.zeros(1, 1),
    }


def _object_pointers(_model: Any, _capacity: Capacity) -> dict[str, torch.Tensor]:
    import torch

    return {"pointers": torch.zeros(POINTERS, 1, CHANNELS), "times": torch.zeros(POINTERS)}


def _memories(_model: Any, _capacity: Capacity) -> dict[str, torch.Tensor]:
    import torch

    side, tokens = FEATURE_SIZES[-1], POINTERS * CHANNELS // MEMORY_CHANNELS
    return {
        "features": torch.zeros(1, CHANNELS, side, side),
        "memories": torch.zeros(MEMORIES, 1, MEMORY_CHANNELS, side, side),
        "ranks": torch.zeros(MEMORIES, dtype=torch.int64),
        "pointers": torch.zeros(tokens, 1, MEMORY_CHANNELS),
        "pointer_pos": torch.zeros(tokens, 1, MEMORY_CHANNELS),
    }


def _mask_prompt(_model: Any, _capacity: Capacity) -> dict[str, torch.Tensor]:
    import torch

    largest, middle, smallest = FEATURE_SIZES
    return {
        "features": torch.zeros(1, CHANNELS, smallest, smallest),
        "high_res_0": torch.zeros(1, CHANNELS // 8, largest, largest),
        "high_res_1": torch.zeros(1, CHANNELS // 4, middle, middle),
        "masks": torch.zeros(1, 1, INPUT_MASK_SIZE, INPUT_MASK_SIZE),
    }


VIDEO_FEATURES = EntryPoint(
    INTERACTIVE_FEATURES.name, (*INTERACTIVE_FEATURES.outputs, "features"), _video_features, trunk_inputs
)
"""`INTERACTIVE_FEATURES` that also returns the features fp32 [1, 256, 72, 72] that attend to memories."""

POINTED_MASKS = EntryPoint(PREDICT_MASKS.name, (*PREDICT_MASKS.outputs, "pointers"), _pointed_masks, prompt_inputs)
"""`PREDICT_MASKS` that also returns the object pointer fp32 [1, 4, 256] of each mask."""

OBJECT_POINTERS = EntryPoint(
    "object_pointers",
    ("pointer_tokens", "pointer_pos"),
    COMPONENTS["object_pointers"].build,
    _object_pointers,
    symbolic=COMPONENTS["object_pointers"].symbolic,
)
"""pointers fp32 [20, B, 256] of any number of objects and times fp32 [20] to four tokens of each, and their positions,
fp32 [80, B, 64]."""

MEMORY_ATTENTION = EntryPoint(
    "memory_attention",
    ("conditioned",),
    COMPONENTS["memory_attention"].build,
    _memories,
    uses_rope=True,
    symbolic=COMPONENTS["memory_attention"].symbolic,
    below={"ranks": RANKS},
)
"""Attention of a frame to M memories and P pointers of an object; inputs and output are the component's."""

MEMORY_ENCODER = EntryPoint("encode_memory", ("memory",), _frame_memory, lambda *_: _frame_and_mask(INPUT_MASK_SIZE))
"""features fp32 [1, 256, 72, 72], mask logits fp32 [1, 1, 1152, 1152], object logits [1, 1] to fp32 [1, 64, 72, 72]."""

PREDICTED_MEMORY_ENCODER = EntryPoint(
    "encode_predicted_memory", ("memory",), _frame_memory, lambda *_: _frame_and_mask(PROMPT_MASK_SIZE)
)
"""`MEMORY_ENCODER` for a prompted object, whose mask logits are fp32 [1, 1, 1008, 1008].

The mask of a prompt itself is binarized: its logits are -1024 and 1024. Frames that are tracked again after a click
have the mask decoder's logits.
"""

MASK_POINTER = EntryPoint(
    "mask_pointer", COMPONENTS["mask_pointer"].outputs, COMPONENTS["mask_pointer"].build, _mask_prompt
)
"""A frame and a mask prompt, fp32 [1, 1, 1152, 1152], to a pointer fp32 [1, 256] and the object logit [1, 1]."""

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
"""The entry points that replace `ENTRY_POINTS` in a model that also tracks objects through videos."""
