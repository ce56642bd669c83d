"""Defines the torch modules that track the objects of a bucket, with padded memories."""

from __future__ import annotations

from typing import Any

from torch import Tensor, cat, nn

from harness.models.sam31.modules import (
    ClickFeatures,
    MultiplexMaskDecoder,
    MultiplexMemoryAttention,
    MultiplexPointers,
    PropagationFeatures,
)
from harness.runtime.sam3.video.slots import SLOTS


class VideoFeatures(nn.Module):
    """The features of an image for clicks, and those for propagation."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.clicks, self.propagation = ClickFeatures(model), PropagationFeatures(model)

    def forward(self, trunk: Tensor) -> tuple[Tensor, ...]:
        """Maps [1, 1024, 72, 72] to the maps of `ClickFeatures` and of `PropagationFeatures`."""
        return (*self.clicks(trunk), *self.propagation(trunk))


class TrackedObjects(nn.Module):
    """The masks of a bucket's objects on a frame that attends to their memories and pointers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.pointers = MultiplexPointers(model)
        self.attention = MultiplexMemoryAttention(model)
        self.decoder = MultiplexMaskDecoder(model)

    def forward(
        self,
        high_res_0: Tensor,
        high_res_1: Tensor,
        features: Tensor,
        memory_features: Tensor,
        memories: Tensor,
        ranks: Tensor,
        has_memory: Tensor,
        pointers: Tensor,
        times: Tensor,
        has_pointer: Tensor,
        valid: Tensor,
    ) -> tuple[Tensor, ...]:
        """Tracks the objects; `track_objects` of the entry points has the shapes."""
        tokens, positions = self.pointers(pointers, times)
        spatial = features.shape[-2] * features.shape[-1]
        present = cat((has_memory.repeat_interleave(spatial), has_pointer.repeat_interleave(SLOTS)))
        (conditioned,) = self.attention(features, memory_features, memories, ranks, tokens, positions, present)
        outputs: tuple[Tensor, ...] = self.decoder(conditioned, high_res_0, high_res_1, valid)
        return outputs
