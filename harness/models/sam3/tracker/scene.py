"""Composites a clip of 40 frames with known masks: parts of photographs move over a photograph, enter, hide and leave.

Pixels are copied and never resampled, so that every machine makes the same frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from harness.core.settings import FIXTURES
from harness.runtime.arrays import Masks, Pixels
from harness.runtime.sam3.images import load_image

_IMAGES = FIXTURES / "images"


@dataclass(frozen=True)
class Part:
    """An ellipse of a photograph that moves.

    Attributes:
        name: Name of the object.
        photograph: The file.
        corner: Left and top of the part in the photograph, in pixels.
        size: Width and height of the part, in pixels.
        path: Positions of the centre: frame, x and y; it moves on a straight line between two positions.
    """

    name: str
    photograph: Path
    corner: tuple[int, int]
    size: tuple[int, int]
    path: tuple[tuple[int, float, float], ...]

    def place(self, frame: int) -> tuple[int, int]:
        """Returns left and top of the part in a frame, in pixels; the part may lie outside of the frame."""
        frames, xs, ys = zip(*self.path, strict=True)
        middle = np.interp(frame, frames, xs), np.interp(frame, frames, ys)
        left, top = (int(np.rint(value - side / 2)) for value, side in zip(middle, self.size, strict=True))
        return left, top

    def shape(self) -> Masks:
        """Returns the pixels of the part that belong to the ellipse, bool [height, width]."""
        width, height = self.size
        y, x = np.mgrid[1 - height : height : 2, 1 - width : width : 2]
        inside: Masks = (x * height) ** 2 + (y * width) ** 2 <= (width * height) ** 2
        return inside


@dataclass(frozen=True)
class Scene:
    """A clip of moving parts.

    Attributes:
        background: The photograph behind all parts.
        corner: Left and top of the visible part of the background.
        size: Width and height of the frames in pixels.
        parts: The moving parts, from back to front.
        length: Number of frames.
    """

    background: Path
    corner: tuple[int, int]
    size: tuple[int, int]
    parts: tuple[Part, ...]
    length: int

    def masks(self, frame: int) -> Masks:
        """Returns the visible pixels of each part, bool [parts, height, width]; a hidden part has none."""
        width, height = self.size
        masks = np.zeros((len(self.parts), height, width), bool)
        for index, part in enumerate(self.parts):
            inside, source = self._window(part, frame)
            masks[index][inside] = part.shape()[source]
            masks[:index] &= ~masks[index]
        return masks

    def picture(self, frame: int) -> Pixels:
        """Returns the frame, uint8 [height, width, 3], RGB."""
        picture = _crop(self.background, self.corner, self.size).copy()
        for part, mask in zip(self.parts, self.masks(frame), strict=True):
            inside, source = self._window(part, frame)
            visible = mask[inside]
            picture[inside][visible] = _crop(part.photograph, part.corner, part.size)[source][visible]
        return picture

    def _window(self, part: Part, frame: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
        """Returns the rows and columns of the frame that a part covers, and the part's own inside the frame."""
        inside, source = [], []
        for start, length, limit in zip(part.place(frame), part.size, self.size, strict=True):
            first, last = (min(max(value, 0), limit) for value in (start, start + length))
            inside.append(slice(first, last))
            source.append(slice(first - start, last - start))
        return (inside[1], inside[0]), (source[1], source[0])


@cache
def _crop(photograph: Path, corner: tuple[int, int], size: tuple[int, int]) -> Pixels:
    left, top = corner
    return np.asarray(load_image(photograph))[top : top + size[1], left : left + size[0]]


SCENE = Scene(
    background=_IMAGES / "coffee.png",
    corner=(176, 160),
    size=(424, 240),
    parts=(
        # Hidden behind the cat from frame 14 to frame 25.
        Part("eye", _IMAGES / "cat.png", (160, 100), (40, 40), ((0, 210, 120), (39, 210, 120))),
        Part("cat", _IMAGES / "cat.png", (150, 50), (130, 120), ((0, 70, 120), (39, 350, 120))),
        # Enters from the right after frame 5, passes in front of the cat, and has left on the other side by frame 33.
        Part("coffee", _IMAGES / "coffee.png", (255, 110), (90, 90), ((5, 470, 70), (33, -50, 170))),
    ),
    length=40,
)
"""Two objects that stay in the frame, one of which hides the other, and an object that enters and leaves."""
