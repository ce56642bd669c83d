"""Formats the table of tracks, a CSV file with one row for each object of each frame."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

COLUMNS = ("frame", "track", "category", "score", "x", "y", "width", "height", "area")
HEADER = f"{','.join(COLUMNS)}\r\n"
"""The first line; lines end as in RFC 4180."""


def rows(frame: int, annotations: Sequence[dict[str, Any]]) -> str:
    """Returns the rows of a frame from what `track_annotations` returned, boxes and areas in pixels."""
    text = io.StringIO()
    writer = csv.writer(text)
    for entry in annotations:
        writer.writerow(
            [frame, entry["track_id"], entry["category"], entry["score"], *entry["bbox"], entry["area"]],
        )
    return text.getvalue()
