"""Reads and writes the distribution of errors in the JSON report: a histogram, a map and pictures of masks.

    {"histogram": counts by |error| / gate between `harness.core.outcome.EDGES`, or [],
     "largest": the largest |error| in each cell of the image: a string of numbers with spaces for each row,
     "masks": [{"index": [index on all axes but the last two], "size": [height, width], "differing": pixels,
                "torch": a PNG file in base64, "tvm": likewise, or null if both pictures are equal,
                "marks": likewise, transparent except where a pixel differs, or null if none does}]}

`harness.core.outcome` defines these terms; all are of bounded size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import to_builtins

from harness.core.outcome import Distribution


def to_json(distribution: Distribution) -> dict[str, Any]:
    """Returns the distribution as plain data."""
    return {
        "histogram": list(distribution.histogram),
        "largest": [" ".join(f"{value:.3g}" for value in row) for row in distribution.largest],
        "masks": [to_builtins(mask) for mask in distribution.masks],
    }


def rows_of(data: Mapping[str, Any]) -> list[list[float]]:
    """Returns the rows of the map; none if the output is not an image."""
    return [[float(value) for value in row.split()] for row in data["largest"]]
