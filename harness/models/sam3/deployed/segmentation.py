"""Defines the torch modules of the segmentation head, which separate the parts that do not depend on the prompt.

The pixel decoder convolves the sum of a level of the image and its own result so far, upsampled to the level's size. A
convolution is linear, so each summand can be convolved alone. The level's convolution belongs to the encoding of an
image, because it is the same for every prompt. The upsampled summand takes fewer products, because its pixels are equal
two by two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.compiler.lowering.groups import copy_notes
from harness.models.sam3.components.modules import GRID

DECODED_LEVELS = 2
"""Levels of the image that the pixel decoder adds; upstream never reads the decoder's third convolution."""


class UpsampledConvolution(nn.Module):
    """A 3 × 3 convolution, without bias, of an image upsampled to twice its size by nearest neighbours."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        """Takes the weight [O, C, 3, 3]."""
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, image: Tensor) -> Tensor:
        """Maps [B, C, H, W] to [B, O, 2H, 2W]."""
        return F.conv2d(F.interpolate(image, scale_factor=2.0, mode="nearest"), self.weight, padding=1)


class ComposedConvolution(nn.Module):
    """An `UpsampledConvolution` composed of 1 × 1 convolutions, for targets that have no kernel for the upsampled one.

    In one dimension, with weights w₀, w₁, w₂ and differences dᵢ = xᵢ - xᵢ₋₁ of neighbours (0 outside), the outputs 2i
    and 2i + 1 are Σw · xᵢ - w₀ · dᵢ and Σw · xᵢ + w₂ · dᵢ₊₁: three products for two outputs. In two dimensions there
    are nine for four, where a direct convolution has 36.
    """

    plain: Tensor
    vertical: Tensor
    horizontal: Tensor
    diagonal: Tensor

    def __init__(self, weight: Tensor) -> None:
        """Takes the weight [O, C, 3, 3]; each sum of it is rounded once."""
        super().__init__()
        rows = (_weights(row) for row in _weights(weight.double()))
        (upper_left, upper, upper_right), (left, middle, right), (lower_left, lower, lower_right) = rows
        matrices = {
            "plain": (middle,),
            "vertical": (upper, lower),
            "horizontal": (left, right),
            "diagonal": (upper_left, upper_right, lower_left, lower_right),
        }
        for name, parts in matrices.items():
            self.register_buffer(name, torch.cat(parts)[..., None, None].to(weight.dtype))

    def forward(self, image: Tensor) -> Tensor:
        """Maps [B, C, H, W] to [B, O, 2H, 2W]."""
        padded = F.pad(image, (1, 1, 1, 1))
        downwards = padded[:, :, 1:] - padded[:, :, :-1]
        rightwards = padded[:, :, 1:-1, 1:] - padded[:, :, 1:-1, :-1]
        diagonal = downwards[..., 1:] - downwards[..., :-1]
        middle = F.conv2d(image, self.plain)
        above, below = F.conv2d(downwards[..., 1:-1], self.vertical).chunk(2, dim=1)
        left_edges, right_edges = F.conv2d(rightwards, self.horizontal).chunk(2, dim=1)
        corners = F.conv2d(diagonal, self.diagonal).chunk(4, dim=1)
        across = left_edges[..., :-1], right_edges[..., 1:]
        rows = []
        for vertical, (left, right), lines in (
            (above[:, :, :-1], corners[:2], slice(None, -1)),
            (below[:, :, 1:], corners[2:], slice(1, None)),
        ):
            ends = left[:, :, lines, :-1], right[:, :, lines, 1:]
            rows.append(torch.stack([middle + vertical + a + b for a, b in zip(across, ends, strict=True)], dim=-1))
        return torch.stack(rows, dim=3).flatten(4).flatten(2, 3)


class PixelEmbedding(nn.Module):
    """The embedding of pixels for masks, in the order of upstream's `UniversalSegmentationHead.forward`."""

    def __init__(self, model: Any, convolution: Callable[[Tensor], nn.Module]) -> None:
        """Takes the model, and the function that makes the convolutions of upsampled images from their weights."""
        super().__init__()
        head = model.segmentation_head
        self.norm, self.cross_attend_prompt = head.cross_attn_norm, head.cross_attend_prompt
        decoder = head.pixel_decoder
        layers = list(decoder.conv_layers)[:DECODED_LEVELS]
        self.convolutions = nn.ModuleList(convolution(layer.weight.detach()) for layer in layers)
        for composed, layer in zip(self.convolutions, layers, strict=True):
            copy_notes(composed, layer)
        self.norms = nn.ModuleList(list(decoder.norms)[:DECODED_LEVELS])
        self.semantic = head.semantic_seg_head

    def forward(
        self, filtered_0: Tensor, filtered_1: Tensor, memory: Tensor, prompt: Tensor, prompt_mask: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns embedded pixels [B, 256, 288, 288] and semantic logits [B, 1, 288, 288]; see `embed_pixels`."""
        queries = self.norm(memory)
        memory = memory + self.cross_attend_prompt(queries, prompt, prompt, key_padding_mask=prompt_mask)[0]
        pixels = memory.permute(1, 2, 0).unflatten(2, GRID)
        for filtered, convolution, norm in zip((filtered_1, filtered_0), self.convolutions, self.norms, strict=True):
            pixels = F.relu(norm(filtered + convolution(pixels)))
        return pixels, self.semantic(pixels)


class ProjectedQueries(nn.Module):
    """The mask convolution after the pixel decoder, applied to queries instead of pixels.

    It is a 1 × 1 convolution, and there are far fewer queries than pixels.
    """

    def __init__(self, convolution: nn.Conv2d) -> None:
        """Takes the 1 × 1 convolution, which has a bias."""
        super().__init__()
        self.convolution = convolution
        copy_notes(self, convolution)

    def forward(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Maps [B, Q, O] to weights [B, Q, C] of the pixels [B, C, P] and a bias [B, Q, 1]."""
        bias = self.convolution.bias
        assert bias is not None
        return embeddings @ self.convolution.weight.flatten(1), embeddings @ bias[:, None]


class MaskPredictor(nn.Module):
    """The predictor of the masks of some queries."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        head = model.segmentation_head
        self.mask_embed = head.mask_predictor.mask_embed
        self.projected = ProjectedQueries(head.instance_seg_head)
        copy_notes(self, head.mask_predictor)

    def forward(self, pixel_embed: Tensor, hs: Tensor) -> tuple[Tensor]:
        """Maps embedded pixels [B, 256, 288, 288] and queries [1, B, Q, 256] to logits [B, Q, 288, 288]."""
        weights, bias = self.projected(self.mask_embed(hs[-1]))
        masks = weights @ pixel_embed.flatten(2) + bias
        return (masks.unflatten(2, pixel_embed.shape[2:]),)


def _weights(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the weights -w₀, Σw and w₂ along the third axis."""
    w_0, _, w_2 = weight.unbind(2)
    return -w_0, weight.sum(2), w_2
