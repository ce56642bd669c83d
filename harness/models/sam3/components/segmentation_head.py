"""The segmentation head: instance masks and the semantic map."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.models.sam3.components.component import EVERY_PRECISION, Arguments, Component

if TYPE_CHECKING:
    import torch

    from harness.models.sam3.capture import Activations


def build(model: Any) -> torch.nn.Module:
    """Shapes as in `harness.models.sam3.components.modules.SegmentationHead`."""
    from harness.models.sam3.components.modules import SegmentationHead

    return SegmentationHead(model.segmentation_head)


def samples(activations: Activations) -> dict[str, Arguments]:
    """Text, point and box together."""
    return {
        "text_point_box": {
            "fpn_0": activations.fpn_0,
            "fpn_1": activations.fpn_1,
            "memory": activations.memory,
            "hs": activations.hs,
            "prompt": activations.prompt,
            "prompt_mask": activations.prompt_mask,
        }
    }


SEGMENTATION_HEAD = Component(
    name="segmentation_head",
    summary="instance masks and semantic map",
    inputs=("fpn_0", "fpn_1", "memory", "hs", "prompt", "prompt_mask"),
    outputs=("pred_masks", "semantic_seg"),
    build=build,
    samples=samples,
    emulated=EVERY_PRECISION,
)
