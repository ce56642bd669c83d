"""Animated images as videos: GIF, PNG and WebP, read by Pillow."""

from __future__ import annotations

from collections.abc import Generator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from harness.runtime.errors import Sam3Error
from harness.runtime.sam3.images import opened, to_rgb

if TYPE_CHECKING:
    from PIL import Image

ANIMATION_SUFFIXES = (".gif", ".png", ".apng", ".webp")

_DAMAGED = (OSError, SyntaxError, ValueError, EOFError)
"""What Pillow raises for a file that it cannot read."""


def animation_timing(path: Path) -> tuple[int, Fraction | None] | None:
    """Returns the number of frames of an animation and how many it shows in a second, by the first of them.

    Returns:
        None if the file is no animation, or cannot be read as an image.
    """
    try:
        with opened(path) as file:
            if not getattr(file, "is_animated", False):
                return None
            milliseconds = file.info.get("duration", 0)
            return _count(file), Fraction(1000) / Fraction(milliseconds) if milliseconds > 0 else None
    except _DAMAGED:
        return None


def read_animation(path: Path) -> Generator[npt.NDArray[np.uint8], None, None]:
    """Gives each frame of an animation, uint8 [h, w, 3], drawn over those before it as the file says.

    Raises:
        Sam3Error: A frame cannot be read.
    """
    index = 0
    try:
        with opened(path) as file:
            for index in range(_count(file)):
                file.seek(index)
                yield np.array(to_rgb(file))
    except _DAMAGED as error:
        raise Sam3Error(
            f"Frame {index} of {path} cannot be read ({error}); cut the animation there, or save it anew."
        ) from error


def _count(file: Image.Image) -> int:
    count: int = getattr(file, "n_frames", 1)
    return count
