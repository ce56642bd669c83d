"""What several prompts found in one image, together: what is drawn, written and counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.runtime import Found, Prediction


@dataclass(frozen=True, eq=False)
class Objects:
    """The objects of one image of height h and width w: k of them, in the order of the prompts.

    Attributes:
        masks: bool [k, h, w].
        boxes: fp32 [k, 4], (x0, y0, x1, y1) in pixels; they may reach beyond the image.
        scores: fp32 [k].
        categories: k names; what an object's prompt asked for.
        size: Width and height of the image.
        notes: A sentence for each part of a prompt that was not used as it was given.
    """

    masks: npt.NDArray[np.bool_]
    boxes: npt.NDArray[np.float32]
    scores: npt.NDArray[np.float32]
    categories: tuple[str, ...]
    size: tuple[int, int]
    notes: tuple[str, ...] = ()


def objects_of(found: Found, category: str) -> Objects:
    """Takes the objects out of what one prompt found, and lets go of the model's raw outputs."""
    return Objects(found.masks, found.boxes, found.scores, (category,) * len(found.scores), found.size, found.notes)


def object_of(prediction: Prediction, category: str) -> Objects:
    """Takes the best mask of one object; its box is the mask's, its score the IoU that the model expects."""
    mask = prediction.masks[prediction.best]
    height, width = mask.shape
    return Objects(
        masks=mask[None],
        boxes=np.array([corners_of_mask(mask)], np.float32),
        scores=prediction.iou[[prediction.best]],
        categories=(category,),
        size=(width, height),
        notes=prediction.notes,
    )


def corners_of_mask(mask: npt.NDArray[np.bool_]) -> tuple[int, int, int, int]:
    """Returns (x0, y0, x1, y1) around the pixels of a mask [h, w]; all 0 if it has none."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1) if len(rows) else (0, 0, 0, 0)


def joined(parts: Sequence[Objects]) -> Objects:
    """Joins the objects of several prompts of one image; there is at least one prompt."""
    return Objects(
        masks=np.concatenate([part.masks for part in parts]),
        boxes=np.concatenate([part.boxes for part in parts]),
        scores=np.concatenate([part.scores for part in parts]),
        categories=tuple(category for part in parts for category in part.categories),
        size=parts[0].size,
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )
