"""Encodes prompts for one object, SAM's task: positive and negative points, a box, a mask to refine.

The meaning is that of upstream's `SAM3InteractiveImagePredictor.predict`; points and boxes are in pixels of the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.runtime.arrays import Floats
from harness.runtime.errors import ModelError
from harness.runtime.sam3.connected_components import small_components
from harness.runtime.sam3.description import Capacity
from harness.runtime.sam3.images import MASK_SIZE, RESOLUTION
from harness.runtime.sam3.prompts import (
    Coordinates,
    abbreviate,
    check_points,
    clip_boxes,
    parse_boxes,
    parse_labels,
    parse_numbers,
)

Box = Sequence[float] | npt.NDArray[Any] | None
"""(x0, y0, x1, y1) in pixels; None for none."""
ObjectLabels = Sequence[int] | npt.NDArray[Any] | None
"""1 or 0 for each point; None for 1 everywhere."""

CORNERS, PAD, ABSENT = (2, 3), -1, -2
"""Labels of the corners of a box, of upstream's padding point, and of an unused point."""
LARGEST_LOGIT = 32.0
"""Returned logits are clamped to this magnitude, as upstream does."""
LARGEST_HOLE = 256
"""Pixels of 288 x 288: holes of a mask up to this area are filled (`max_hole_area` of upstream's predictor)."""
_FILLED = np.float32(10.0)
_STABILITY_DELTA, _STABILITY_THRESHOLD = np.float32(0.05), np.float32(0.98)
"""`dynamic_multimask_stability_delta` and `…_thresh` in upstream's `build_tracker`."""


@dataclass(frozen=True)
class ObjectPrompt:
    """A prompt for one object.

    Attributes:
        points: (x, y) each, in pixels.
        labels: For each point, whether it is on the object (1) or not (0); all 1 by default.
        box: (x0, y0, x1, y1) around the object, in pixels.
        mask: Logits fp32 [288, 288], or [1, 288, 288] as upstream's, of an earlier prediction, to refine.
    """

    points: Coordinates = None
    labels: ObjectLabels = None
    box: Box = None
    mask: Floats | None = None


@dataclass(frozen=True, eq=False)
class Prediction:
    """Masks of one object in an image of height h and width w: n = 3 with `multimask`, otherwise n = 1.

    Attributes:
        masks: bool [n, h, w].
        iou: fp32 [n], the IoU of each mask with the object, as the model predicts it.
        logits: fp32 [n, 288, 288], between -32 and 32; one of them refines the next prediction.
        object_score: Logit of whether there is an object.
        notes: A sentence for each part of the prompt that was changed or ignored.
    """

    masks: npt.NDArray[np.bool_]
    iou: Floats
    logits: Floats
    object_score: float
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> int:
        """Index of the mask with the highest predicted IoU."""
        return int(np.argmax(self.iou))


@dataclass(frozen=True, eq=False)
class EncodedObjectPrompt:
    """A prompt as the model takes it.

    Attributes:
        inputs: `coordinates` fp32 [1, P, 2], `labels` int64 [1, P], `mask` fp32 [1, 1, 288, 288], `has_mask` bool [1].
        notes: A sentence for each part of the prompt that was changed or ignored.
    """

    inputs: dict[str, npt.NDArray[Any]]
    notes: tuple[str, ...] = ()


def encode_object_prompt(prompt: ObjectPrompt, size: tuple[int, int], capacity: Capacity) -> EncodedObjectPrompt:
    """Checks a prompt and converts it to the model's form: corners of the box, points, padding point, unused points.

    Args:
        prompt: The prompt.
        size: Width and height of the image in pixels.
        capacity: The maximum number of points of the model.

    Raises:
        ModelError: The prompt is empty, or invalid for this image.
    """
    points = parse_numbers(prompt.points, "point", "points", "x, y")
    labels = parse_labels(prompt.labels, len(points), "point")
    box = None if prompt.box is None else np.asarray(prompt.box, object).reshape(1, -1).tolist()
    boxes, notes = clip_boxes(parse_boxes(box), size)
    check_points(points, size)
    mask = _parse_mask(prompt.mask)
    if len(points) > capacity.clicks:
        raise ModelError(
            f"The prompt has {len(points)} points, this model takes at most {capacity.clicks}; give fewer."
        )
    if not len(points) and not len(boxes) and mask is None:
        raise ModelError("Nothing is asked; give a point, a box or a mask.")
    corners = boxes.reshape(-1, 2)
    places = capacity.clicks + len(CORNERS) + 1
    used = len(corners) + len(points)
    coordinates = np.zeros((1, places, 2), np.float32)
    # In fp32 and in this order, as upstream's SAM2Transforms.transform_coords.
    normalized = np.concatenate([corners, points]).astype(np.float32) / np.array(size, np.float32)
    coordinates[0, :used] = normalized * np.float32(RESOLUTION)
    point_labels = np.full((1, places), ABSENT, np.int64)
    point_labels[0, :used] = [*CORNERS[: len(corners)], *labels]
    if used:
        point_labels[0, used] = PAD
    return EncodedObjectPrompt(
        {
            "coordinates": coordinates,
            "labels": point_labels,
            "mask": np.zeros((1, 1, MASK_SIZE, MASK_SIZE), np.float32) if mask is None else mask[None, None],
            "has_mask": np.array([mask is not None]),
        },
        notes,
    )


def _parse_mask(mask: Any) -> Floats | None:
    """Returns the user's mask as logits fp32 [288, 288]; None if there is none.

    Raises:
        ModelError: The value is no array of finite logits of this size.
    """
    if mask is None:
        return None
    shapes = ((MASK_SIZE, MASK_SIZE), (1, MASK_SIZE, MASK_SIZE))
    if not isinstance(mask, np.ndarray) or mask.dtype != np.float32 or mask.shape not in shapes:
        actual = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, np.ndarray) else abbreviate(mask)
        raise ModelError(
            f"The mask is {actual}; give logits float32 [{MASK_SIZE}, {MASK_SIZE}], one of an earlier prediction's."
        )
    if not np.isfinite(mask).all():
        raise ModelError("The mask has logits that are not finite; give those of an earlier prediction.")
    return np.ascontiguousarray(mask.reshape(MASK_SIZE, MASK_SIZE))


def select_masks(logits: Floats, iou: Floats, multimask: bool) -> tuple[Floats, Floats]:
    """Selects masks as upstream's `MaskDecoder` does: three of the four, or the single one if it is stable.

    A single mask that is not stable is replaced by the best of the three.

    Args:
        logits: fp32 [4, 288, 288].
        iou: fp32 [4].
        multimask: Whether to return three masks.

    Returns:
        Logits [n, 288, 288] and IoU [n].
    """
    if multimask:
        return logits[1:], iou[1:]
    certain = np.float32((logits[0] > _STABILITY_DELTA).sum())
    possible = np.float32((logits[0] > -_STABILITY_DELTA).sum())
    stable = possible == 0 or certain / possible >= _STABILITY_THRESHOLD
    chosen = 0 if stable else 1 + int(np.argmax(iou[1:]))
    return logits[chosen : chosen + 1], iou[chosen : chosen + 1]


def fill_holes(logits: Floats) -> Floats:
    """Fills every hole of at most 256 pixels, 8-connected, in logits [n, 288, 288].

    Upstream does this where scikit-image is installed (`SAM2Transforms.postprocess_masks`).
    """
    filled = logits.copy()
    filled.reshape(-1)[small_components(filled <= 0, LARGEST_HOLE)] = _FILLED
    return filled
