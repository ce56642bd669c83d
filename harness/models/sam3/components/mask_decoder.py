"""Image and prompt to masks, their quality, and object pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.models.sam3.captures import CLICKS
from harness.models.sam3.components.component import Arguments, Component

if TYPE_CHECKING:
    import torch

    from harness.models.sam3.tracker.clicks import Activations


def build(model: Any) -> torch.nn.Module:
    """Shapes as in `harness.models.sam3.components.tracker_modules.MaskDecoder`."""
    from harness.models.sam3.components.tracker_modules import MaskDecoder

    return MaskDecoder(model)


def samples(activations: Activations) -> dict[str, Arguments]:
    """One click; a box, two clicks and a mask; three objects on one image."""
    image = {
        "image_embed": activations.image_embed,
        "high_res_0": activations.high_res_0,
        "high_res_1": activations.high_res_1,
    }
    rounds = {"click": activations.click, "refined": activations.refined, "objects": activations.objects}
    return {name: {**image, "sparse": each.sparse, "dense": each.dense} for name, each in rounds.items()}


MASK_DECODER = Component(
    name="mask_decoder",
    summary="image and prompt to masks, their quality, and object pointers",
    inputs=("image_embed", "high_res_0", "high_res_1", "sparse", "dense"),
    outputs=("masks", "ious", "single_mask", "single_iou", "object_logits", "pointers"),
    build=build,
    samples=samples,
    captured_by=CLICKS,
)
