"""The scoring head: hidden states against the pooled prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.models.sam3.components.component import EVERY_PRECISION, Arguments, Component

if TYPE_CHECKING:
    import torch

    from harness.models.sam3.capture import Activations


def build(model: Any) -> torch.nn.Module:
    """Shapes as in `harness.models.sam3.components.modules.ScoringHead`."""
    from harness.models.sam3.components.modules import ScoringHead

    return ScoringHead(model.dot_prod_scoring)


def samples(activations: Activations) -> dict[str, Arguments]:
    """Text, point and box together."""
    return {
        "text_point_box": {
            "hs": activations.hs,
            "prompt": activations.prompt,
            "prompt_mask": activations.prompt_mask,
        }
    }


SCORING_HEAD = Component(
    name="scoring_head",
    summary="dot product of each query with the pooled prompt",
    inputs=("hs", "prompt", "prompt_mask"),
    outputs=("logits",),
    build=build,
    samples=samples,
    emulated=EVERY_PRECISION,
)
