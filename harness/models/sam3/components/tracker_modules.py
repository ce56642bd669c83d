"""Defines the torch modules of the tracker's components, as `harness.models.sam3.components.modules` does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harness.models.sam3.components.modules import clip_indices, flatten_grid

LEVELS = 3
"""Feature maps that the tracker reads; the fourth and coarsest map is dropped."""
ABSENT = -1024.0
"""Logit of a pixel that certainly does not belong to the object: upstream's `NO_OBJ_SCORE`."""


def tracker_of(model: Any) -> Any:
    """Returns upstream's tracker in an interactive image model."""
    return model.inst_interactive_predictor.model


class TrackingFeatures(nn.Module):
    """The SAM 2 neck, with the convolutions of the mask decoder that depend on the image alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        tracker = tracker_of(model)
        self.levels = model.backbone.vision_backbone.sam2_convs[:LEVELS]
        self.conv_s0 = tracker.sam_mask_decoder.conv_s0
        self.conv_s1 = tracker.sam_mask_decoder.conv_s1
        self.no_mem_embed = tracker.no_mem_embed

    def forward(self, trunk: Tensor) -> tuple[Tensor, ...]:
        """Maps [1, 1024, 72, 72] to [1, 32, 288, 288], [1, 64, 144, 144] and two [1, 256, 72, 72], one memoryless."""
        finest, finer, features = (level(trunk) for level in self.levels)
        without_memory = features + self.no_mem_embed.view(1, -1, 1, 1)
        return self.conv_s0(finest), self.conv_s1(finer), features, without_memory


class PromptEncoder(nn.Module):
    """The encoder of points, corners of boxes and an optional mask to prompt tokens and a dense prompt."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, points: Tensor, labels: Tensor, masks: Tensor, has_mask: Tensor) -> tuple[Tensor, ...]:
        """Encodes prompts shaped as in `tracker.clicks.Round`; `has_mask` may have one value per object."""
        sparse, with_mask = self.encoder(points=(points, labels), boxes=None, masks=masks)
        _, without_mask = self.encoder(points=(points, labels), boxes=None, masks=None)
        return sparse, torch.where(has_mask[:, None, None, None], with_mask, without_mask)


def predict_masks(
    decoder: Any,
    positions: Any,
    image_embed: Tensor,
    high_res_0: Tensor,
    high_res_1: Tensor,
    sparse: Tensor,
    dense: Tensor,
) -> tuple[Tensor, ...]:
    """Returns what upstream's mask decoder predicts for every mask token; shapes are those of `MaskDecoder`.

    Returns:
        Masks [B, 4, 288, 288], their IoU [B, 4], mask tokens [B, 4, 256], and object logits [B, 1].
    """
    predicted: tuple[Tensor, ...] = decoder.predict_masks(
        image_embeddings=image_embed,
        image_pe=positions(tuple(image_embed.shape[-2:])).unsqueeze(0),
        sparse_prompt_embeddings=sparse,
        dense_prompt_embeddings=dense,
        repeat_image=image_embed.shape[0] != sparse.shape[0],
        high_res_features=[high_res_0, high_res_1],
    )
    return predicted


class ObjectPointer(nn.Module):
    """The projection of mask tokens to object pointers, at the end of `Sam3TrackerBase._forward_sam_heads`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        tracker = tracker_of(model)
        self.obj_ptr_proj = tracker.obj_ptr_proj
        self.no_obj_ptr = tracker.no_obj_ptr

    def forward(self, tokens: Tensor, object_logits: Tensor) -> Tensor:
        """Maps tokens [B, 4, 256] and object logits [B, 1] to a pointer of each mask, [B, 4, 256]."""
        present = (object_logits > 0).float()[:, None]
        pointers: Tensor = present * self.obj_ptr_proj(tokens) + (1 - present) * self.no_obj_ptr
        return pointers


class MaskDecoder(nn.Module):
    """The decoder of image and prompt to masks with predicted IoU, and the object pointer of each mask token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        tracker = tracker_of(model)
        self.decoder = tracker.sam_mask_decoder
        self.positions = tracker.sam_prompt_encoder.pe_layer
        self.pointer = ObjectPointer(model)

    def forward(
        self, image_embed: Tensor, high_res_0: Tensor, high_res_1: Tensor, sparse: Tensor, dense: Tensor
    ) -> tuple[Tensor, ...]:
        """Decodes an image [1 or B, 256, 72, 72], its finer maps, and prompts [B, N, 256] and [B, 256, 72, 72].

        Returns:
            Three masks [B, 3, 288, 288] and their IoU [B, 3]; the single mask [B, 1, 288, 288], which is the best of
            the three where it is not stable, and its IoU [B, 1]; object logits [B, 1]; pointers [B, 4, 256] of the
            single mask and the three others.
        """
        masks, ious, tokens, object_logits = predict_masks(
            self.decoder, self.positions, image_embed, high_res_0, high_res_1, sparse, dense
        )
        single, single_iou = self.decoder._dynamic_multimask_via_stability(masks, ious)
        pointers = self.pointer(tokens, object_logits)
        return masks[:, 1:], ious[:, 1:], single, single_iou, object_logits, pointers


