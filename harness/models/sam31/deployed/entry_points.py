"""Defines the functions of the compiled SAM 3.1 that come from PyTorch: SAM 3's, with the modules of SAM 3.1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from harness.core.case import Case
from harness.core.program import Program
from harness.core.settings import Settings
from harness.models.sam3.deployed.entry_points import (
    CHANNELS,
    RANKS,
    SMALLEST,
    detector_programs,
    feature_map,
    finer_maps,
    predict_masks,
    trunk_features,
)
from harness.models.sam3.deployed.interactive import ClickHead
from harness.models.sam3.deployed.options import Sam3Options
from harness.models.sam3.groups import note_groups
from harness.models.sam31.build import build_case
from harness.models.sam31.deployed.tracking import TrackedObjects, VideoFeatures
from harness.models.sam31.modules import (
    ClickFeatures,
    ClickMaskPointer,
    ClickPointer,
    MultiplexMemoryEncoder,
    tracker_of,
)
from harness.runtime.sam3.video.multiplex import MEMORIES, PROPAGATION_FEATURES
from harness.runtime.sam3.video.slots import SLOTS
from harness.runtime.sam3.video.tracker import INPUT_MASK_SIZE, POINTERS, PROMPT_MASK_SIZE


def programs(case: Case, settings: Settings, options: Sam3Options) -> Iterator[Program]:
    """Builds the model of a case and yields its entry points; to be used inside `harness.models.sam3.upstream`."""
    model = build_case(case, settings)
    note_groups(model)
    yield from detector_programs(model.detector, case, options)
    if options.clicks:
        yield interactive_features(model, for_video=options.video)
        yield predict_masks(click_head(model), options)
    if options.video:
        for memories in MEMORIES:
            yield track_objects(model, memories)
        yield encode_memory(model, "encode_memory", INPUT_MASK_SIZE)
        yield encode_memory(model, "encode_predicted_memory", PROMPT_MASK_SIZE)
        yield mask_pointer(model)


def interactive_features(model: Any, *, for_video: bool) -> Program:
    """Maps trunk fp32 [1, 1024, 72, 72] to fp32 [1, 32, 288, 288], [1, 64, 144, 144] and [1, 256, 72, 72].

    For videos it also returns three maps of the same shapes for propagation.
    """
    outputs = ("high_res_0", "high_res_1", "image_embedding", *(PROPAGATION_FEATURES if for_video else ()))
    module = VideoFeatures(model) if for_video else ClickFeatures(model)
    return Program("interactive_features", module.eval(), {"trunk": trunk_features(model.detector)}, outputs)


def click_head(model: Any) -> ClickHead:
    """Returns the modules that answer clicks."""
    tracker = tracker_of(model)
    encoder, decoder = tracker.interactive_sam_prompt_encoder, tracker.interactive_sam_mask_decoder
    return ClickHead(encoder, decoder, ClickPointer(model))


def track_objects(model: Any, memories: int) -> Program:
    """Maps a frame, and the M memories and the pointers of a bucket's sixteen slots, to the masks of its objects.

    It is `track_objects_7` and `track_objects_10`, named after M. Inputs: the three maps for propagation; of the
    memories, features of their frames fp32 [M, 256, 72, 72], the memories fp32 [M, 1, 256, 72, 72], ranks int64 [M] in
    the table of temporal positions, and has_memory bool [M], False for padding; of twenty frames, pointers fp32
    [20, 1, 16, 256], times fp32 [20] and has_pointer bool [20]; and valid fp32 [1, 16], 1 where a slot has an object,
    else 0.

    Outputs, all fp32: mask logits [1, 16, 3, 288, 288], predicted IoU [1, 16, 3], the logit [1, 16, 1] of whether there
    is an object, and the object pointer [1, 16, 3, 256] of each mask.
    """
    inputs = {
        **finer_maps(),
        "features": feature_map(),
        "memory_features": torch.zeros(memories, CHANNELS, SMALLEST, SMALLEST),
        "memories": torch.zeros(memories, 1, CHANNELS, SMALLEST, SMALLEST),
        "ranks": torch.zeros(memories, dtype=torch.int64),
        "has_memory": torch.ones(memories, dtype=torch.bool),
        "pointers": torch.zeros(POINTERS, 1, SLOTS, CHANNELS),
        "times": torch.zeros(POINTERS),
        "has_pointer": torch.ones(POINTERS, dtype=torch.bool),
        "valid": torch.ones(1, SLOTS),
    }
    outputs = ("masks", "iou", "object_logits", "pointers")
    module = TrackedObjects(model).eval()
    return Program(f"track_objects_{memories}", module, inputs, outputs, uses_rope=True, below={"ranks": RANKS})


def encode_memory(model: Any, name: str, size: int) -> Program:
    """Maps features fp32 [1, 256, 72, 72] and the masks of sixteen slots to a memory fp32 [1, 256, 72, 72].

    Further inputs, fp32: mask logits [1, 16, S, S]; object logits [1, 16, 1]; valid and conditioning [1, 16], 1 where a
    slot has an object, and where its mask was given. S is 1152 for tracked objects and 1008 for prompted ones.
    """
    inputs = {
        "features": feature_map(),
        "masks": torch.zeros(1, SLOTS, size, size),
        "object_logits": torch.zeros(1, SLOTS, 1),
        "valid": torch.ones(1, SLOTS),
        "conditioning": torch.zeros(1, SLOTS),
    }
    return Program(name, MultiplexMemoryEncoder(model).eval(), inputs, ("memory",))


def mask_pointer(model: Any) -> Program:
    """Maps an image and a mask prompt fp32 [1, 1, 1152, 1152] to a pointer fp32 [1, 256] and an object logit [1, 1]."""
    inputs = {
        "image_embed": feature_map(),
        **finer_maps(),
        "masks": torch.zeros(1, 1, INPUT_MASK_SIZE, INPUT_MASK_SIZE),
    }
    return Program("mask_pointer", ClickMaskPointer(model).eval(), inputs, ("pointers", "object_logits"))
