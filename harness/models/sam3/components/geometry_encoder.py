"""Points and boxes to prompt tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.models.sam3.components.component import EVERY_PRECISION, Arguments, Component

if TYPE_CHECKING:
    import torch

    from harness.models.sam3.capture import Activations


def build(model: Any) -> torch.nn.Module:
    """Shapes as in `harness.models.sam3.components.modules.GeometryEncoder`."""
    from harness.models.sam3.components.modules import GeometryEncoder

    return GeometryEncoder(model.geometry_encoder)


def samples(activations: Activations) -> dict[str, Arguments]:
    """One point and one box; nothing but the CLS token; one box; a padded batch of many."""
    import torch

    geometry = {
        "points": activations.points,
        "points_mask": activations.points_mask,
        "point_labels": activations.point_labels,
        "boxes": activations.boxes,
        "boxes_mask": activations.boxes_mask,
        "box_labels": activations.box_labels,
    }
    image = {"img_feats": activations.img_feats, "img_pos": activations.img_pos}
    empty = {
        "points": torch.zeros(0, 1, 2),
        "points_mask": torch.zeros(1, 0, dtype=torch.bool),
        "point_labels": torch.zeros(0, 1, dtype=torch.int64),
        "boxes": torch.zeros(0, 1, 4),
        "boxes_mask": torch.zeros(1, 0, dtype=torch.bool),
        "box_labels": torch.zeros(0, 1, dtype=torch.int64),
    }
    box = {key: (geometry if key.startswith("box") else empty)[key] for key in geometry}
    # Two prompts on two images: the second has fewer points and boxes, so its sequences are padded on the right.
    many = {
        "points": torch.tensor([[[0.1, 0.2], [0.9, 0.7]], [[0.5, 0.5], [0.3, 0.4]], [[0.98, 0.01], [0.0, 0.0]]]),
        "points_mask": torch.tensor([[False, False, False], [False, False, True]]),
        "point_labels": torch.tensor([[1, 1], [0, 0], [1, 0]]),
        "boxes": torch.tensor(
            [[[0.3, 0.4, 0.2, 0.3], [0.5, 0.5, 1.0, 1.0]], [[0.8, 0.2, 0.3, 0.1], [0.0, 0.0, 0.0, 0.0]]]
        ),
        "boxes_mask": torch.tensor([[False, False], [False, True]]),
        "box_labels": torch.tensor([[1, 0], [0, 0]]),
        "img_feats": torch.cat([activations.img_feats, activations.img_feats.flip(0)], dim=1),
        "img_pos": activations.img_pos.repeat(1, 2, 1),
    }
    return {"point_box": geometry | image, "empty": empty | image, "box": box | image, "many": many}


GEOMETRY_ENCODER = Component(
    name="geometry_encoder",
    summary="points, boxes and labels to prompt tokens, CLS included",
    inputs=("points", "points_mask", "point_labels", "boxes", "boxes_mask", "box_labels", "img_feats", "img_pos"),
    outputs=("features", "mask"),
    build=build,
    samples=samples,
    emulated=EVERY_PRECISION,
)
