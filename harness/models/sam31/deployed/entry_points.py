"""Defines the functions of the compiled SAM 3.1 that come from PyTorch: SAM 3's, with the modules of SAM 3.1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.core.case import Case
from harness.core.program import Program
from harness.core.settings import Settings
from harness.models.sam3.deployed.entry_points import detector_programs, predict_masks, trunk_features
from harness.models.sam3.deployed.interactive import ClickHead
from harness.models.sam3.deployed.options import Sam3Options
from harness.models.sam3.groups import float32_paths, note_groups
from harness.models.sam31.build import build_case
from harness.models.sam31.modules import ClickFeatures, ClickPointer, tracker_of

FLOAT32 = float32_paths("detector.", "tracker.model.interactive_sam_mask_decoder")
"""Paths of the modules that stay float32 in half precision: those of SAM 3."""


def programs(case: Case, settings: Settings, options: Sam3Options) -> Iterator[Program]:
    """Builds the model of a case and yields its entry points; to be used inside `harness.models.sam3.upstream`."""
    model = build_case(case, settings)
    note_groups(model, FLOAT32)
    yield from detector_programs(model.detector, case, options)
    if options.clicks:
        yield interactive_features(model)
        yield predict_masks(click_head(model), options)


def interactive_features(model: Any) -> Program:
    """Maps trunk fp32 [1, 1024, 72, 72] to fp32 [1, 32, 288, 288], [1, 64, 144, 144] and [1, 256, 72, 72]."""
    trunk = trunk_features(model.detector)
    outputs = ("high_res_0", "high_res_1", "image_embedding")
    return Program("interactive_features", ClickFeatures(model).eval(), {"trunk": trunk}, outputs)


def click_head(model: Any) -> ClickHead:
    """Returns the modules that answer clicks."""
    tracker = tracker_of(model)
    encoder, decoder = tracker.interactive_sam_prompt_encoder, tracker.interactive_sam_mask_decoder
    return ClickHead(encoder, decoder, ClickPointer(model))
