"""The torch modules of video tracking that are not components; each sees one frame and one object."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harness.models.sam3.components.tracker_modules import MemoryEncoder, TrackingFeatures, tracker_of
from harness.models.sam3.deployed.interactive import MaskPrediction


class VideoFeatures(nn.Module):
    """The tracker's features of a frame: for prompts, which read no memories, and for what attends to memories."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tracking = TrackingFeatures(model)

    def forward(self, trunk: Tensor) -> tuple[Tensor, ...]:
        """[1, 1024, 72, 72] to [1, 256, 72, 72], [1, 32, 288, 288], [1, 64, 144, 144] and [1, 256, 72, 72]."""
        first, second, features, embedding = self.tracking(trunk)
        return embedding, first, second, features


class PointedMaskPrediction(MaskPrediction):
    """`MaskPrediction` with the object pointer that each mask token becomes."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        tracker = tracker_of(model)
        self.obj_ptr_proj = tracker.obj_ptr_proj
        self.no_obj_ptr = tracker.no_obj_ptr

    def forward(
        self,
        image_embedding: Tensor,
        high_res_0: Tensor,
        high_res_1: Tensor,
        coordinates: Tensor,
        labels: Tensor,
        mask: Tensor,
        has_mask: Tensor,
    ) -> tuple[Tensor, ...]:
        """Shapes as in `harness.models.sam3.deployed.entry_points.POINTED_MASKS`."""
        masks, iou, tokens, object_score = self.predicted(
            image_embedding, high_res_0, high_res_1, coordinates, labels, mask, has_mask
        )
        # As the end of Sam3TrackerBase._forward_sam_heads, for every token.
        present = (object_score > 0).float()[:, None]
        pointers = present * self.obj_ptr_proj(tokens) + (1 - present) * self.no_obj_ptr
        return masks, iou, object_score, pointers


class MemoryOfFrame(nn.Module):
    """A frame and the mask of an object in it, as a memory."""

    def __init__(self, model: Any, prompted: bool) -> None:
        """Takes whether masks come from prompts; these are decided before they are encoded."""
        super().__init__()
        self.encoder = MemoryEncoder(model)
        self.prompted = prompted

    def forward(self, features: Tensor, masks: Tensor, object_logits: Tensor) -> tuple[Tensor, ...]:
        """[1, 256, 72, 72], logits [1, 1, S, S] and [1, 1] to [1, 64, 72, 72]."""
        prompted: tuple[Tensor, ...] = self.encoder(features, masks, object_logits, torch.tensor([self.prompted]))
        return prompted
