"""Defines the torch modules of the whole model's entry points from the components' modules and upstream's heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.models.sam3.components import modules
from harness.models.sam3.components.modules import clip_indices, flatten_grid
from harness.models.sam3.deployed.segmentation import DECODED_LEVELS


class ImageEncoding(nn.Module):
    """Trunk and neck without the coarsest feature map, which upstream's `SAM3VLBackbone.forward_image` also drops.

    The module also computes everything that does not depend on a prompt: the first self-attention of the fusion
    encoder, and the pixel decoder's convolutions of the image.
    """

    rows: Tensor
    columns: Tensor

    def __init__(self, model: Any, with_trunk: bool = False) -> None:
        """Takes the model, and whether the trunk's features are also returned."""
        super().__init__()
        neck = model.backbone.vision_backbone
        self.trunk = neck.trunk
        self.convs = nn.ModuleList(list(neck.convs)[: len(neck.convs) - model.backbone.scalp])
        self.filters = nn.ModuleList(list(model.segmentation_head.pixel_decoder.conv_layers)[:DECODED_LEVELS])
        first_layer = model.transformer.encoder.layers[0]
        self.norm, self.self_attn = first_layer.norm1, first_layer.self_attn
        # A position encoding concatenates a row's and a column's, which separately take a 72nd of the memory.
        positions = _img_pos(model).unflatten(0, modules.GRID)
        self.register_buffer("rows", positions[:, :1, :, : positions.shape[-1] // 2].clone())
        self.register_buffer("columns", positions[:1, :, :, positions.shape[-1] // 2 :].clone())
        self.with_trunk = with_trunk

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Maps [1, 3, 1008, 1008] to feature maps [1, 256, S, S], S = 288, 144, 72, and more; see `encode_image`."""
        features = self.trunk(pixels)[-1]
        fpn_0, fpn_1, fpn_2 = [conv(features) for conv in self.convs]
        filter_1, filter_0 = self.filters
        encoded = filter_0(fpn_0), filter_1(fpn_1), fpn_2, self.attend_to_image(flatten_grid(fpn_2))
        return (*encoded, features) if self.with_trunk else encoded

    def attend_to_image(self, img_feats: Tensor) -> Tensor:
        """Computes the first self-attention of upstream's `TransformerEncoderLayer.forward_pre` on [5184, B, 256]."""
        normalized = self.norm(img_feats.transpose(0, 1))
        halves = (half.expand(*modules.GRID, -1, -1) for half in (self.rows, self.columns))
        queries = normalized + torch.cat(list(halves), dim=-1).flatten(0, 1).transpose(0, 1)
        attention: Tensor = self.self_attn(queries, queries, value=normalized)[0]
        return img_feats + attention.transpose(0, 1)


class TextEncoding(nn.Module):
    """The text encoder for several concatenated texts; upstream's `TextTransformer` takes each text alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        language = model.backbone.language_backbone
        self.encoder, self.resizer = language.encoder, language.resizer

    def forward(self, tokens: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
        """Maps two [1, L] to features [L, 1, 256] and mask [1, L]; a token attends to earlier ones of its own text."""
        places = torch.arange(tokens.shape[1])
        text_starts = starts[0]
        attends = (places[:, None] >= places) & (text_starts[:, None] == text_starts)
        mask = torch.zeros(attends.shape).masked_fill(~attends, -torch.inf)
        encoder: Any = self.encoder
        table, positions = encoder.token_embedding, encoder.positional_embedding
        features = table(clip_indices(tokens, table.weight))
        features = features + F.embedding(clip_indices(places - starts, positions), positions)
        features = encoder.ln_final(encoder.transformer(features, attn_mask=mask))
        return self.resizer(features.transpose(0, 1)), tokens == 0


class Grounding(nn.Module):
    """The model from encoder outputs to mask inputs, in the order of upstream's `Sam3Image.forward_grounding`."""

    img_pos: Tensor

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.heads = model
        self.geometry = modules.GeometryEncoder(encoder=model.geometry_encoder)
        self.layers: Any = model.transformer.encoder.layers
        self.decoder = modules.TransformerDecoder(decoder=model.transformer.decoder)
        self.register_buffer("img_pos", _img_pos(model))

    def forward(
        self,
        fpn_2: Tensor,
        attended: Tensor,
        text_features: Tensor,
        text_mask: Tensor,
        points: Tensor,
        points_mask: Tensor,
        point_labels: Tensor,
        boxes: Tensor,
        boxes_mask: Tensor,
        box_labels: Tensor,
    ) -> tuple[Tensor, ...]:
        """Grounds a prompt; `harness.models.sam3.deployed.entry_points.ground` has the shapes."""
        encoder: Any = self.geometry.encoder
        img_feats, labels = flatten_grid(fpn_2), encoder.label_embed.weight
        geometry, geometry_mask = self.geometry(
            points,
            points_mask,
            clip_indices(point_labels, labels),
            boxes,
            boxes_mask,
            clip_indices(box_labels, labels),
            img_feats,
            self.img_pos,
        )
        prompt = torch.cat([text_features, geometry], dim=0)
        prompt_mask = torch.cat([text_mask, geometry_mask], dim=1)
        memory = self._memory(attended, prompt, prompt_mask)
        hs, reference_boxes, presence, _ = self.decoder(memory, self.img_pos, prompt, prompt_mask)
        outputs: dict[str, Tensor] = {}
        # Only the last layer's scores and boxes are ever used in inference.
        self.heads._update_scores_and_boxes(
            outputs, hs[-1:], reference_boxes[-1:], prompt, prompt_mask, dec_presence_out=presence[-1:]
        )
        # The scores of Sam3Processor.
        scores = outputs["pred_logits"].sigmoid().squeeze(-1) * outputs["presence_logit_dec"].sigmoid()
        return (
            outputs["pred_logits"],
            outputs["pred_boxes"],
            outputs["presence_logit_dec"],
            scores,
            outputs["pred_boxes_xyxy"],
            memory,
            hs[-1:],
            prompt,
            prompt_mask,
        )

    def _memory(self, attended: Tensor, prompt: Tensor, prompt_mask: Tensor) -> Tensor:
        """Computes the fusion encoder after its first self-attention on [5184, B, 256]."""
        tokens, prompt, img_pos = attended.transpose(0, 1), prompt.transpose(0, 1), self.img_pos.transpose(0, 1)
        first_layer, *later_layers = self.layers
        # The rest of upstream's `TransformerEncoderLayer.forward_pre`.
        cross_attention = first_layer.cross_attn_image(
            first_layer.norm2(tokens), prompt, prompt, key_padding_mask=prompt_mask
        )[0]
        tokens = tokens + cross_attention
        tokens = tokens + first_layer.linear2(first_layer.activation(first_layer.linear1(first_layer.norm3(tokens))))
        for layer in later_layers:
            tokens = layer(tgt=tokens, memory=prompt, memory_key_padding_mask=prompt_mask, query_pos=img_pos)
        memory: Tensor = tokens.transpose(0, 1)
        return memory


def _img_pos(model: Any) -> Tensor:
    """Returns the position encoding [5184, 1, 256] of the coarsest kept feature map."""
    encoding: Tensor = model.backbone.vision_backbone.position_encoding(torch.zeros(1, 1, *modules.GRID))
    return flatten_grid(encoding)
