"""A mask that is given, as an object pointer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.models.sam3.captures import PROPAGATION
from harness.models.sam3.components.component import Arguments, Component

if TYPE_CHECKING:
    import torch

    from harness.models.sam3.tracker.propagation import Activations


def build(model: Any) -> torch.nn.Module:
    """Shapes as in `harness.models.sam3.components.tracker_modules.MaskPointer`."""
    from harness.models.sam3.components.tracker_modules import MaskPointer

    return MaskPointer(model)


def samples(activations: Activations) -> dict[str, Arguments]:
    """The moving object of the clip, and an object that is not there."""
    import torch

    given = activations.given
    frame = {"features": given.features, "high_res_0": given.high_res_0, "high_res_1": given.high_res_1}
    return {"present_absent": {**frame, "masks": torch.cat([given.masks, torch.zeros_like(given.masks)])}}


MASK_POINTER = Component(
    name="mask_pointer",
    summary="a given mask to an object pointer",
    inputs=("features", "high_res_0", "high_res_1", "masks"),
    outputs=("pointers", "object_logits"),
    build=build,
    samples=samples,
    captured_by=PROPAGATION,
)
