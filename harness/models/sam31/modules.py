"""Defines the torch modules of SAM 3.1's components, as `harness.models.sam3.components.modules` does for SAM 3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harness.models.sam3.components.modules import clip_indices, flatten_grid
from harness.models.sam3.components.tracker_modules import predict_masks
from harness.models.sam31.multiplex import mask_channels
from harness.runtime.sam3.video.slots import SLOTS

PRESENT, ABSENT = 10.0, -10.0
"""Object logits of given masks."""


def tracker_of(model: Any) -> Any:
    """Returns the tracker of SAM 3.1."""
    return model.tracker["model"]


def _blend(pointers: Tensor, present: Tensor, no_object: nn.Module) -> Tensor:
    """Returns pointers [..., 256], those of absent objects projected; `present` is bool [..., 1]."""
    return torch.where(present, pointers, no_object(pointers))


class ClickFeatures(nn.Module):
    """The neck for clicks, with the convolutions of the mask decoder that depend on the image alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        tracker = tracker_of(model)
        self.levels = model.detector.backbone.vision_backbone.interactive_convs
        self.decoder = tracker.interactive_sam_mask_decoder
        self.no_memory = tracker.interactivity_no_mem_embed

    def forward(self, trunk: Tensor) -> tuple[Tensor, ...]:
        """Maps [1, 1024, 72, 72] to [1, 32, 288, 288], [1, 64, 144, 144] and, without memory, [1, 256, 72, 72]."""
        finest, finer, image = (level(trunk) for level in self.levels)
        return self.decoder.conv_s0(finest), self.decoder.conv_s1(finer), image + self.no_memory.view(1, -1, 1, 1)


class PropagationFeatures(nn.Module):
    """The neck for propagation, with the convolutions of the mask decoder that depend on the image alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.levels = model.detector.backbone.vision_backbone.propagation_convs
        self.decoder = tracker_of(model).sam_mask_decoder

    def forward(self, trunk: Tensor) -> tuple[Tensor, ...]:
        """Maps [1, 1024, 72, 72] to [1, 32, 288, 288], [1, 64, 144, 144] and, for memories, [1, 256, 72, 72]."""
        finest, finer, features = (level(trunk) for level in self.levels)
        return self.decoder.conv_s0(finest), self.decoder.conv_s1(finer), features


class TriNeckFeatures(nn.Module):
    """The three necks."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.detector = model.detector.backbone.vision_backbone.convs
        self.clicks = ClickFeatures(model)
        self.propagation = PropagationFeatures(model)

    def forward(self, trunk: Tensor) -> tuple[Tensor, ...]:
        """Maps [1, 1024, 72, 72] to nine feature maps.

        Returns:
            The detector's [1, 256, S, S] for S = 288, 144, 72; those of `ClickFeatures` and `PropagationFeatures`.
        """
        return (*(level(trunk) for level in self.detector), *self.clicks(trunk), *self.propagation(trunk))


class ClickPointer(nn.Module):
    """The projection of mask tokens to object pointers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        tracker = tracker_of(model)
        self.obj_ptr_proj = tracker.interactive_obj_ptr_proj
        self.no_object = tracker.no_obj_ptr_linear

    def forward(self, tokens: Tensor, object_logits: Tensor) -> Tensor:
        """Maps tokens [B, 4, 256] and object logits [B, 1] to a pointer of each mask, [B, 4, 256]."""
        return _blend(self.obj_ptr_proj(tokens), (object_logits > 0)[:, None], self.no_object)


class ClickMaskDecoder(nn.Module):
    """SAM 3's decoder of image and prompt to masks with predicted IoU, and the object pointer of each mask token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        tracker = tracker_of(model)
        self.decoder = tracker.interactive_sam_mask_decoder
        self.positions = tracker.interactive_sam_prompt_encoder.pe_layer
        self.pointer = ClickPointer(model)

    def forward(
        self, image_embed: Tensor, high_res_0: Tensor, high_res_1: Tensor, sparse: Tensor, dense: Tensor
    ) -> tuple[Tensor, ...]:
        """Decodes an image [1 or B, 256, 72, 72], its finer maps, and prompts [B, N, 256] and [B, 256, 72, 72].

        Returns:
            Four masks [B, 4, 288, 288], the first for prompts of several clicks; their IoU [B, 4]; object logits
            [B, 1]; and a pointer of each mask, [B, 4, 256].
        """
        masks, ious, tokens, object_logits = predict_masks(
            self.decoder, self.positions, image_embed, high_res_0, high_res_1, sparse, dense
        )
        return masks, ious, object_logits, self.pointer(tokens, object_logits)


