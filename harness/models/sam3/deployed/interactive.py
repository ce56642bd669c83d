"""Defines the torch modules of clicks and videos, which answer prompts like upstream's `predict_inst`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.models.sam3.components.tracker_modules import MemoryEncoder, ObjectPointer, TrackingFeatures, tracker_of
from harness.models.sam3.patches.patch import replaced
from harness.runtime.sam3.interactive import ABSENT


class InteractiveFeatures(nn.Module):
    """The tracker's features of an image without earlier frames, which `predict_inst` reads."""

    def __init__(self, model: Any, with_features: bool = False) -> None:
        """Takes the model, and whether the features that attend to memories are also returned."""
        super().__init__()
        self.tracking = TrackingFeatures(model)
        self.with_features = with_features

    def forward(self, trunk: Tensor) -> tuple[Tensor, ...]:
        """Maps [1, 1024, 72, 72] to [1, 256, 72, 72], [1, 32, 288, 288], [1, 64, 144, 144], maybe [1, 256, 72, 72]."""
        high_res_0, high_res_1, features, embedding = self.tracking(trunk)
        outputs = embedding, high_res_0, high_res_1
        return (*outputs, features) if self.with_features else outputs


@dataclass(frozen=True)
class ClickHead:
    """The modules that answer clicks on encoded images.

    Attributes:
        prompt_encoder: Upstream's `PromptEncoder`.
        mask_decoder: Upstream's `MaskDecoder`.
        pointer: Maps mask tokens and object logits to object pointers, as `ObjectPointer` does.
    """

    prompt_encoder: Any
    mask_decoder: Any
    pointer: nn.Module


def click_head(model: Any) -> ClickHead:
    """Returns the modules of SAM 3's tracker that answer clicks."""
    tracker = tracker_of(model)
    return ClickHead(tracker.sam_prompt_encoder, tracker.sam_mask_decoder, ObjectPointer(model))


class MaskPrediction(nn.Module):
    """Prompt encoder and mask decoder for prompts of a fixed number of places, some of which may be absent.

    An absent place is masked out of every attention, so that the result is that of the shorter prompt.
    """

    def __init__(self, head: ClickHead, with_pointers: bool = False) -> None:
        """Takes the modules, and whether the object pointer of each mask is also returned."""
        super().__init__()
        self.prompt_encoder = head.prompt_encoder
        self.decoder = head.mask_decoder
        self.register_buffer("image_pe", head.prompt_encoder.get_dense_pe())
        self.pointer = head.pointer if with_pointers else None

    def forward(
        self,
        image_embedding: Tensor,
        high_res_0: Tensor,
        high_res_1: Tensor,
        coordinates: Tensor,
        labels: Tensor,
        mask: Tensor,
        has_mask: Tensor,
    ) -> tuple[Tensor, ...]:
        """Predicts masks; `predict_masks` of the entry points has the shapes."""
        encoder, decoder = self.prompt_encoder, self.decoder
        sparse = encoder._embed_points(coordinates, labels, pad=False)
        no_mask = encoder.no_mask_embed.weight.reshape(1, -1, 1, 1)
        dense = torch.where(has_mask[:, None, None, None], encoder._embed_masks(mask), no_mask)
        # The decoder's own tokens come first, and none of them is absent.
        decoder_tokens = decoder.num_mask_tokens + 2
        present = F.pad(labels != ABSENT, (decoder_tokens, 0), value=True)
        with _without_absent_keys(present[:, None, None, :]):
            masks, iou, tokens, object_score = decoder.predict_masks(
                image_embeddings=image_embedding,
                image_pe=self.image_pe,
                sparse_prompt_embeddings=sparse,
                dense_prompt_embeddings=dense,
                repeat_image=True,
                high_res_features=[high_res_0, high_res_1],
            )
        outputs = masks, iou, object_score
        return outputs if self.pointer is None else (*outputs, self.pointer(tokens, object_score))


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


@contextmanager
def _without_absent_keys(present: Tensor) -> Iterator[None]:
    """Masks absent keys out of upstream's attention, where its keys are the prompt's tokens.

    Args:
        present: bool [B, 1, 1, T].
    """
    import sam3.sam.transformer

    def attention(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0) -> Tensor:
        mask = present if key.shape[-2] == present.shape[-1] else None
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout_p)

    with replaced(sam3.sam.transformer, "F", SimpleNamespace(scaled_dot_product_attention=attention)):
        yield
