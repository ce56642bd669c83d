"""The torch modules of the whole model's entry points: the components' modules and upstream's heads, joined."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harness.models.sam3.components import modules


class ImageEncoding(nn.Module):
    """Trunk and neck, without the coarsest feature map: upstream's `SAM3VLBackbone.forward_image` drops it too."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.kept = 4 - model.backbone.scalp
        self.neck = modules.Neck(model.backbone.vision_backbone)

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Encodes [1, 3, 1008, 1008] to feature maps [1, 256, S, S], S = 288, 144, 72."""
        return self.neck(pixels)[: self.kept]  # type: ignore[no-any-return]


class Grounding(nn.Module):
    """What follows the encoders, up to the masks, in the order of upstream's `Sam3Image.forward_grounding`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.heads = model
        self.geometry = modules.GeometryEncoder(model.geometry_encoder)
        self.encoder = modules.TransformerEncoder(model.transformer.encoder)
        self.decoder = modules.TransformerDecoder(model.transformer.decoder)
        encoding = model.backbone.vision_backbone.position_encoding
        self.register_buffer("img_pos", _tokens(encoding(torch.zeros(1, 1, *modules.GRID))))

    def forward(
        self,
        fpn_2: Tensor,
        text_features: Tensor,
        text_mask: Tensor,
        points: Tensor,
        points_mask: Tensor,
        point_labels: Tensor,
        boxes: Tensor,
        boxes_mask: Tensor,
        box_labels: Tensor,
    ) -> tuple[Tensor, ...]:
        """Grounds a prompt; `harness.models.sam3.deployed.entry_points.GROUND` has the shapes."""
        img_feats = _tokens(fpn_2)
        geometry, geometry_mask = self.geometry(
            points, points_mask, point_labels, boxes, boxes_mask, box_labels, img_feats, self.img_pos
        )
        prompt = torch.cat([text_features, geometry], dim=0)
        prompt_mask = torch.cat([text_mask, geometry_mask], dim=1)
        (memory,) = self.encoder(img_feats, self.img_pos, prompt, prompt_mask)
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


def _tokens(features: Tensor) -> Tensor:
    """Reshapes [B, C, H, W] to [H·W, B, C]."""
    return features.flatten(2).permute(2, 0, 1)
