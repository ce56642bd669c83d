"""Trunk and neck: image to the feature pyramid that the detector reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.models.sam3.components.component import Arguments, Component

if TYPE_CHECKING:
    import torch

    from harness.models.sam3.capture import Activations


def build(model: Any) -> torch.nn.Module:
    """Image to feature maps [B, 256, S, S] and position encodings of the same shapes, S = 288, 144, 72, 36."""
    from harness.models.sam3.components.modules import Neck

    return Neck(model.backbone.vision_backbone)


def samples(activations: Activations) -> dict[str, Arguments]:
    """The photograph."""
    return {"photograph": {"image": activations.image}}


VISION_BACKBONE = Component(
    name="vision_backbone",
    summary="trunk and neck: four feature maps, four position encodings",
    inputs=("image",),
    outputs=("fpn_0", "fpn_1", "fpn_2", "fpn_3", "pos_0", "pos_1", "pos_2", "pos_3"),
    build=build,
    samples=samples,
    uses_rope=True,
)
