"""The trunk: image to the last feature map of the vision transformer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.models.sam3.components.component import Arguments, Component

if TYPE_CHECKING:
    import torch

    from harness.models.sam3.capture import Activations


def build(model: Any) -> torch.nn.Module:
    """Image [B, 3, 1008, 1008] to features [B, 1024, 72, 72]."""
    from harness.models.sam3.components.modules import Trunk

    return Trunk(model.backbone.vision_backbone.trunk)


def samples(activations: Activations) -> dict[str, Arguments]:
    """The photograph."""
    return {"photograph": {"image": activations.image}}


VIT = Component(
    name="vit",
    summary="vision transformer trunk: image to features",
    inputs=("image",),
    outputs=("features",),
    build=build,
    samples=samples,
    uses_rope=True,
)
