"""Encodes pictures, single masks and the numbered masks of a frame as PNG files."""

from __future__ import annotations

import io
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from harness.app.results.objects import Mask, Objects
from harness.app.results.overlay import BLACK, color_of

if TYPE_CHECKING:
    from PIL import Image


def png(image: Image.Image) -> bytes:
    """Returns the PNG file of an image."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def mask_png(mask: Mask) -> bytes:
    """Returns the PNG file of a mask [h, w], with 1 bit per pixel."""
    from PIL import Image

    return png(Image.fromarray(mask))


def numbered_pixels(objects: Objects) -> npt.NDArray[np.uint8] | npt.NDArray[np.uint16]:
    """Returns an image that is 0 where no object of a video is, otherwise the object's id plus 1.

    Where objects overlap, the pixel belongs to the one with the highest score.

    Returns:
        uint8 [h, w], or uint16 where an id is larger than 254.
    """
    width, height = objects.size
    ids = objects.ids or ()
    is_small = max(ids, default=0) < np.iinfo(np.uint8).max
    pixels = np.zeros((height, width), np.uint8 if is_small else np.uint16)
    for index in np.argsort(objects.scores, kind="stable").tolist():
        pixels[objects.mask(index)] = ids[index] + 1
    return pixels


def numbered_png(objects: Objects) -> bytes:
    """Returns the PNG file of `numbered_pixels`, with the objects' colours as its palette, or in 16-bit grey."""
    from PIL import Image

    pixels = numbered_pixels(objects)
    image = Image.fromarray(pixels)
    if pixels.dtype == np.uint8:
        image.putpalette(_palette())
    return png(image)


@cache
def _palette() -> bytes:
    return bytes(value for color in (BLACK, *map(color_of, range(255))) for value in color)
