"""Draws objects into a picture, with boxes, labels and marks of the prompt, and encodes pictures and masks as PNG."""

from __future__ import annotations

import colorsys
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from harness.app.results.objects import Mask, Objects
from harness.runtime import ObjectPrompt, Prompt
from harness.runtime.arrays import Array, Pixels
from harness.runtime.sam3.prompts import Coordinates, Labels

Color = tuple[int, int, int]

OPACITY = 0.42
"""Opacity of a mask over the photograph."""
POSITIVE: Color = (64, 220, 96)
NEGATIVE: Color = (255, 72, 72)
WHITE: Color = (255, 255, 255)
BLACK: Color = (0, 0, 0)

_GOLDEN_ANGLE = (5**0.5 - 1) / 2
"""Step between hues as a share of a full circle; hues at this step stay apart, however many there are."""
_FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "Arial Unicode.ttf", "Arial.ttf")
"""File names of system fonts, for labels with letters that Pillow's default font lacks."""
_LONGEST_LABEL = 32


@dataclass(frozen=True)
class Style:
    """Sizes in pixels for an image.

    Attributes:
        line: Width of outlines and boxes.
        text: Height of the font.
    """

    line: int
    text: int

    @classmethod
    def suiting(cls, size: tuple[int, int]) -> Style:
        """Returns the style for an image of this width and height."""
        diagonal = float(np.hypot(*size))
        return cls(line=max(2, round(diagonal / 400)), text=max(12, round(diagonal / 40)))


def draw(pixels: Pixels, objects: Objects, prompts: Sequence[Prompt | ObjectPrompt] = ()) -> Image.Image:
    """Draws the objects of a photograph into it; the highest score is on top.

    Args:
        pixels: The photograph, uint8 [h, w, 3].
        objects: Its objects. An object of a video has the colour of its id, which is written beside its category;
            others have the colours of their indices.
        prompts: Prompts whose boxes and points are marked: green where positive, red where negative.

    Returns:
        RGB, of the photograph's size.
    """
    style = Style.suiting(objects.size)
    palette = [color_of(number) for number in objects.ids or range(len(objects.scores))]
    lowest_first = np.argsort(objects.scores, kind="stable").tolist()
    canvas = np.array(pixels)
    for index in lowest_first:
        _tint(canvas, objects.mask(index), palette[index], style)
    image = Image.fromarray(canvas)
    pen = ImageDraw.Draw(image)
    for index in lowest_first:
        _rectangle(pen, objects.boxes[index].tolist(), palette[index], style.line, objects.size)
    for prompt in prompts:
        _mark_prompt(pen, prompt, style, objects.size)
    _write_labels(pen, objects, palette, style)
    return image


