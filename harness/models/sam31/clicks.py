"""Presents SAM 3.1's modules for clicks as the tracker that upstream's predictor of masks in images asks."""

from __future__ import annotations

from typing import Any

import torch
from sam3.model.sam3_tracker_base import Sam3TrackerBase
from torch import nn

from harness.models.sam31.architecture import LEVELS
from harness.models.sam31.modules import tracker_of
from harness.runtime.sam3.images import RESOLUTION


class ClickTracker(nn.Module):
    """The part of upstream's tracker that `SAM3InteractiveImagePredictor` reads, under SAM 3's names."""

    image_size = RESOLUTION
    num_feature_levels = LEVELS
    device = torch.device("cpu")
    _prepare_backbone_features = Sam3TrackerBase._prepare_backbone_features

    def __init__(self, model: Any) -> None:
        super().__init__()
        tracker = tracker_of(model)
        self.sam_prompt_encoder = tracker.interactive_sam_prompt_encoder
        self.sam_mask_decoder = tracker.interactive_sam_mask_decoder
        self.no_mem_embed = tracker.interactivity_no_mem_embed
