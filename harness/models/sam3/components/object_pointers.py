"""Object pointers and their age, as keys of the attention to memories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.core.program import Axis
from harness.models.sam3.captures import PROPAGATION
from harness.models.sam3.components.component import EVERY_PRECISION, Arguments, Component

if TYPE_CHECKING:
    import torch

    from harness.models.sam3.tracker.propagation import Activations


def build(model: Any) -> torch.nn.Module:
    """Shapes as in `harness.models.sam3.components.tracker_modules.ObjectPointers`."""
    from harness.models.sam3.components.tracker_modules import ObjectPointers

    return ObjectPointers(model)


def samples(activations: Activations) -> dict[str, Arguments]:
    """Sixteen pointers, nineteen, and one of each of three objects."""
    frames = {"full": activations.full, "most": activations.most, "second": activations.second}
    return {name: {"pointers": each.pointers, "times": each.times} for name, each in frames.items()}


OBJECTS = Axis("objects", 1, 1024)
"""Objects that were found on one frame, which upstream does not limit."""


OBJECT_POINTERS = Component(
    name="object_pointers",
    summary="object pointers and their age to keys and positions",
    inputs=("pointers", "times"),
    outputs=("tokens", "positions"),
    build=build,
    samples=samples,
    captured_by=PROPAGATION,
    emulated=EVERY_PRECISION,
    symbolic={"pointers": {1: OBJECTS}},
)
