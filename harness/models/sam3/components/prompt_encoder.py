"""Points, boxes and masks to prompt tokens and a dense prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.models.sam3.captures import CLICKS
from harness.models.sam3.components.component import Arguments, Component

if TYPE_CHECKING:
    import torch

    from harness.models.sam3.tracker.clicks import Activations


def build(model: Any) -> torch.nn.Module:
    """Shapes as in `harness.models.sam3.tracker.clicks.Round`."""
    from harness.models.sam3.components.tracker_modules import PromptEncoder

    return PromptEncoder(model)


def samples(activations: Activations) -> dict[str, Arguments]:
    """Box, two clicks and a mask; a click; a box; three objects, one padded; four objects, some of them with a mask."""
    import torch

    rounds = {
        "refined": activations.refined,
        "click": activations.click,
        "box": activations.box,
        "objects": activations.objects,
    }
    asked: dict[str, Arguments] = {
        name: {"points": each.points, "labels": each.labels, "masks": each.masks, "has_mask": each.has_mask}
        for name, each in rounds.items()
    }
    # Some of three objects have a mask; where upstream tracks without a prompt, it puts one point of padding.
    mixed = {
        "points": torch.cat([activations.objects.points, torch.zeros(1, 2, 2)]),
        "labels": torch.cat([activations.objects.labels, -torch.ones(1, 2, dtype=torch.int32)]),
        "masks": activations.refined.masks * torch.tensor([1.0, -1.0, 0.5, 2.0]).view(-1, 1, 1, 1),
        "has_mask": torch.tensor([False, True, True, False]),
    }
    return asked | {"mixed": mixed}


PROMPT_ENCODER = Component(
    name="prompt_encoder",
    summary="points, boxes and masks to prompt tokens and a dense prompt",
    inputs=("points", "labels", "masks", "has_mask"),
    outputs=("sparse", "dense"),
    build=build,
    samples=samples,
    captured_by=CLICKS,
)
