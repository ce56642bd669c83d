"""Defines the functions of the compiled model that come from PyTorch: their modules, inputs and outputs.

One image is encoded once and then asked many prompts, so image encoding, text encoding and grounding are separate. The
sizes of prompts are fixed at compilation; shorter prompts are padded and masked. Only shapes and dtypes of the inputs
matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from harness.compiler.targets import TARGETS
from harness.core.case import Case
from harness.core.program import Program
from harness.core.settings import Settings
from harness.models.sam3.build import build_case
from harness.models.sam3.components import COMPONENTS
from harness.models.sam3.deployed.interactive import (
    ClickHead,
    FrameMemory,
    InteractiveFeatures,
    MaskPrediction,
    click_head,
)
from harness.models.sam3.deployed.modules import Grounding, ImageEncoding, TextEncoding
from harness.models.sam3.deployed.options import Sam3Options
from harness.models.sam3.deployed.segmentation import (
    ComposedConvolution,
    MaskPredictor,
    PixelEmbedding,
    UpsampledConvolution,
)
from harness.models.sam3.groups import note_groups
from harness.runtime.sam3.images import RESOLUTION
from harness.runtime.sam3.tokenizer import CONTEXT_LENGTH
from harness.runtime.sam3.video.tracker import INPUT_MASK_SIZE, POINTERS, PROMPT_MASK_SIZE

VOCABULARY = 49408
"""Number of distinct tokens (`vocab_size` of upstream's VETextEncoder)."""
LARGEST, MIDDLE, SMALLEST = 288, 144, 72
"""Height and width of the feature maps that are read."""
CHANNELS = 256
QUERIES_AT_ONCE = 16
"""Queries whose masks one call predicts: the number of rows of one step of most matrix units."""
CORNERS_AND_PAD = 3
"""Places of a box's two corners, and of the padding point that upstream adds to every prompt with points or a box."""
MEMORY_CHANNELS = 64
MEMORIES = 10
"""The largest number of memories that upstream's rules give a frame."""
RANKS = 7
"""Number of temporal positions of memories (`num_maskmem` of upstream's tracker)."""
LABELS = 2
"""Number of labels of points and boxes: negative and positive."""


def programs(case: Case, settings: Settings, options: Sam3Options) -> Iterator[Program]:
    """Builds the model of a case and yields its entry points; to be used inside `harness.models.sam3.upstream`."""
    model = build_case(case, settings, interactive=options.clicks > 0)
    note_groups(model)
    yield from detector_programs(model, case, options)
    if options.clicks:
        yield interactive_features(model, for_video=options.video)
        yield predict_masks(click_head(model), options)
    if options.video:
        yield object_pointers(model)
        yield memory_attention(model)
        yield encode_memory(model, "encode_memory", INPUT_MASK_SIZE)
        yield encode_memory(model, "encode_predicted_memory", PROMPT_MASK_SIZE)
        yield mask_pointer(model)


def detector_programs(model: Any, case: Case, options: Sam3Options) -> Iterator[Program]:
    """Yields the entry points of an image model that encode an image, and find what a text, a box or a point means."""
    yield encode_image(model, with_trunk=options.clicks > 0)
    if not options.no_grounding:
        yield encode_text(model)
        yield ground(model, options)
        yield embed_pixels(model, options, upsampling=TARGETS[case.target].upsampling)
        yield predict_query_masks(model)


def encode_image(model: Any, *, with_trunk: bool = False) -> Program:
    """Maps pixels fp32 [1, 3, 1008, 1008] to feature maps fp32 [1, 256, S, S], S = 288, 144, 72, and tokens.

    It computes everything that is the same for every prompt: filtered_0 and filtered_1 are the pixel decoder's
    convolutions of fpn_0 and fpn_1; `attended` fp32 [5184, 1, 256] has the tokens of fpn_2 after the fusion encoder's
    first self-attention. If clicks are answered, it also returns the trunk's features fp32 [1, 1024, 72, 72], which
    `interactive_features` reads.
    """
    outputs = ("filtered_0", "filtered_1", "fpn_2", "attended", *(("trunk",) if with_trunk else ()))
    pixels = torch.zeros(1, 3, RESOLUTION, RESOLUTION)
    module = ImageEncoding(model, with_trunk).eval()
    return Program("encode_image", module, {"pixels": pixels}, outputs, uses_rope=True)


def encode_text(model: Any) -> Program:
    """Maps tokens int64 [1, 32] to features fp32 [32, 1, 256] and mask bool [1, 32], True where padded.

    There may be several concatenated texts; starts int64 [1, 32] has the place where the text of each token begins, so
    zeros for a single text. The features of each text are those of the text alone.
    """
    tokens = torch.ones(1, CONTEXT_LENGTH, dtype=torch.int64)
    return Program(
        "encode_text",
        TextEncoding(model).eval(),
        {"tokens": tokens, "starts": torch.zeros_like(tokens)},
        ("text_features", "text_mask"),
        below={"tokens": VOCABULARY, "starts": CONTEXT_LENGTH},
    )


def ground(model: Any, options: Sam3Options) -> Program:
    """Maps features, text and a geometric prompt of N points and M boxes to detections.

    Inputs: fpn_2, attended, and the outputs of `encode_text`; points fp32 [N, 1, 2] (x, y), boxes fp32 [M, 1, 4]
    (cx, cy, w, h), both normalized to [0, 1]; masks bool [1, N] and [1, M], True where padded; labels int64 [N, 1] and
    [M, 1], 1 for positive.

    Outputs: logits [1, 200, 1] (upstream's `pred_logits`), boxes [1, 200, 4] as (cx, cy, w, h), presence logit [1, 1],
    scores [1, 200] as `Sam3Processor` computes them, boxes_xyxy [1, 200, 4] (x0, y0, x1, y1), all fp32, boxes
    normalized; and the inputs of `embed_pixels` and `predict_query_masks`: memory fp32 [5184, 1, 256], hs fp32
    [1, 1, 200, 256], prompt fp32 [T, 1, 256], prompt_mask bool [1, T]; T = 33 + N + M.
    """
    inputs = {
        "fpn_2": feature_map(),
        "attended": torch.zeros(SMALLEST**2, 1, CHANNELS),
        "text_features": torch.zeros(CONTEXT_LENGTH, 1, CHANNELS),
        "text_mask": torch.zeros(1, CONTEXT_LENGTH, dtype=torch.bool),
        "points": torch.full((options.points, 1, 2), 0.5),
        "points_mask": torch.zeros(1, options.points, dtype=torch.bool),
        "point_labels": torch.ones(options.points, 1, dtype=torch.int64),
        "boxes": torch.full((options.boxes, 1, 4), 0.5),
        "boxes_mask": torch.zeros(1, options.boxes, dtype=torch.bool),
        "box_labels": torch.ones(options.boxes, 1, dtype=torch.int64),
    }
    outputs = ("logits", "boxes", "presence", "scores", "boxes_xyxy", "memory", "hs", "prompt", "prompt_mask")
    below = {"point_labels": LABELS, "box_labels": LABELS}
    return Program("ground", Grounding(model).eval(), inputs, outputs, below=below)


def embed_pixels(model: Any, options: Sam3Options, *, upsampling: bool) -> Program:
    """Maps prompted image features to embedded pixels, from which masks are predicted; run only if a query is kept.

    Inputs: filtered_0, filtered_1, and the outputs of `ground` without hs. Outputs: pixel_embed fp32
    [1, 256, 288, 288], equal to upstream's `pixel_embed`, and logits fp32 [1, 1, 288, 288] of the semantic map.

    Args:
        model: The model.
        options: Sizes of prompts.
        upsampling: Whether the target convolves an upsampled image without materializing it.
    """
    tokens = CONTEXT_LENGTH + options.points + options.boxes + 1
    inputs = {
        "filtered_0": feature_map(LARGEST),
        "filtered_1": feature_map(MIDDLE),
        "memory": torch.zeros(SMALLEST**2, 1, CHANNELS),
        "prompt": torch.zeros(tokens, 1, CHANNELS),
        "prompt_mask": torch.zeros(1, tokens, dtype=torch.bool),
    }
    module = PixelEmbedding(model, UpsampledConvolution if upsampling else ComposedConvolution)
    return Program("embed_pixels", module.eval(), inputs, ("pixel_embed", "semantic"))


def predict_query_masks(model: Any) -> Program:
    """Maps pixel_embed and hs fp32 [1, 1, 16, 256] of any 16 queries to logits fp32 [1, 16, 288, 288] of their masks.

    Few of the 200 queries find something: 16 masks are 8 % of the multiplications of all of them.
    """
    inputs = {
        "pixel_embed": feature_map(LARGEST),
        "hs": torch.zeros(1, 1, QUERIES_AT_ONCE, CHANNELS),
    }
    return Program("mask_predictor", MaskPredictor(model).eval(), inputs, ("masks",))


def interactive_features(model: Any, *, for_video: bool) -> Program:
    """Maps trunk fp32 [1, 1024, 72, 72] to fp32 [1, 256, 72, 72], [1, 32, 288, 288] and [1, 64, 144, 144].

    For videos it also returns the features fp32 [1, 256, 72, 72] that attend to memories.
    """
    outputs = ("image_embedding", "high_res_0", "high_res_1", *(("features",) if for_video else ()))
    module = InteractiveFeatures(model, with_features=for_video).eval()
    return Program("interactive_features", module, {"trunk": trunk_features(model)}, outputs)


def trunk_features(model: Any) -> torch.Tensor:
    """Returns zeros in the shape of the trunk's features of an image model, [1, 1024, 72, 72] at full width."""
    return torch.zeros(1, model.backbone.vision_backbone.trunk.channel_list[-1], SMALLEST, SMALLEST)


def predict_masks(head: ClickHead, options: Sam3Options) -> Program:
    """Maps the outputs of `interactive_features` and one object's prompt to four masks; P = options.clicks + 3.

    Further inputs: coordinates fp32 [1, P, 2] (x, y) in pixels of the 1008x1008 image; labels int64 [1, P]: 1 for a
    positive and 0 for a negative point, 2 and 3 for a box's corners, -1 for upstream's padding point, -2 for an absent
    place; mask, logits fp32 [1, 1, 288, 288], and has_mask bool [1], whether the mask is used.

    Outputs, all fp32: mask logits [1, 4, 288, 288] (upstream's token for a single mask first, then its three for
    several), predicted IoU [1, 4] of each, and the logit [1, 1] of whether there is an object; for videos also the
    object pointer [1, 4, 256] of each mask.
    """
    places = options.clicks + CORNERS_AND_PAD
    inputs = {
        "image_embedding": feature_map(),
        **finer_maps(),
        "coordinates": torch.full((1, places, 2), 500.0),
        "labels": torch.ones(1, places, dtype=torch.int64),
        "mask": torch.zeros(1, 1, LARGEST, LARGEST),
        "has_mask": torch.ones(1, dtype=torch.bool),
    }
    outputs = ("masks", "iou", "object_score", *(("pointers",) if options.video else ()))
    return Program("predict_masks", MaskPrediction(head, with_pointers=options.video).eval(), inputs, outputs)


def object_pointers(model: Any) -> Program:
    """Maps pointers fp32 [20, B, 256] of any number of objects and times fp32 [20] to tokens and their positions.

    Each pointer becomes four tokens; both outputs are fp32 [80, B, 64].
    """
    component = COMPONENTS["object_pointers"]
    inputs = {"pointers": torch.zeros(POINTERS, 1, CHANNELS), "times": torch.zeros(POINTERS)}
    outputs = ("pointer_tokens", "pointer_pos")
    return Program(component.name, component.build(model).eval(), inputs, outputs, symbolic=component.symbolic)


def memory_attention(model: Any) -> Program:
    """Attends from a frame to M memories and P pointers of an object; inputs and output are the component's."""
    component = COMPONENTS["memory_attention"]
    tokens = POINTERS * CHANNELS // MEMORY_CHANNELS
    inputs = {
        "features": feature_map(),
        "memories": torch.zeros(MEMORIES, 1, MEMORY_CHANNELS, SMALLEST, SMALLEST),
        "ranks": torch.zeros(MEMORIES, dtype=torch.int64),
        "pointers": torch.zeros(tokens, 1, MEMORY_CHANNELS),
        "pointer_pos": torch.zeros(tokens, 1, MEMORY_CHANNELS),
    }
    return Program(
        component.name,
        component.build(model).eval(),
        inputs,
        component.outputs,
        uses_rope=True,
        symbolic=component.symbolic,
        below={"ranks": RANKS},
    )


def encode_memory(model: Any, name: str, size: int) -> Program:
    """Maps features fp32 [1, 256, 72, 72], mask logits fp32 [1, 1, S, S], object logits [1, 1] to [1, 64, 72, 72].

    S is 1152 for a tracked object and 1008 for a prompted one. The mask of a prompt itself is binarized: its logits are
    -1024 and 1024. Frames that are tracked again after a click have the mask decoder's logits.
    """
    inputs = {
        "features": feature_map(),
        "masks": torch.zeros(1, 1, size, size),
        "object_logits": torch.zeros(1, 1),
    }
    return Program(name, FrameMemory(model).eval(), inputs, ("memory",))


def mask_pointer(model: Any) -> Program:
    """Maps a frame and a mask prompt fp32 [1, 1, 1152, 1152] to a pointer fp32 [1, 256] and the object logit [1, 1]."""
    component = COMPONENTS["mask_pointer"]
    inputs = {
        "features": feature_map(),
        **finer_maps(),
        "masks": torch.zeros(1, 1, INPUT_MASK_SIZE, INPUT_MASK_SIZE),
    }
    return Program(component.name, component.build(model).eval(), inputs, component.outputs)


def feature_map(size: int = SMALLEST) -> torch.Tensor:
    """Returns zeros in the shape of a feature map, [1, 256, S, S]."""
    return torch.zeros(1, CHANNELS, size, size)


def finer_maps() -> dict[str, torch.Tensor]:
    """Returns zeros in the shapes of the two finer maps that mask decoders read."""
    return {
        "high_res_0": torch.zeros(1, CHANNELS // 8, LARGEST, LARGEST),
        "high_res_1": torch.zeros(1, CHANNELS // 4, MIDDLE, MIDDLE),
    }
