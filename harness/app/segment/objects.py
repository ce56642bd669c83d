"""Collects the objects of several prompts in one image, which are drawn, written and counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from harness.runtime import Found, Prediction

Mask = npt.NDArray[np.bool_]


class EncodedMasks(Sequence[Mask]):
    """Masks bool [h, w] in COCO's compressed run-length encoding; each is decoded at its use.

    Attributes:
        runs: For each mask the result of `run_lengths`.
    """

    def __init__(self, runs: Iterable[dict[str, Any]]) -> None:
        """Stores encoded masks."""
        self.runs = tuple(runs)

    def __len__(self) -> int:
        return len(self.runs)

    @overload
    def __getitem__(self, index: int) -> Mask: ...
    @overload
    def __getitem__(self, index: slice) -> EncodedMasks: ...
    def __getitem__(self, index: int | slice) -> Mask | EncodedMasks:
        return EncodedMasks(self.runs[index]) if isinstance(index, slice) else decode_mask(self.runs[index])

    def __iter__(self) -> Iterator[Mask]:
        return map(decode_mask, self.runs)


def run_lengths(mask: Mask) -> dict[str, Any]:
    """Encodes a mask [h, w] in COCO's compressed run-length encoding: `size` (height, width) and `counts`."""
    from pycocotools import mask as coco

    runs = coco.encode(np.asfortranarray(mask, np.uint8))
    return {"size": [int(length) for length in runs["size"]], "counts": runs["counts"].decode("ascii")}


def decode_mask(runs: dict[str, Any]) -> Mask:
    """Decodes a mask of `run_lengths`."""
    from pycocotools import mask as coco

    mask: Mask = coco.decode(runs | {"counts": runs["counts"].encode("ascii")}).astype(bool)
    return mask


def encode_masks(masks: Sequence[Mask] | Mask) -> EncodedMasks:
    """Encodes masks that are not encoded yet."""
    return masks if isinstance(masks, EncodedMasks) else EncodedMasks(map(run_lengths, masks))


@dataclass(frozen=True, eq=False)
class Objects:
    """The k objects of one image of height h and width w, in the order of the prompts.

    Attributes:
        masks: bool [h, w] each, or [k, h, w].
        boxes: fp32 [k, 4], (x0, y0, x1, y1) in pixels; they may reach beyond the image.
        scores: fp32 [k].
        categories: k names, from the prompts of the objects.
        size: Width and height of the image.
        notes: A sentence for each part of a prompt that was changed or ignored.
    """

    masks: EncodedMasks | Mask
    boxes: npt.NDArray[np.float32]
    scores: npt.NDArray[np.float32]
    categories: tuple[str, ...]
    size: tuple[int, int]
    notes: tuple[str, ...] = ()


def encode_objects(result: Found, category: str) -> Objects:
    """Encodes the objects of one prompt, and releases the model's raw outputs."""
    masks = EncodedMasks(map(run_lengths, result.each_mask()))
    return Objects(masks, result.boxes, result.scores, (category,) * len(result.scores), result.size, result.notes)


def best_object(prediction: Prediction, category: str) -> Objects:
    """Returns the best mask of one object; its box is the mask's, its score the predicted IoU."""
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


def concatenate_objects(parts: Sequence[Objects]) -> Objects:
    """Concatenates the objects of several prompts of one image; there is at least one prompt."""
    return Objects(
        masks=EncodedMasks(runs for part in parts for runs in encode_masks(part.masks).runs),
        boxes=np.concatenate([part.boxes for part in parts]),
        scores=np.concatenate([part.scores for part in parts]),
        categories=tuple(category for part in parts for category in part.categories),
        size=parts[0].size,
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )
