"""The fusion encoder: image features attend to the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.core.precision import DEFAULT_PRECISION
from harness.models.sam3.components.component import Arguments, Component

if TYPE_CHECKING:
    import torch

    from harness.models.sam3.capture import Activations


def build(model: Any) -> torch.nn.Module:
    """Shapes as in `harness.models.sam3.components.modules.TransformerEncoder`."""
    from harness.models.sam3.components.modules import TransformerEncoder

    return TransformerEncoder(model.transformer.encoder)


def samples(activations: Activations) -> dict[str, Arguments]:
    """Text, point and box together."""
    return {
        "text_point_box": {
            "img_feats": activations.img_feats,
            "img_pos": activations.img_pos,
            "prompt": activations.prompt,
            "prompt_mask": activations.prompt_mask,
        }
    }


TRANSFORMER_ENCODER = Component(
    name="transformer_encoder",
    summary="fusion encoder: image features attend to the prompt",
    inputs=("img_feats", "img_pos", "prompt", "prompt_mask"),
    outputs=("memory",),
    build=build,
    samples=samples,
    emulated=(DEFAULT_PRECISION,),  # in half precision, tensor cores emulated, 215 s were measured
)
