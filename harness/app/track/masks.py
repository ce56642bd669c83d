"""Writes the masks of a frame as one image, in which each pixel has the number of its object."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from harness.app.segment.images import png
from harness.app.segment.overlay import BLACK, color_of
from harness.app.track.objects import TrackedObjects


def numbered_pixels(tracked: TrackedObjects) -> npt.NDArray[np.uint8] | npt.NDArray[np.uint16]:
    """Returns an image that is 0 where no object is, otherwise the object's id plus 1.

    Where objects overlap, the pixel belongs to the one with the highest score.

    Returns:
        uint8 [h, w], or uint16 where an id is larger than 254.
    """
    width, height = tracked.objects.size
    is_small = max(tracked.ids, default=0) < np.iinfo(np.uint8).max
    pixels = np.zeros((height, width), np.uint8 if is_small else np.uint16)
    for index in np.argsort(tracked.objects.scores, kind="stable").tolist():
        pixels[tracked.objects.masks[index]] = tracked.ids[index] + 1
    return pixels


def numbered_png(tracked: TrackedObjects) -> bytes:
    """Returns the PNG file of `numbered_pixels`, with the objects' colours as its palette, or in 16-bit grey."""
    from PIL import Image

    pixels = numbered_pixels(tracked)
    image = Image.fromarray(pixels)
    if pixels.dtype == np.uint8:
        image.putpalette(_palette())
    return png(image)


@cache
def _palette() -> bytes:
    return bytes(value for color in (BLACK, *map(color_of, range(255))) for value in color)
