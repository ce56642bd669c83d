"""The decoder: object queries to hidden states, refined boxes and presence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.models.sam3.components.component import EVERY_PRECISION, Arguments, Component

if TYPE_CHECKING:
    import torch

    from harness.models.sam3.capture import Activations


def build(model: Any) -> torch.nn.Module:
    """Shapes as in `harness.models.sam3.components.modules.TransformerDecoder`."""
    from harness.models.sam3.components.modules import TransformerDecoder

    return TransformerDecoder(model.transformer.decoder)


def samples(activations: Activations) -> dict[str, Arguments]:
    """Text, point and box together."""
    return {
        "text_point_box": {
            "memory": activations.memory,
            "img_pos": activations.img_pos,
            "prompt": activations.prompt,
            "prompt_mask": activations.prompt_mask,
        }
    }


TRANSFORMER_DECODER = Component(
    name="transformer_decoder",
    summary="hidden states, refined boxes, presence logits",
    inputs=("memory", "img_pos", "prompt", "prompt_mask"),
    outputs=("hs", "reference_boxes", "presence_logits", "presence_feats"),
    build=build,
    samples=samples,
    emulated=EVERY_PRECISION,
)
