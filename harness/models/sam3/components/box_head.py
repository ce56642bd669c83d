"""The box head: hidden states and reference boxes to boxes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.models.sam3.components.component import EVERY_PRECISION, Arguments, Component

if TYPE_CHECKING:
    import torch

    from harness.models.sam3.capture import Activations


def build(model: Any) -> torch.nn.Module:
    """Shapes as in `harness.models.sam3.components.modules.BoxHead`."""
    from harness.models.sam3.components.modules import BoxHead

    return BoxHead(model.transformer.decoder.bbox_embed)


def samples(activations: Activations) -> dict[str, Arguments]:
    """Text, point and box together."""
    return {"text_point_box": {"hs": activations.hs, "reference_boxes": activations.reference_boxes}}


BOX_HEAD = Component(
    name="box_head",
    summary="hidden states and reference boxes to boxes",
    inputs=("hs", "reference_boxes"),
    outputs=("boxes", "boxes_xyxy"),
    build=build,
    samples=samples,
    emulated=EVERY_PRECISION,
)
