"""Defines what SAM 3.1 computes for the sixteen objects of a bucket at once: masks, and the memory of a frame."""

from __future__ import annotations

from itertools import pairwise

import torch
from sam3.model.memory import CXBlock, SimpleFuser, SimpleMaskDownSampler, SimpleMaskEncoder
from sam3.model.position_encoding import PositionEmbeddingSine
from sam3.sam.common import LayerNorm2d
from sam3.sam.mask_decoder import MLP
from sam3.sam.transformer import TwoWayTransformer
from torch import Tensor, nn

from harness.runtime.sam3.video.slots import SLOTS
from harness.runtime.sam3.video.tracker import INPUT_MASK_SIZE

MASKS = 3
"""Masks of an object."""
CHANNELS = 256
SIGMOID_SCALE, SIGMOID_BIAS = 2.0, -1.0
"""Map the sigmoid of a mask's logits from 0…1 to -1…1 before it is encoded."""


def two_way_transformer() -> TwoWayTransformer:
    """Builds the transformer of a mask decoder, whose tokens and image attend to each other."""
    return TwoWayTransformer(depth=2, embedding_dim=CHANNELS, mlp_dim=2048, num_heads=8)


class MultiplexMaskDecoder(nn.Module):
    """The decoder of a bucket's conditioned frame to the masks of its objects; its MLPs are shared by the slots."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = two_way_transformer()
        self.obj_score_token = nn.Embedding(SLOTS, CHANNELS)
        self.iou_token = nn.Embedding(SLOTS, CHANNELS)
        self.mask_tokens = nn.Embedding(SLOTS * MASKS, CHANNELS)
        self.output_upscaling = nn.Sequential(
            nn.ConvTranspose2d(CHANNELS, CHANNELS // 4, kernel_size=2, stride=2),
            LayerNorm2d(CHANNELS // 4),
            nn.GELU(),
            nn.ConvTranspose2d(CHANNELS // 4, CHANNELS // 8, kernel_size=2, stride=2),
            nn.GELU(),
        )
        self.conv_s0 = nn.Conv2d(CHANNELS, CHANNELS // 8, kernel_size=1)
        self.conv_s1 = nn.Conv2d(CHANNELS, CHANNELS // 4, kernel_size=1)
        self.output_hypernetworks_mlps = nn.ModuleList(MLP(CHANNELS, CHANNELS, CHANNELS // 8, 3) for _ in range(MASKS))
        self.iou_prediction_head = MLP(CHANNELS, CHANNELS, MASKS, 3)
        self.pred_obj_score_head = MLP(CHANNELS, CHANNELS, 1, 3)

    def forward(
        self, features: Tensor, positions: Tensor, high_res_0: Tensor, high_res_1: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Decodes the conditioned frames of B buckets.

        Args:
            features: Conditioned frames, [B, 256, H, W].
            positions: Their positions, [1, 256, H, W].
            high_res_0: The frame's finest map after `conv_s0`, [1, 32, 4·H, 4·W].
            high_res_1: The next after `conv_s1`, [1, 64, 2·H, 2·W].
            slots: What is added to the mask tokens of each slot, [B, 16, 256].

        Returns:
            Masks [B, 16, 3, 4·H, 4·W], predicted IoU [B, 16, 3], mask tokens [B, 16, 3, 256], and object logits
            [B, 16, 1].
        """
        buckets = len(features)
        mask_tokens = self.mask_tokens.weight.view(1, SLOTS, MASKS, CHANNELS) + slots.unsqueeze(2)
        shared = torch.cat((self.obj_score_token.weight, self.iou_token.weight)).expand(buckets, -1, -1)
        tokens = torch.cat((shared, mask_tokens.flatten(1, 2)), dim=1)
        decoded, image = self.transformer(features, positions.expand(buckets, -1, -1, -1), tokens)
        object_tokens, iou_tokens, mask_tokens = decoded.split((SLOTS, SLOTS, SLOTS * MASKS), dim=1)
        mask_tokens = mask_tokens.unflatten(1, (SLOTS, MASKS))
        upscale, norm, activation, upscale_again, last_activation = self.output_upscaling
        finer = activation(norm(upscale(image.transpose(1, 2).view_as(features)) + high_res_1))
        finest = last_activation(upscale_again(finer) + high_res_0)
        kernels = torch.stack(
            [mlp(mask_tokens[:, :, number]) for number, mlp in enumerate(self.output_hypernetworks_mlps)], dim=2
        )
        masks = (kernels.flatten(1, 2) @ finest.flatten(2)).view(buckets, SLOTS, MASKS, *finest.shape[-2:])
        return masks, self.iou_prediction_head(iou_tokens), mask_tokens, self.pred_obj_score_head(object_tokens)


def mask_downsampler() -> SimpleMaskDownSampler:
    """Builds the convolutions of the 32 channels of a bucket: SAM 3's module with other channels."""
    downsampler = SimpleMaskDownSampler(
        kernel_size=3, stride=2, padding=1, interpol_size=[INPUT_MASK_SIZE, INPUT_MASK_SIZE]
    )
    channels = (2 * SLOTS, 16, 64, 256, 1024)
    for number, (before, after) in enumerate(pairwise(channels)):
        downsampler.encoder[3 * number] = nn.Conv2d(before, after, kernel_size=3, stride=2, padding=1)
        downsampler.encoder[3 * number + 1] = LayerNorm2d(after)
    downsampler.encoder[-1] = nn.Conv2d(channels[-1], CHANNELS, kernel_size=1)
    return downsampler


def memory_encoder() -> SimpleMaskEncoder:
    """Builds SAM 3's memory encoder with 32 channels of masks and memories of 256 channels."""
    return SimpleMaskEncoder(
        out_dim=CHANNELS,
        mask_downsampler=mask_downsampler(),
        fuser=SimpleFuser(CXBlock(CHANNELS), num_layers=2),
        position_encoding=PositionEmbeddingSine(num_pos_feats=CHANNELS, normalize=True),
    )


def mask_channels(masks: Tensor, valid: Tensor, conditioning: Tensor) -> Tensor:
    """Returns what the memory encoder reads of the objects of B buckets: [B, 32, S, S], zero for empty slots.

    Args:
        masks: Logits of the slots, [B, 16, S, S].
        valid: 1 where a slot has an object, else 0, [B, 16].
        conditioning: 1 where the object's mask was given on this frame, else 0, [B, 16].
    """
    foreground = torch.sigmoid(masks) * SIGMOID_SCALE + SIGMOID_BIAS
    given = conditioning[:, :, None, None].expand_as(masks)
    return torch.cat((foreground, given), dim=1) * valid.repeat(1, 2)[:, :, None, None]
