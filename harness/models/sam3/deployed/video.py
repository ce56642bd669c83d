"""The torch modules of video tracking that are not components; each sees one frame and one object."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harness.models.sam3.components.tracker_modules import MemoryEncoder, TrackingFeatures


class VideoFeatures(nn.Module):
    """The tracker's features of a frame: for prompts, which read no memories, and for what attends to memories."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tracking = TrackingFeatures(model)

    def forward(self, trunk: Tensor) -> tuple[Tensor, ...]:
        """[1, 1024, 72, 72] to [1, 256, 72, 72], [1, 32, 288, 288], [1, 64, 144, 144] and [1, 256, 72, 72]."""
        first, second, features, embedding = self.tracking(trunk)
        return embedding, first, second, features


class MemoryOfFrame(nn.Module):
    """A frame and the mask of an object in it, as a memory."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = MemoryEncoder(model)

    def forward(self, features: Tensor, masks: Tensor, object_logits: Tensor) -> tuple[Tensor, ...]:
        """[1, 256, 72, 72], logits [1, 1, S, S] and [1, 1] to [1, 64, 72, 72].

        The masks of prompts, which upstream decides, come decided: the sigmoid of -1024 and 1024 is 0 and 1.
        """
        memory: tuple[Tensor, ...] = self.encoder(features, masks, object_logits, torch.tensor([False]))
        return memory
