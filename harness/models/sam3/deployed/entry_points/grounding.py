"""Defines the entry points that encode an image and a text, and find all objects of a text, boxes and points.

One image is encoded once and then asked many prompts, so image encoding, text encoding and grounding are separate. The
numbers of points and boxes of a prompt are fixed at compilation; shorter prompts are padded and masked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.models.sam3.deployed.entry_points.entry_point import (
    CHANNELS,
    FEATURE_SIZES,
    LABELS,
    QUERIES_AT_ONCE,
    TEXT_TOKENS,
    VOCABULARY,
    EntryPoint,
)
from harness.runtime.sam3.description import Capacity

if TYPE_CHECKING:
    import torch


def _image_encoding(model: Any) -> torch.nn.Module:
    from harness.models.sam3.deployed.modules import ImageEncoding

    return ImageEncoding(model)


def _text_encoding(model: Any) -> torch.nn.Module:
    from harness.models.sam3.deployed.modules import TextEncoding

    return TextEncoding(model)


def _grounding(model: Any) -> torch.nn.Module:
    from harness.models.sam3.deployed.modules import Grounding

    return Grounding(model)


def image_inputs(_model: Any, _capacity: Capacity) -> dict[str, torch.Tensor]:
    """Returns the input of `ENCODE_IMAGE`."""
    import torch

    from harness.models.sam3.images import RESOLUTION

    return {"pixels": torch.zeros(1, 3, RESOLUTION, RESOLUTION)}


def _text_inputs(_model: Any, _capacity: Capacity) -> dict[str, torch.Tensor]:
    import torch

    tokens = torch.ones(1, TEXT_TOKENS, dtype=torch.int64)
    return {"tokens": tokens, "starts": torch.zeros_like(tokens)}


def _grounding_inputs(_model: Any, capacity: Capacity) -> dict[str, torch.Tensor]:
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


def _pixel_embedding(model: Any) -> torch.nn.Module:
    from harness.models.sam3.deployed.segmentation import PixelEmbedding, UpsampledConvolution

    return PixelEmbedding(model, UpsampledConvolution)


def _composed_pixel_embedding(model: Any) -> torch.nn.Module:
    from harness.models.sam3.deployed.segmentation import ComposedConvolution, PixelEmbedding

    return PixelEmbedding(model, ComposedConvolution)


def _mask_predictor(model: Any) -> torch.nn.Module:
    from harness.models.sam3.deployed.segmentation import MaskPredictor

    return MaskPredictor(model)


def _pixel_inputs(_model: Any, capacity: Capacity) -> dict[str, torch.Tensor]:
    import torch

    largest, middle, smallest = FEATURE_SIZES
    tokens = TEXT_TOKENS + capacity.points + capacity.boxes + 1
    return {
        "filtered_0": torch.zeros(1, CHANNELS, largest, largest),
        "filtered_1": torch.zeros(1, CHANNELS, middle, middle),
        "memory": torch.zeros(smallest * smallest, 1, CHANNELS),
        "prompt": torch.zeros(tokens, 1, CHANNELS),
        "prompt_mask": torch.zeros(1, tokens, dtype=torch.bool),
    }


def _mask_inputs(_model: Any, _capacity: Capacity) -> dict[str, torch.Tensor]:
    import torch

    largest = FEATURE_SIZES[0]
    return {
        "pixel_embed": torch.zeros(1, CHANNELS, largest, largest),
        "hs": torch.zeros(1, 1, QUERIES_AT_ONCE, CHANNELS),
    }


ENCODE_IMAGE = EntryPoint(
    "encode_image", ("filtered_0", "filtered_1", "fpn_2", "attended"), _image_encoding, image_inputs, uses_rope=True
)
"""pixels fp32 [1, 3, 1008, 1008] to feature maps fp32 [1, 256, S, S], S = 288, 144, 72, and tokens fp32 [5184, 1, 256].

It computes everything that is the same for every prompt: filtered_0 and filtered_1 are the pixel decoder's convolutions
of fpn_0 and fpn_1; `attended` has the tokens of fpn_2 after the fusion encoder's first self-attention.
"""

ENCODE_TEXT = EntryPoint(
    "encode_text",
    ("text_features", "text_mask"),
    _text_encoding,
    _text_inputs,
    below={"tokens": VOCABULARY, "starts": TEXT_TOKENS},
)
"""tokens int64 [1, 32] to features fp32 [32, 1, 256] and mask bool [1, 32], True where padded.

There may be several concatenated texts; starts int64 [1, 32] has the place where the text of each token begins, so
zeros for a single text. The features of each text are those of the text alone.
"""

GROUND = EntryPoint(
    "ground",
    ("logits", "boxes", "presence", "scores", "boxes_xyxy", "memory", "hs", "prompt", "prompt_mask"),
    _grounding,
    _grounding_inputs,
    below={"point_labels": LABELS, "box_labels": LABELS},
)
"""Features, text and geometric prompt to detections; N = capacity.points, M = capacity.boxes.

Inputs: fpn_2, attended, and the outputs of `ENCODE_TEXT`; points fp32 [N, 1, 2] (x, y), boxes fp32 [M, 1, 4]
(cx, cy, w, h), both normalized to [0, 1]; masks bool [1, N] and [1, M], True where padded; labels int64 [N, 1] and
[M, 1], 1 for positive.

Outputs: logits [1, 200, 1] (upstream's `pred_logits`), boxes [1, 200, 4] as (cx, cy, w, h), presence logit [1, 1],
scores [1, 200] as `Sam3Processor` computes them, boxes_xyxy [1, 200, 4] (x0, y0, x1, y1), all fp32, boxes normalized;
and the inputs of `EMBED_PIXELS` and `MASK_PREDICTOR`: memory fp32 [5184, 1, 256], hs fp32 [1, 1, 200, 256],
prompt fp32 [T, 1, 256], prompt_mask bool [1, T]; T = 33 + N + M.
"""

EMBED_PIXELS = EntryPoint(
    "embed_pixels",
    ("pixel_embed", "semantic"),
    _pixel_embedding,
    _pixel_inputs,
    build_composed=_composed_pixel_embedding,
)
"""Prompted image features to embedded pixels, from which masks are predicted; needed only if a query is kept.

Inputs: filtered_0, filtered_1, and the outputs of `GROUND` without hs. Outputs: pixel_embed fp32 [1, 256, 288, 288],
equal to upstream's `pixel_embed`, and logits fp32 [1, 1, 288, 288] of the semantic map.
"""

MASK_PREDICTOR = EntryPoint("mask_predictor", ("masks",), _mask_predictor, _mask_inputs)
"""pixel_embed and hs fp32 [1, 1, 16, 256] of any 16 queries to logits fp32 [1, 16, 288, 288] of their masks.

Few of the 200 queries find something: 16 masks are 8 % of the multiplications of all of them.
"""

GROUNDING = (ENCODE_TEXT, GROUND, EMBED_PIXELS, MASK_PREDICTOR)
"""The entry points that find all objects of a text, boxes and points."""

ENTRY_POINTS = (ENCODE_IMAGE, *GROUNDING)
"""The entry points that are exported from PyTorch."""
