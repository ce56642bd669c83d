"""Defines the torch modules of the components, which wrap upstream's modules and map tensors to a tuple of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

GRID = (72, 72)
"""Tokens of the coarsest kept feature map: 1008 / 14 on each side."""


class Wrapper(nn.Module):
    """A wrapper of upstream's modules, which are given by name."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class Trunk(Wrapper):
    """The vision transformer; upstream returns a list with one feature map."""

    trunk: Any

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Maps images [B, 3, 1008, 1008] to features [B, 1024, 72, 72]."""
        return (self.trunk(image)[-1],)


class Neck(Wrapper):
    """The trunk and the neck, with SAM 2's second neck where the model has one."""

    neck: Any

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Maps images [B, 3, 1008, 1008] to four feature maps and four position encodings, twice with a SAM 2 neck."""
        return tuple(tensor for group in self.neck(image) if group is not None for tensor in group)


class TextEncoder(Wrapper):
    """The text encoder from token ids on: upstream's forward with its tokenizer bypassed."""

    encoder: Any

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Maps tokens [B, 32] int64 to features [32, B, 256] and mask [B, 32] bool, True where padded."""
        tokenizer = self.encoder.tokenizer
        self.encoder.tokenizer = lambda texts, context_length: tokens
        try:
            mask, features, _ = self.encoder([""] * tokens.shape[0], device=tokens.device)
        finally:
            self.encoder.tokenizer = tokenizer
        return features, mask


def clip_indices(indices: Tensor, table: Tensor) -> Tensor:
    """Returns row indices clamped to a table: PyTorch checks them, compiled code does not."""
    return indices.clamp(0, table.shape[0] - 1)


def flatten_grid(features: Tensor) -> Tensor:
    """Returns feature maps [B, C, H, W] as tokens [H·W, B, C]."""
    return features.flatten(2).permute(2, 0, 1)


class GeometryEncoder(Wrapper):
    """The encoder of points and boxes to prompt tokens, the CLS token last."""

    encoder: Any

    def forward(
        self,
        points: Tensor,
        points_mask: Tensor,
        point_labels: Tensor,
        boxes: Tensor,
        boxes_mask: Tensor,
        box_labels: Tensor,
        img_feats: Tensor,
        img_pos: Tensor,
    ) -> tuple[Tensor, ...]:
        """Maps N points and M boxes (shapes: `Activations`) to features [N + M + 1, B, 256], mask [B, N + M + 1]."""
        from sam3.model.geometry_encoders import Prompt

        prompt = Prompt(
            box_embeddings=boxes,
            box_mask=boxes_mask,
            box_labels=box_labels,
            point_embeddings=points,
            point_mask=points_mask,
            point_labels=point_labels,
        )
        return tuple(self.encoder(geo_prompt=prompt, img_feats=[img_feats], img_sizes=[GRID], img_pos_embeds=[img_pos]))


class TransformerEncoder(Wrapper):
    """The fusion encoder, in which image features attend to the prompt."""

    encoder: Any

    def forward(self, img_feats: Tensor, img_pos: Tensor, prompt: Tensor, prompt_mask: Tensor) -> tuple[Tensor, ...]:
        """Maps two [5184, B, 256], a prompt [P, B, 256] and its mask [B, P] bool to memory [5184, B, 256]."""
        memory = self.encoder(
            src=[img_feats],
            src_key_padding_mask=None,
            src_pos=[img_pos],
            prompt=prompt,
            prompt_pos=torch.zeros_like(prompt),
            prompt_key_padding_mask=prompt_mask,
            feat_sizes=[GRID],
        )
        return (memory["memory"],)


class TransformerDecoder(Wrapper):
    """The decoder: object queries attend to each other, the prompt and the image, and refine boxes layer by layer."""

    decoder: Any

    def forward(self, memory: Tensor, img_pos: Tensor, prompt: Tensor, prompt_mask: Tensor) -> tuple[Tensor, ...]:
        """Returns hidden states [L, B, 200, 256], boxes [L, B, 200, 4], presence [L, B, 1], features [1, B, 256]."""
        batch = memory.shape[1]
        hs, reference_boxes, presence_logits, presence_feats = self.decoder(
            tgt=self.decoder.query_embed.weight.unsqueeze(1).repeat(1, batch, 1),
            memory=memory,
            memory_key_padding_mask=None,
            pos=img_pos,
            reference_boxes=None,
            level_start_index=torch.zeros(1, dtype=torch.long),
            spatial_shapes=torch.tensor([GRID]),
            valid_ratios=torch.ones(batch, 1, 2),
            tgt_mask=None,
            memory_text=prompt,
            text_attention_mask=prompt_mask,
            apply_dac=False,
        )
        return hs.transpose(1, 2), reference_boxes.transpose(1, 2), presence_logits.transpose(1, 2), presence_feats


class ScoringHead(Wrapper):
    """The head that multiplies each query with the pooled prompt."""

    scoring: Any

    def forward(self, hs: Tensor, prompt: Tensor, prompt_mask: Tensor) -> tuple[Tensor, ...]:
        """Maps [L, B, 200, 256], [P, B, 256] and [B, P] to logits [L, B, 200, 1]."""
        return (self.scoring(hs, prompt, prompt_mask),)


class BoxHead(Wrapper):
    """The head that refines reference boxes by hidden states, as upstream's `_update_scores_and_boxes`."""

    bbox_embed: Any

    def forward(self, hs: Tensor, reference_boxes: Tensor) -> tuple[Tensor, ...]:
        """Maps [L, B, 200, 256] and [L, B, 200, 4] to boxes [L, B, 200, 4] as (cx, cy, w, h) and (x0, y0, x1, y1)."""
        from sam3.model.box_ops import box_cxcywh_to_xyxy
        from sam3.model.model_misc import inverse_sigmoid

        boxes = (inverse_sigmoid(reference_boxes) + self.bbox_embed(hs)).sigmoid()
        return boxes, box_cxcywh_to_xyxy(boxes)


class SegmentationHead(Wrapper):
    """The pixel decoder with instance masks and the semantic map."""

    head: Any

    def forward(
        self, fpn_0: Tensor, fpn_1: Tensor, memory: Tensor, hs: Tensor, prompt: Tensor, prompt_mask: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns masks [B, 200, 288, 288] and a semantic map [B, 1, 288, 288], both logits.

        Upstream replaces the coarsest feature map by the encoder's memory and reads only its shape.
        """
        coarsest = memory.permute(1, 2, 0).unflatten(2, GRID)
        out = self.head(
            backbone_feats=[fpn_0, fpn_1, coarsest],
            obj_queries=hs,
            image_ids=torch.zeros(1, dtype=torch.long),
            encoder_hidden_states=memory,
            prompt=prompt,
            prompt_mask=prompt_mask,
        )
        return out["pred_masks"], out["semantic_seg"]
