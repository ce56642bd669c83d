"""Composites a clip with known motion: an ellipse of one photograph swings over another photograph."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from PIL import Image, ImageDraw

from harness.core.settings import FIXTURES
from harness.models.sam3.fixtures import Fixture, read_fixture
from harness.runtime.arrays import Masks
from harness.runtime.sam3.images import load_image

CLIP = FIXTURES / "clip.toml"

Point = tuple[float, float]


class Clip(Fixture, frozen=True):
    """The contents of the frames; positions are shares of width and height.

    Attributes:
        background: Path of the static photograph.
        moving: Path of the photograph whose part moves.
        crop: The moving part: left, top, right, bottom.
        size: Width and height of the moving part in a frame.
        places: Upper left corners of the moving part in the first frames; later frames go through them to and fro.
        still: A point on each static object.
    """

    background: Path
    moving: Path
    crop: tuple[float, float, float, float]
    size: Point
    places: tuple[Point, ...]
    still: tuple[Point, ...]

    def view(self, frame: int) -> int:
        """Returns the index of a frame's picture among the distinct pictures: 0, 1, 2, 1, 0, 1, … for three places."""
        last = len(self.places) - 1
        return last - abs(frame % (2 * last) - last) if last else 0

    def center(self, frame: int) -> Point:
        """Returns the centre of the moving part."""
        (left, top), (width, height) = self.places[self.view(frame)], self.size
        return left + width / 2, top + height / 2

    def mask(self, frame: int) -> Masks:
        """Returns the mask of the moving part, [height, width] of the background."""
        shape = Image.new("L", load_image(self.background).size)
        ImageDraw.Draw(shape).ellipse(self._box(frame, shape.size), fill=255)
        return np.asarray(shape) > 0

    def picture(self, frame: int) -> Image.Image:
        """Returns the frame, in RGB and the size of the background."""
        picture, whole = load_image(self.background), load_image(self.moving)
        left, top, right, bottom = (round(share * side) for share, side in zip(self.crop, whole.size * 2, strict=True))
        x0, y0, x1, y1 = self._box(frame, picture.size)
        part = whole.crop((left, top, right, bottom)).resize((x1 - x0 + 1, y1 - y0 + 1), Image.Resampling.BICUBIC)
        layer = Image.new("RGB", picture.size)
        layer.paste(part, (x0, y0))
        return Image.composite(layer, picture, Image.fromarray(self.mask(frame)))

    def _box(self, frame: int, size: tuple[int, int]) -> tuple[int, int, int, int]:
        """Returns the first and the last column and row of the moving part, in pixels."""
        (left, top), (width, height) = self.places[self.view(frame)], self.size
        x0, y0 = round(left * size[0]), round(top * size[1])
        return x0, y0, x0 + round(width * size[0]) - 1, y0 + round(height * size[1]) - 1


def load_clip(moving: Path | None = None, path: Path = CLIP) -> Clip:
    """Reads a clip, with a part of another photograph if one is given; errors are those of `read_fixture`."""
    clip = read_fixture(path, Clip, "the description of a clip")
    return clip if moving is None else msgspec.structs.replace(clip, moving=moving)
