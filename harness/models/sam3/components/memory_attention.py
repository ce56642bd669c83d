"""A frame in the light of the memories and pointers of objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.core.program import Axis
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
    """Seven memories and sixteen pointers; ten and nineteen; one of each of three objects, and of the first of them."""
    frames = {"full": activations.full, "most": activations.most, "second": activations.second}
    samples = {
        name: {
            "features": each.features,
            "memories": each.memories,
            "ranks": each.ranks,
            "pointers": each.prompt[-4 * len(each.pointers) :],
            "pointer_pos": each.prompt_pos[-4 * len(each.pointers) :],
        }
        for name, each in frames.items()
    }
    batched = samples["second"]
    first = {name: batched[name][:, :1] for name in ("memories", "pointers", "pointer_pos")}
    return {**samples, "first": {**batched, **first}}


MEMORIES = Axis("memories", 1, 16)
"""Upstream keeps up to ten."""
POINTER_TOKENS = Axis("pointer_tokens", 4, 4 * 32)
"""Four of each pointer; upstream keeps up to nineteen pointers."""


MEMORY_ATTENTION = Component(
    name="memory_attention",
    summary="a frame attends to memories and pointers",
    inputs=("features", "memories", "ranks", "pointers", "pointer_pos"),
    outputs=("conditioned",),
    build=build,
    samples=samples,
    captured_by=PROPAGATION,
    uses_rope=True,
    symbolic={
        "memories": {0: MEMORIES},
        "ranks": {0: MEMORIES},
        "pointers": {0: POINTER_TOKENS},
        "pointer_pos": {0: POINTER_TOKENS},
    },
)
