"""Collects the objects that were found in one image, which are drawn, written and counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pycocotools import mask as coco

from harness.runtime import Found, Prediction
from harness.runtime.arrays import Floats

Mask = npt.NDArray[np.bool_]
RunLengths = dict[str, Any]
"""A mask in COCO's compressed run-length encoding: `size` (height, width) and `counts`."""

LARGEST_ID = 65_534
"""The largest id of an object, so that an image of 16 bits can hold it plus 1."""


def run_lengths(mask: Mask) -> RunLengths:
    """Encodes a mask [h, w]."""
    runs = coco.encode(np.asfortranarray(mask, np.uint8))
    return {"size": [int(length) for length in runs["size"]], "counts": runs["counts"].decode("ascii")}


def decode_mask(runs: RunLengths) -> Mask:
    """Decodes a mask of `run_lengths`."""
    mask: Mask = coco.decode(runs).astype(bool)
    return mask


def box_of_mask(runs: RunLengths) -> list[float]:
    """Returns (x, y, width, height) of the pixels of a mask of `run_lengths`; all 0 if it has none."""
    box: list[float] = coco.toBbox(runs).tolist()
    return box


@dataclass(frozen=True, eq=False)
class Objects:
    """The k objects of one image of height h and width w, in the order of the prompts.

    Attributes:
        runs: The mask of each object, encoded, because many masks of [h, w] do not fit into memory.
        boxes: fp32 [k, 4], (x0, y0, x1, y1) in pixels; they may reach beyond the image.
        scores: fp32 [k].
        categories: k names, from the prompts of the objects.
        size: Width and height of the image.
        notes: A sentence for each part of a prompt that was changed or ignored.
        ids: Id of each object in a video, 0 … 65534, all of which differ; None in a photograph.
    """

    runs: tuple[RunLengths, ...]
    boxes: Floats
    scores: Floats
    categories: tuple[str, ...]
    size: tuple[int, int]
    notes: tuple[str, ...] = ()
    ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.ids is None:
            return
        if len(self.ids) != len(self.scores) or len(set(self.ids)) != len(self.ids):
            raise ValueError(f"{len(self.scores)} objects need as many ids that differ, not {self.ids}")
        if any(not 0 <= number <= LARGEST_ID for number in self.ids):
            raise ValueError(f"ids of objects are 0 … {LARGEST_ID}, not {self.ids}")

    def mask(self, index: int) -> Mask:
        """Returns the mask of an object, bool [h, w]."""
        return decode_mask(self.runs[index])


def encode_objects(result: Found, category: str) -> Objects:
    """Encodes the objects of one prompt, and releases the model's raw outputs."""
    runs = tuple(map(run_lengths, result.each_mask()))
    return Objects(runs, result.boxes, result.scores, (category,) * len(result.scores), result.size, result.notes)


def best_object(prediction: Prediction, category: str) -> Objects:
    """Returns the best mask of one object; its box is the mask's, its score the predicted IoU."""
    runs = run_lengths(prediction.masks[prediction.best])
    height, width = runs["size"]
    x, y, box_width, box_height = box_of_mask(runs)
    return Objects(
        runs=(runs,),
        boxes=np.array([(x, y, x + box_width, y + box_height)], np.float32),
        scores=prediction.iou[[prediction.best]],
        categories=(category,),
        size=(width, height),
        notes=prediction.notes,
    )


def concatenate_objects(parts: Sequence[Objects]) -> Objects:
    """Concatenates the objects of several prompts of one image; there is at least one prompt."""
    return Objects(
        runs=tuple(runs for part in parts for runs in part.runs),
        boxes=np.concatenate([part.boxes for part in parts]),
        scores=np.concatenate([part.scores for part in parts]),
        categories=tuple(category for part in parts for category in part.categories),
        size=parts[0].size,
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )
