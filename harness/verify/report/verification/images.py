"""Draws the pictures of a page."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.verify.report.verification.wording import digits

_LIGHT, _DARK = (246, 240, 220), (20, 40, 110)
"""Colours of no error and of the largest error; their lightness differs, so that nobody needs to tell colours apart."""
_SHADES = 16


@dataclass(frozen=True)
class ErrorMap:
    """A map of the largest errors over an image.

    Attributes:
        source: Address of the picture, with one pixel per cell.
        rows, columns: Number of cells.
        largest: The largest error.
        description: Description of the map in words.
    """

    source: str
    rows: int
    columns: int
    largest: float
    description: str


def error_map(rows: Sequence[Sequence[float]]) -> ErrorMap:
    """Draws a map in shades from no error to the largest finite error; infinite errors have the same shade.

    Args:
        rows: The largest error in each cell, at least one.
    """
    largest, row, column = max((value, -r, -c) for r, line in enumerate(rows) for c, value in enumerate(line))
    finite = max((value for line in rows for value in line if math.isfinite(value)), default=0.0) or 1.0
    shades = bytes(round((_SHADES - 1) * min(value / finite, 1.0)) for line in rows for value in line)
    description = (
        f"The largest error in each of {len(rows)} × {len(rows[0])} cells of the image. The largest of all is "
        f"{digits(largest)}, in row {1 - row} and column {1 - column}."
    )
    return ErrorMap(_draw(shades, len(rows), len(rows[0])), len(rows), len(rows[0]), largest, description)


def png(data: str) -> str:
    """Returns the data URL of a PNG file given in base64."""
    return f"data:image/png;base64,{data}"


def _draw(shades: bytes, rows: int, columns: int) -> str:
    """Returns the data URL of a picture with one shade per cell, from 0 for no error to `_SHADES` - 1."""
    from PIL import Image

    picture = Image.frombytes("P", (columns, rows), shades)
    shares = [n / (_SHADES - 1) for n in range(_SHADES)]
    picture.putpalette([round(a + (b - a) * share) for share in shares for a, b in zip(_LIGHT, _DARK, strict=True)])
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True, bits=4)
    return png(base64.b64encode(file.getvalue()).decode())
