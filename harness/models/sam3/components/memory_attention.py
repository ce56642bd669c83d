"""A frame in the light of the memories and pointers of objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.models.sam3.captures import PROPAGATION
from harness.models.sam3.components.component import Arguments, Component

if TYPE_CHECKING:
    import torch

    from harness.models.sam3.tracker.propagation import Activations


def build(model: Any) -> torch.nn.Module:
    """Shapes as in `harness.models.sam3.components.tracker_modules.MemoryAttention`."""
    from harness.models.sam3.components.tracker_modules import MemoryAttention

    return MemoryAttention(model)


def samples(activations: Activations) -> dict[str, Arguments]:
    """Seven memories and sixteen pointers; ten and nineteen; one of each of three objects."""
    frames = {"full": activations.full, "most": activations.most, "second": activations.second}
    return {
        name: {
            "features": each.features,
            "memories": each.memories,
            "ranks": each.ranks,
            "pointers": each.prompt[-4 * len(each.pointers) :],
            "pointer_pos": each.prompt_pos[-4 * len(each.pointers) :],
        }
        for name, each in frames.items()
    }


MEMORY_ATTENTION = Component(
    name="memory_attention",
    summary="a frame attends to memories and pointers",
    inputs=("features", "memories", "ranks", "pointers", "pointer_pos"),
    outputs=("conditioned",),
    build=build,
    samples=samples,
    captured_by=PROPAGATION,
    uses_rope=True,
)