class MaskPointer(nn.Module):
    """The encoder of a mask prompt to an object pointer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tracker = tracker_of(model)

    def forward(self, features: Tensor, high_res_0: Tensor, high_res_1: Tensor, masks: Tensor) -> tuple[Tensor, ...]:
        """Maps one frame and masks [B, 1, 1152, 1152] of 0 and 1 to pointers [B, 256] and object logits [B, 1]."""
        image, *finer = (feature.expand(len(masks), -1, -1, -1) for feature in (features, high_res_0, high_res_1))
        *_, pointers, object_logits = self.tracker._use_mask_as_output(image, finer, masks)
        return pointers, object_logits


class ObjectPointers(nn.Module):
    """The encoder of object pointers and their ages to keys of memory attention."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        tracker = tracker_of(model)
        self.obj_ptr_tpos_proj = tracker.obj_ptr_tpos_proj

    def forward(self, pointers: Tensor, times: Tensor) -> tuple[Tensor, ...]:
        """Maps pointers [P, B, 256] and times [P] to tokens [4·P, B, 64] and their positions of the same shape."""
        from sam3.model.sam3_tracker_utils import get_1d_sine_pe

        positions = self.obj_ptr_tpos_proj(get_1d_sine_pe(times, dim=pointers.shape[-1]))
        parts = pointers.shape[-1] // positions.shape[-1]
        tokens = pointers.unflatten(-1, (parts, -1)).transpose(1, 2).flatten(0, 1)
        repeated = positions.unsqueeze(1).expand(-1, pointers.shape[1], -1).repeat_interleave(parts, dim=0)
        return tokens, repeated


class MemoryEncoder(nn.Module):
    """The encoder of a frame and the masks of its objects to memories."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tracker = tracker_of(model)

    def forward(
        self, features: Tensor, masks: Tensor, object_logits: Tensor, from_points: Tensor
    ) -> tuple[Tensor, ...]:
        """Maps [1, 256, 72, 72], [B, 1, S, S], [B, 1] and [1] bool to memories [B, 64, 72, 72].

        Upstream binarizes masks from clicks and takes the sigmoid of others; the sigmoid of `ABSENT` is 0 and that of
        its opposite is 1.
        """
        binarized = torch.where(masks > 0, -ABSENT, ABSENT)
        memory, _ = self.tracker._encode_new_memory(
            image=None,
            current_vision_feats=[flatten_grid(features)],
            feat_sizes=[tuple(features.shape[-2:])],
            pred_masks_high_res=torch.where(from_points[:, None, None, None], binarized, masks),
            object_score_logits=object_logits,
            is_mask_from_pts=False,
        )
        return (memory,)


class MemoryAttention(nn.Module):
    """The attention of a frame to itself and to the memories and pointers of objects."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        tracker = tracker_of(model)
        self.encoder = tracker.transformer.encoder
        self.maskmem_tpos_enc = tracker.maskmem_tpos_enc
        self.frame_positions = model.backbone.vision_backbone.position_encoding
        self.memory_positions = tracker.maskmem_backbone.position_encoding

    def forward(
        self, features: Tensor, memories: Tensor, ranks: Tensor, pointers: Tensor, pointer_pos: Tensor
    ) -> tuple[Tensor, ...]:
        """Maps [1, 256, 72, 72], [M, B, 64, 72, 72], [M] and two [4·P, B, 64] to [B, 256, 72, 72].

        Memories and pointers are concatenated as in `Sam3TrackerBase._prepare_memory_conditioned_features`.
        """
        objects, grid = memories.shape[1], tuple(features.shape[-2:])
        spatial = memories.flatten(3).permute(0, 3, 1, 2).flatten(0, 1)
        times = self.maskmem_tpos_enc[clip_indices(ranks, self.maskmem_tpos_enc)]
        spatial_pos = (flatten_grid(self.memory_positions(memories[0])) + times).flatten(0, 1)
        attended = self.encoder(
            src=[flatten_grid(features).expand(-1, objects, -1)],
            src_key_padding_mask=[None],
            src_pos=[flatten_grid(self.frame_positions(features)).expand(-1, objects, -1)],
            prompt=torch.cat([spatial, pointers]),
            prompt_pos=torch.cat([spatial_pos, pointer_pos]),
            prompt_key_padding_mask=None,
            feat_sizes=[grid],
            num_obj_ptr_tokens=pointers.shape[0],
        )
        return (attended["memory"].permute(1, 2, 0).unflatten(2, grid),)
