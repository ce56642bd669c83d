"""The SAM 2 neck: what clicks and tracking need of an image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.models.sam3.captures import CLICKS
from harness.models.sam3.components.component import Arguments, Component

if TYPE_CHECKING:
    import torch

    from harness.models.sam3.tracker.clicks import Activations


def build(model: Any) -> torch.nn.Module:
    """Shapes as in `harness.models.sam3.components.tracker_modules.TrackingFeatures`."""
    from harness.models.sam3.components.tracker_modules import TrackingFeatures

    return TrackingFeatures(model)


def samples(activations: Activations) -> dict[str, Arguments]:
    """The photograph, as the vision transformer sees it."""
    return {"photograph": {"trunk": activations.trunk}}


TRACKING_FEATURES = Component(
    name="tracking_features",
    summary="SAM 2 neck: feature maps for clicks and tracking",
    inputs=("trunk",),
    outputs=("high_res_0", "high_res_1", "features", "image_embed"),
    build=build,
    samples=samples,
    captured_by=CLICKS,
)
