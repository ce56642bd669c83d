"""The torch modules of the whole model's entry points: the components' modules and upstream's heads, joined."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.models.sam3.components import modules
from harness.models.sam3.components.modules import clipped
from harness.models.sam3.deployed.segmentation import FilteredLevels


class ImageEncoding(nn.Module):
    """Trunk and neck, without the coarsest feature map: upstream's `SAM3VLBackbone.forward_image` drops it too.

    What comes before any prompt is part of encoding an image: the first self-attention of the fusion encoder, and what
    the pixel decoder makes of the image alone.
    """

    rows: Tensor
    columns: Tensor

    def __init__(self, model: Any, with_trunk: bool = False) -> None:
        """Takes whether the trunk's features are wanted, too."""
        super().__init__()
        neck = model.backbone.vision_backbone
        self.trunk = neck.trunk
        self.convs = nn.ModuleList(list(neck.convs)[: len(neck.convs) - model.backbone.scalp])
        self.filtered = FilteredLevels(model)
        first = model.transformer.encoder.layers[0]
        self.norm, self.self_attn = first.norm1, first.self_attn
        # A position is a row's encoding and a column's, of half the channels each; together they are 72 times as large.
        positions = _img_pos(model).unflatten(0, modules.GRID)
        self.register_buffer("rows", positions[:, :1, :, : positions.shape[-1] // 2].clone())
        self.register_buffer("columns", positions[:1, :, :, positions.shape[-1] // 2 :].clone())
        self.with_trunk = with_trunk

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Encodes [1, 3, 1008, 1008] to feature maps [1, 256, S, S], S = 288, 144, 72, and more; see `ENCODE_IMAGE`."""
        features = self.trunk(pixels)[-1]
        *finer, coarsest = [conv(features) for conv in self.convs]
        encoded = (*self.filtered(*finer), coarsest, self.attended(_tokens(coarsest)))
        return (*encoded, features) if self.with_trunk else encoded

    def attended(self, img_feats: Tensor) -> Tensor:
        """The first self-attention of upstream's `TransformerEncoderLayer.forward_pre`; [5184, B, 256] to the same."""
        normalized = self.norm(img_feats.transpose(0, 1))
        halves = (half.expand(*modules.GRID, -1, -1) for half in (self.rows, self.columns))
        queries = normalized + torch.cat(list(halves), dim=-1).flatten(0, 1).transpose(0, 1)
        attended: Tensor = self.self_attn(queries, queries, value=normalized)[0]
        return img_feats + attended.transpose(0, 1)


class TextEncoding(nn.Module):
    """The text encoder for several texts, one behind the other; upstream's `TextTransformer` takes each alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        language = model.backbone.language_backbone
        self.encoder, self.resizer = language.encoder, language.resizer

    def forward(self, tokens: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
        """[1, L] twice to features [L, 1, 256] and mask [1, L]; a token reads those before it in its own text."""
        places = torch.arange(tokens.shape[1])
        own = starts[0]
        read = (places[:, None] >= places) & (own[:, None] == own)
        mask = torch.zeros(read.shape).masked_fill(~read, -torch.inf)
        encoder: Any = self.encoder
        table, positions = encoder.token_embedding, encoder.positional_embedding
        features = table(clipped(tokens, table.weight))
        features = features + F.embedding(clipped(places - starts, positions), positions)
        features = encoder.ln_final(encoder.transformer(features, attn_mask=mask))
        return self.resizer(features.transpose(0, 1)), tokens == 0


class Grounding(nn.Module):
    """What follows the encoders, up to the masks, in the order of upstream's `Sam3Image.forward_grounding`."""

    img_pos: Tensor

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.heads = model
        self.geometry = modules.GeometryEncoder(model.geometry_encoder)
        self.layers: Any = model.transformer.encoder.layers
        self.decoder = modules.TransformerDecoder(model.transformer.decoder)
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
        """Grounds a prompt; `harness.models.sam3.deployed.entry_points.grounding.GROUND` has the shapes."""
        encoder: Any = self.geometry.encoder
        img_feats, labels = _tokens(fpn_2), encoder.label_embed.weight
        geometry, geometry_mask = self.geometry(
            points,
            points_mask,
            clipped(point_labels, labels),
            boxes,
            boxes_mask,
            clipped(box_labels, labels),
            img_feats,
            self.img_pos,
        )
        prompt = torch.cat([text_features, geometry], dim=0)
        prompt_mask = torch.cat([text_mask, geometry_mask], dim=1)
        memory = self._memory(attended, prompt, prompt_mask)
        hs, reference_boxes, presence, _ = self.decoder(memory, self.img_pos, prompt, prompt_mask)
        out: dict[str, Tensor] = {}
        # Only the last layer's scores and boxes are ever used in inference.
        self.heads._update_scores_and_boxes(
            out, hs[-1:], reference_boxes[-1:], prompt, prompt_mask, dec_presence_out=presence[-1:]
        )
        # As Sam3Processor scores them.
        scores = out["pred_logits"].sigmoid().squeeze(-1) * out["presence_logit_dec"].sigmoid()
        return (
            out["pred_logits"],
            out["pred_boxes"],
            out["presence_logit_dec"],
            scores,
            out["pred_boxes_xyxy"],
            memory,
            hs[-1:],
            prompt,
            prompt_mask,
        )

    def _memory(self, attended: Tensor, prompt: Tensor, prompt_mask: Tensor) -> Tensor:
        """The fusion encoder behind its first self-attention; [5184, B, 256] to the same."""
        tokens, prompt, img_pos = attended.transpose(0, 1), prompt.transpose(0, 1), self.img_pos.transpose(0, 1)
        first, *others = self.layers
        # The rest of upstream's `TransformerEncoderLayer.forward_pre`.
        read = first.cross_attn_image(first.norm2(tokens), prompt, prompt, key_padding_mask=prompt_mask)[0]
        tokens = tokens + read
        tokens = tokens + first.linear2(first.activation(first.linear1(first.norm3(tokens))))
        for layer in others:
            tokens = layer(tgt=tokens, memory=prompt, memory_key_padding_mask=prompt_mask, query_pos=img_pos)
        memory: Tensor = tokens.transpose(0, 1)
        return memory


def _img_pos(model: Any) -> Tensor:
    """The position encoding [5184, 1, 256] of the coarsest feature map that is kept."""
    encoding: Tensor = model.backbone.vision_backbone.position_encoding(torch.zeros(1, 1, *modules.GRID))
    return _tokens(encoding)


def _tokens(features: Tensor) -> Tensor:
    """Reshapes [B, C, H, W] to [H·W, B, C]."""
    return features.flatten(2).permute(2, 0, 1)