class ClickMaskPointer(nn.Module):
    """The encoder of a mask prompt to an object pointer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        tracker = tracker_of(model)
        self.downsample = tracker.interactive_mask_downsample
        self.encoder = tracker.interactive_sam_prompt_encoder
        self.decoder = ClickMaskDecoder(model)

    def forward(self, image_embed: Tensor, high_res_0: Tensor, high_res_1: Tensor, masks: Tensor) -> tuple[Tensor, ...]:
        """Maps one image and masks [B, 1, 1152, 1152] of 0 and 1 to pointers [B, 256] and object logits [B, 1]."""
        objects = len(masks)
        no_points = masks.new_zeros(objects, 1, 2), -torch.ones(objects, 1, dtype=torch.int32, device=masks.device)
        sparse, dense = self.encoder(points=no_points, boxes=None, masks=self.downsample(masks))
        *_, pointers = self.decoder(image_embed, high_res_0, high_res_1, sparse, dense)
        present = (masks.flatten(1) > 0).any(dim=1, keepdim=True)
        object_logits = torch.where(present, PRESENT, ABSENT)
        return _blend(pointers[:, 0], present, self.decoder.pointer.no_object), object_logits


class MultiplexMaskDecoder(nn.Module):
    """The decoder of conditioned frames to masks with predicted IoU and pointers of the objects of each bucket."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        tracker = tracker_of(model)
        self.decoder = tracker.sam_mask_decoder
        self.positions = tracker.image_pe_layer
        self.obj_ptr_proj = tracker.obj_ptr_proj
        self.no_object = tracker.no_obj_ptr_linear
        self.valid_embed = tracker.output_valid_embed
        self.invalid_embed = tracker.output_invalid_embed

    def forward(self, conditioned: Tensor, high_res_0: Tensor, high_res_1: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        """Decodes frames [B, 256, 72, 72], their finer maps, and where slots have objects: fp32 [B, 16] of 0 and 1.

        Returns:
            Masks [B, 16, 3, 288, 288], their IoU [B, 16, 3], object logits [B, 16, 1], pointers [B, 16, 3, 256].
        """
        filled = valid.unsqueeze(-1)
        slots = filled * self.valid_embed + (1 - filled) * self.invalid_embed
        positions = self.positions(tuple(conditioned.shape[-2:])).unsqueeze(0)
        masks, ious, tokens, object_logits = self.decoder(conditioned, positions, high_res_0, high_res_1, slots)
        pointers = _blend(self.obj_ptr_proj(tokens), (object_logits > 0).unsqueeze(2), self.no_object)
        return masks, ious, object_logits, pointers


class MultiplexMemoryEncoder(nn.Module):
    """The encoder of a frame and the masks of the objects of each bucket to memories."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        tracker = tracker_of(model)
        self.encoder = tracker.maskmem_backbone
        self.no_object = tracker.no_obj_embed_spatial

    def forward(
        self, features: Tensor, masks: Tensor, object_logits: Tensor, valid: Tensor, conditioning: Tensor
    ) -> tuple[Tensor, ...]:
        """Maps [1, 256, 72, 72], logits [B, 16, S, S] and [B, 16, 1], and two [B, 16] to memories [B, 256, 72, 72].

        `valid` and `conditioning` are those of `mask_channels`.
        """
        encoded = self.encoder(features, mask_channels(masks, valid, conditioning), skip_mask_sigmoid=True)
        present = (object_logits > 0).float() * valid.unsqueeze(-1)
        absent = ((1 - present) * self.no_object).sum(dim=1)
        return (encoded["vision_features"] + absent[:, :, None, None],)


class MultiplexPointers(nn.Module):
    """The encoder of object pointers and their ages to keys of memory attention."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.obj_ptr_tpos_proj = tracker_of(model).obj_ptr_tpos_proj

    def forward(self, pointers: Tensor, times: Tensor) -> tuple[Tensor, ...]:
        """Maps pointers [P, B, 16, 256] and times [P] to tokens [16·P, B, 256] and their positions [16·P, 1, 256]."""
        from sam3.model.sam3_tracker_utils import get_1d_sine_pe

        positions = self.obj_ptr_tpos_proj(get_1d_sine_pe(times, dim=pointers.shape[-1]))
        return pointers.transpose(1, 2).flatten(0, 1), positions.repeat_interleave(SLOTS, dim=0).unsqueeze(1)


class MultiplexMemoryAttention(nn.Module):
    """The attention of a frame to itself and to the memories and pointers of each bucket."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        tracker = tracker_of(model)
        self.encoder = tracker.transformer.encoder
        self.maskmem_tpos_enc = tracker.maskmem_tpos_enc
        self.positions = model.detector.backbone.vision_backbone.position_encoding

    def forward(
        self,
        features: Tensor,
        memory_features: Tensor,
        memories: Tensor,
        ranks: Tensor,
        pointers: Tensor,
        pointer_pos: Tensor,
        present: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Conditions a frame on M memories, which have the features of their frames, and on pointers.

        Args:
            features: The frame, [1, 256, 72, 72].
            memory_features: The frames of the memories, [M, 256, 72, 72].
            memories: [M, B, 256, 72, 72].
            ranks: Row of each memory in the table of temporal positions, int64 [M].
            pointers: [16·P, B, 256].
            pointer_pos: [16·P, 1, 256].
            present: The keys that are not padding, bool [5184·M + 16·P]; None where none is.

        Returns:
            The conditioned frame of each bucket, [B, 256, 72, 72].
        """
        times = self.maskmem_tpos_enc[clip_indices(ranks, self.maskmem_tpos_enc)]
        positions = flatten_grid(self.positions(features))
        memory_pos = (positions + times).flatten(0, 1).squeeze(1).unsqueeze(0)
        attended = self.encoder(
            frame=features.flatten(2).transpose(1, 2),
            frame_positions=positions.transpose(0, 1),
            memory_frames=memory_features.flatten(2).transpose(1, 2).flatten(0, 1).unsqueeze(0),
            memory_positions=memory_pos,
            memories=memories.flatten(3).permute(1, 0, 3, 2).flatten(1, 2),
            pointers=pointers.transpose(0, 1),
            pointer_positions=pointer_pos.transpose(0, 1),
            present=present,
        )
        return (attended.transpose(1, 2).unflatten(2, tuple(features.shape[-2:])),)
