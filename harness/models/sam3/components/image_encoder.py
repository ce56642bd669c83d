"""Trunk and both necks: what interactive use needs from an image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.models.sam3.components.component import Arguments, Component

if TYPE_CHECKING:
    import torch

    from harness.models.sam3.capture import Activations


def build(model: Any) -> torch.nn.Module:
    """As `vision_backbone`, then the same eight outputs of the SAM 2 neck; the model must be built interactive."""
    from harness.models.sam3.components.modules import Neck

    return Neck(model.backbone.vision_backbone)


def samples(activations: Activations) -> dict[str, Arguments]:
    """The photograph."""
    return {"photograph": {"image": activations.image}}


IMAGE_ENCODER = Component(
    name="image_encoder",
    summary="trunk and dual neck: SAM 3 and SAM 2 features, for interactive use",
    inputs=("image",),
    outputs=(
        "fpn_0",
        "fpn_1",
        "fpn_2",
        "fpn_3",
        "pos_0",
        "pos_1",
        "pos_2",
        "pos_3",
        "sam2_fpn_0",
        "sam2_fpn_1",
        "sam2_fpn_2",
        "sam2_fpn_3",
        "sam2_pos_0",
        "sam2_pos_1",
        "sam2_pos_2",
        "sam2_pos_3",
    ),
    build=build,
    samples=samples,
    uses_rope=True,
    with_sam2_neck=True,
)
