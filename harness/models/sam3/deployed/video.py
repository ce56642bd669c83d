"""Defines the torch module of video tracking that is no component: the memory encoder of one frame and one object."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harness.models.sam3.components.tracker_modules import MemoryEncoder


class FrameMemory(nn.Module):
    """The encoder of a frame and the mask of an object in it to a memory."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = MemoryEncoder(model)

    def forward(self, features: Tensor, masks: Tensor, object_logits: Tensor) -> tuple[Tensor, ...]:
        """Maps [1, 256, 72, 72], logits [1, 1, S, S] and [1, 1] to [1, 64, 72, 72].

        The masks of prompts, which upstream binarizes, arrive binarized: the sigmoids of -1024 and 1024 are 0 and 1.
        """
        memory: tuple[Tensor, ...] = self.encoder(features, masks, object_logits, torch.tensor([False]))
        return memory
