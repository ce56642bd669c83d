"""Reads animated images, GIF, PNG and WebP, as videos with Pillow."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from harness.runtime.errors import Sam3Error
from harness.runtime.sam3.images import image_errors, open_image, to_rgb

if TYPE_CHECKING:
    from PIL import Image

ANIMATION_SUFFIXES = (".gif", ".png", ".apng", ".webp")

_ADVICE = "cut the animation there, or save it anew"


def animation_timing(path: Path) -> tuple[int, Fraction | None] | None:
    """Returns the number of frames of an animation and its frames per second, by the duration of the first frame.

    Returns:
        None if the file is no animation, or cannot be read as an image.
    """
    try:
        with image_errors(str(path)), open_image(path) as file:
            if not getattr(file, "is_animated", False):
                return None
            milliseconds = file.info.get("duration", 0)
            return _count(file), Fraction(1000) / Fraction(milliseconds) if milliseconds > 0 else None
    except Sam3Error:
        return None


def read_animation(path: Path) -> Generator[npt.NDArray[np.uint8], None, None]:
    """Yields each frame of an animation, uint8 [h, w, 3], drawn over the frames before it as the file specifies.

    Raises:
        Sam3Error: A frame cannot be read, or is too large.
    """
    with ExitStack() as stack:
        with image_errors(str(path), _ADVICE):
            file = stack.enter_context(open_image(path))
            count = _count(file)
        for index in range(count):
            with image_errors(f"Frame {index} of {path}", _ADVICE):
                file.seek(index)
                file.load()
                pixels = np.array(to_rgb(file))
            yield pixels


def _count(file: Image.Image) -> int:
    count: int = getattr(file, "n_frames", 1)
    return count