def color_of(index: int) -> Color:
    """Returns the colour with this index, from 0: bright, saturated, and far in hue from those before it."""
    lightness = (0.56, 0.46, 0.66)[index // 12 % 3]
    red, green, blue = colorsys.hls_to_rgb((0.58 + index * _GOLDEN_ANGLE) % 1, lightness, 0.95)
    return round(red * 255), round(green * 255), round(blue * 255)


def outline(mask: Mask, width: int) -> Mask:
    """Returns the pixels of a mask [h, w] at most `width` steps from its edge; the image's border is no edge."""
    inner = mask
    for _ in range(width):
        padded = np.pad(inner, 1, mode="edge")
        inner = inner & padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return mask & ~inner


def _tint(canvas: Pixels, mask: Mask, color: Color, style: Style) -> None:
    """Colours a mask in place: transparent inside, opaque along its edge; changes its bounding box alone."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not len(rows):
        return
    # One pixel more, so that the edge of the window does not count as the image's border.
    window = (slice(max(0, rows[0] - 1), rows[-1] + 2), slice(max(0, columns[0] - 1), columns[-1] + 2))
    part, view = mask[window], canvas[window]
    mixed = view[part] * (1 - OPACITY) + np.array(color) * OPACITY
    view[part] = np.rint(mixed).astype(np.uint8)
    view[outline(part, style.line)] = color


def _rectangle(pen: ImageDraw.ImageDraw, box: Sequence[float], color: Color, width: int, size: tuple[int, int]) -> None:
    """Draws the part of a box that is inside the image."""
    right, bottom = size[0] - 1, size[1] - 1
    x0, x1 = sorted((min(max(box[0], 0), right), min(max(box[2], 0), right)))
    y0, y1 = sorted((min(max(box[1], 0), bottom), min(max(box[3], 0), bottom)))
    pen.rectangle((round(x0), round(y0), round(x1), round(y1)), outline=color, width=width)


def _mark_prompt(pen: ImageDraw.ImageDraw, marked: Prompt | ObjectPrompt, style: Style, size: tuple[int, int]) -> None:
    """Draws the prompt's boxes, framed in white, and its points, as discs with a plus or a minus."""
    prompt = marked if isinstance(marked, Prompt) else _marks(marked)
    for box, positive in _labelled(prompt.boxes, prompt.box_labels):
        _rectangle(pen, box, WHITE, style.line * 2, size)
        _rectangle(pen, box, POSITIVE if positive else NEGATIVE, style.line, size)
    radius = style.text * 0.45
    for (x, y), positive in _labelled(prompt.points, prompt.point_labels):
        color = POSITIVE if positive else NEGATIVE
        pen.circle((x, y), radius, fill=color, outline=WHITE, width=style.line)
        arm = radius * 0.5
        pen.line((x - arm, y, x + arm, y), fill=WHITE, width=style.line)
        if positive:
            pen.line((x, y - arm, x, y + arm), fill=WHITE, width=style.line)


def _marks(prompt: ObjectPrompt) -> Prompt:
    box = None if prompt.box is None else np.asarray(prompt.box, np.float64).reshape(1, 4)
    labels = None if prompt.labels is None else np.asarray(prompt.labels, bool)
    return Prompt(boxes=box, points=prompt.points, point_labels=labels)


def _labelled(items: Coordinates, labels: Labels) -> list[tuple[list[float], bool]]:
    """Returns boxes or points with their labels, as many as the validated prompt has."""
    coordinates = [] if items is None else [[float(value) for value in item] for item in items]
    return list(zip(coordinates, [True] * len(coordinates) if labels is None else map(bool, labels), strict=True))


def _write_labels(pen: ImageDraw.ImageDraw, objects: Objects, palette: Sequence[Color], style: Style) -> None:
    """Writes a label on each box in the order of scores; a label moves down where its place is taken."""
    names = {category: _shortened(category) for category in objects.categories}
    fonts = {category: _font(name, style.text) for category, name in names.items()}
    margin = max(2, style.text // 4)
    placed: list[tuple[float, float, float, float]] = []
    for index in np.argsort(-objects.scores, kind="stable").tolist():
        category = objects.categories[index]
        prefix = "" if objects.ids is None else f"{objects.ids[index]} "
        text, font = f"{prefix}{names[category]} {objects.scores[index]:.2f}", fonts[category]
        left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
        width, height = right - left + 2 * margin, bottom - top + 2 * margin
        x, y = _place(objects.boxes[index].tolist(), width, height, objects.size, placed)
        placed.append((x, y, x + width, y + height))
        color = palette[index]
        pen.rounded_rectangle((x, y, x + width, y + height), radius=margin, fill=color)
        pen.text((x + margin - left, y + margin - top), text, font=font, fill=_readable_on(color))


def _place(
    box: Sequence[float],
    width: float,
    height: float,
    size: tuple[int, int],
    placed: Sequence[tuple[float, float, float, float]],
) -> tuple[float, float]:
    """Returns the upper left corner of a label: above its box if there is room, otherwise the next free place below."""
    x = min(max(box[0], 0), max(0, size[0] - width - 1))
    last = max(0, size[1] - height - 1)
    first = min(max(box[1] - height, 0), last)
    y = first
    while any(
        x < right and left < x + width and y < bottom and top < y + height for left, top, right, bottom in placed
    ):
        y += height + 1
        if y > last:
            return x, first
    return x, y


def _readable_on(color: Color) -> Color:
    # Rec. 601 luma.
    return BLACK if 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2] > 140 else WHITE


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_LABEL else f"{text[: _LONGEST_LABEL - 1].rstrip()}…"


def _font(text: str, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Returns Pillow's default font, which has ASCII, or a system font for other letters, if there is one."""
    if not text.replace("…", "").isascii():
        for name in _FONTS:
            try:
                return ImageFont.truetype(name, size)
            except OSError:
                continue
    return ImageFont.load_default(size)


def png(image: Image.Image) -> bytes:
    """Returns the PNG file of an image."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def mask_png(mask: Mask) -> bytes:
    """Returns the PNG file of a mask [h, w], with 1 bit per pixel."""
    return png(Image.fromarray(mask))


def numbered_pixels(objects: Objects) -> Array:
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
    pixels = numbered_pixels(objects)
    image = Image.fromarray(pixels)
    if pixels.dtype == np.uint8:
        image.putpalette(_palette())
    return png(image)


@cache
def _palette() -> bytes:
    return bytes(value for color in (BLACK, *map(color_of, range(255))) for value in color)
