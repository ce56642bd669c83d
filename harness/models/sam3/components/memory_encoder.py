"""A frame and the masks of objects in it, as memories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.models.sam3.captures import PROPAGATION
from harness.models.sam3.components.component import Arguments, Component

if TYPE_CHECKING:
    import torch

    from harness.models.sam3.tracker.propagation import Activations


def build(model: Any) -> torch.nn.Module:
    """Shapes as in `harness.models.sam3.components.tracker_modules.MemoryEncoder`."""
    from harness.models.sam3.components.tracker_modules import MemoryEncoder

    return MemoryEncoder(model)


def samples(activations: Activations) -> dict[str, Arguments]:
    """Three tracked objects, of which the second is not there; the same after clicks; masks of 1152x1152."""
    import torch

    tracked, clicked = activations.tracked, activations.clicked
    gone = torch.tensor([1.0, -1.0, 1.0]).view(-1, 1)
    # The detector's masks come as large as the encoder wants them, with an object logit of 10 or its opposite.
    large = torch.nn.functional.interpolate(tracked.masks[:2], size=(1152, 1152), mode="bilinear")
    return {
        "tracked": {
            "features": tracked.features,
            "masks": torch.where(gone[:, :, None, None] > 0, tracked.masks, -1024.0),
            "object_logits": tracked.object_logits.abs() * gone,
            "from_points": tracked.from_points,
        },
        "clicked": {
            "features": clicked.features,
            "masks": clicked.masks,
            "object_logits": clicked.object_logits,
            "from_points": clicked.from_points,
        },
        "large": {
            "features": tracked.features,
            "masks": large,
            "object_logits": torch.tensor([[10.0], [-10.0]]),
            "from_points": torch.tensor([True]),
        },
    }


MEMORY_ENCODER = Component(
    name="memory_encoder",
    summary="a frame and masks in it to memories",
    inputs=("features", "masks", "object_logits", "from_points"),
    outputs=("memory",),
    build=build,
    samples=samples,
    captured_by=PROPAGATION,
)
