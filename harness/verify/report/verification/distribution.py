"""Reads and writes the distribution of errors in the JSON report: a histogram, a map and pictures of masks.

    {"histogram": counts by |error| / gate between `harness.core.distribution.EDGES`, or [],
     "largest": the largest |error| in each cell of the image: a string of numbers with spaces for each row,
     "masks": [{"index": [index on all axes but the last two], "size": [height, width], "differing": pixels,
                "torch": a PNG file in base64, "tvm": likewise, or null if both pictures are equal,
                "marks": likewise, transparent except where a pixel differs, or null if none does}]}

`harness.core.distribution` defines these terms; all are of bounded size.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping
from typing import Any

from harness.core.distribution import BINS, CELLS, MASKS, Distribution

_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_MAX_PICTURE_LENGTH = 24000
"""Characters of a picture: 96 × 96 pixels of 8 bits, uncompressed, in base64, with twice the room for PNG's overhead.
"""


def to_json(distribution: Distribution) -> dict[str, Any]:
    """Returns the distribution as plain data."""
    return {
        "histogram": list(distribution.histogram),
        "largest": [" ".join(f"{value:.3g}" for value in row) for row in distribution.largest],
        "masks": [
            {
                "index": list(mask.index),
                "size": list(mask.size),
                "differing": mask.differing,
                "torch": _text(mask.torch),
                "tvm": _text(mask.tvm),
                "marks": _text(mask.marks),
            }
            for mask in distribution.masks
        ],
    }


def rows_of(data: Mapping[str, Any]) -> list[list[float]]:
    """Returns the rows of the map; none if the output is not an image."""
    return [[float(value) for value in row.split()] for row in data["largest"]]


def problem(data: Any) -> str:
    """Returns which part of the data is not what `to_json` writes; empty if all parts are valid."""
    if not isinstance(data, dict):
        return "it"
    if not _is_histogram(data.get("histogram")):
        return "`histogram`"
    if not _is_map(data.get("largest")):
        return "`largest`"
    masks = data.get("masks")
    return "" if isinstance(masks, list) and len(masks) <= MASKS and all(map(_is_mask, masks)) else "`masks`"


def _text(picture: bytes | None) -> str | None:
    return None if picture is None else base64.b64encode(picture).decode()


def _is_histogram(data: Any) -> bool:
    return isinstance(data, list) and len(data) in (0, BINS) and all(map(_is_count, data))


def _is_count(data: Any) -> bool:
    return isinstance(data, int) and not isinstance(data, bool) and data >= 0


def _is_map(data: Any) -> bool:
    if not isinstance(data, list) or len(data) > CELLS or not all(isinstance(row, str) for row in data):
        return False
    try:
        rows = rows_of({"largest": data})
    except ValueError:
        return False
    is_rectangular = all(0 < len(row) <= CELLS and len(row) == len(rows[0]) for row in rows)
    return is_rectangular and not any(math.isnan(value) or value < 0 for row in rows for value in row)


def _is_mask(data: Any) -> bool:
    if not isinstance(data, dict) or not _is_count(data.get("differing")):
        return False
    counts = (data.get("index"), data.get("size"))
    if (
        not all(isinstance(numbers, list) and all(map(_is_count, numbers)) for numbers in counts)
        or len(data["size"]) != 2
    ):
        return False
    return _is_picture(data.get("torch")) and all(
        name in data and (data[name] is None or _is_picture(data[name])) for name in ("tvm", "marks")
    )


def _is_picture(data: Any) -> bool:
    return isinstance(data, str) and len(data) <= _MAX_PICTURE_LENGTH and _BASE64.fullmatch(data) is not None
