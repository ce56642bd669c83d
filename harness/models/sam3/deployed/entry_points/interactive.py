"""Defines the entry points that answer clicks, boxes and masks about one object, on the same encoding of the image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.models.sam3.deployed.entry_points.entry_point import (
    CHANNELS,
    CORNERS_AND_PAD,
    FEATURE_SIZES,
    EntryPoint,
)
from harness.models.sam3.deployed.entry_points.grounding import ENCODE_IMAGE, GROUNDING, image_inputs
from harness.runtime.sam3.description import Capacity

if TYPE_CHECKING:
    import torch


def _interactive_image_encoding(model: Any) -> torch.nn.Module:
    from harness.models.sam3.deployed.modules import ImageEncoding

    return ImageEncoding(model, with_trunk=True)


def _interactive_features(model: Any) -> torch.nn.Module:
    from harness.models.sam3.deployed.interactive import InteractiveFeatures

    return InteractiveFeatures(model)


def _mask_prediction(model: Any) -> torch.nn.Module:
    from harness.models.sam3.deployed.interactive import MaskPrediction

    return MaskPrediction(model)


def trunk_inputs(model: Any, _capacity: Capacity) -> dict[str, torch.Tensor]:
    """Returns the input of `INTERACTIVE_FEATURES`."""
    import torch

    channels = model.backbone.vision_backbone.trunk.channel_list[-1]
    return {"trunk": torch.zeros(1, channels, FEATURE_SIZES[-1], FEATURE_SIZES[-1])}


def prompt_inputs(_model: Any, capacity: Capacity) -> dict[str, torch.Tensor]:
    """Returns the inputs of `PREDICT_MASKS` for prompts of a capacity."""
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
    "encode_image", (*ENCODE_IMAGE.outputs, "trunk"), _interactive_image_encoding, image_inputs, uses_rope=True
)
"""`ENCODE_IMAGE` that also returns the trunk's features fp32 [1, 1024, 72, 72], which `INTERACTIVE_FEATURES` reads."""

INTERACTIVE_FEATURES = EntryPoint(
    "interactive_features", ("image_embedding", "high_res_0", "high_res_1"), _interactive_features, trunk_inputs
)
"""trunk fp32 [1, 1024, 72, 72] to fp32 [1, 256, 72, 72], [1, 32, 288, 288] and [1, 64, 144, 144]."""

PREDICT_MASKS = EntryPoint("predict_masks", ("masks", "iou", "object_score"), _mask_prediction, prompt_inputs)
"""The outputs of `INTERACTIVE_FEATURES` and one object's prompt to four masks; P = capacity.clicks + 3.

Further inputs: coordinates fp32 [1, P, 2] (x, y) in pixels of the 1008x1008 image; labels int64 [1, P]: 1 for a
positive and 0 for a negative point, 2 and 3 for a box's corners, -1 for upstream's padding point, -2 for an absent
place; mask, logits fp32 [1, 1, 288, 288], and has_mask bool [1], whether the mask is used.

Outputs, all fp32: mask logits [1, 4, 288, 288] (upstream's token for a single mask first, then its three for several),
predicted IoU [1, 4] of each, and the logit [1, 1] of whether there is an object.
"""

INTERACTIVE_ENTRY_POINTS = (INTERACTIVE_ENCODE_IMAGE, *GROUNDING, INTERACTIVE_FEATURES, PREDICT_MASKS)
"""The entry points that replace `ENTRY_POINTS` in a model that also answers clicks."""
