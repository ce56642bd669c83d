"""What was found, as COCO writes it: run-length encoded masks, boxes as (x, y, width, height)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from harness.runtime import Found


def coco_annotations(found: Found, image: str, category: str) -> list[dict[str, Any]]:
    """One entry for each object, in the order of `found`.

    Args:
        found: What was found.
        image: Name of the image.
        category: What was asked for.

    Returns:
        Entries of COCO's results format with names instead of numbers for image and category: `bbox` in pixels,
        `area` in pixels of the mask, `segmentation` with `size` (height, width) and `counts`, COCO's compressed
        run-length encoding, which `pycocotools.mask.decode` reads.
    """
    return [
        {
            "image": image,
            "category": category,
            "score": float(score),
            "bbox": [float(x0), float(y0), float(x1 - x0), float(y1 - y0)],
            "area": int(mask.sum()),
            "segmentation": run_lengths(mask),
        }
        for mask, (x0, y0, x1, y1), score in zip(found.masks, found.boxes, found.scores, strict=True)
    ]


def run_lengths(mask: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """COCO's compressed run-length encoding of a mask [h, w]."""
    from pycocotools import mask as coco

    encoded = coco.encode(np.asfortranarray(mask, np.uint8))
    return {"size": [int(length) for length in encoded["size"]], "counts": encoded["counts"].decode("ascii")}
