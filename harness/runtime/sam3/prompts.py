"""Prompts: what a user asks of an image, and the padded arrays that the compiled model takes.

The meaning is that of upstream's `sam3.model.sam3_image_processor.Sam3Processor`; boxes and points are given in pixels
of the image, where (0, 0) is its upper left corner and (width, height) its lower right one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.runtime.errors import Sam3Error
from harness.runtime.manifest import Capacity
from harness.runtime.sam3.coordinates import boxes_of, check_points, inside, labels_of, numbers_of, shown
from harness.runtime.sam3.tokenizer import CONTEXT_LENGTH, Tokenizer

Array = npt.NDArray[Any]

Coordinates = Sequence[Sequence[float]] | Array | None
"""Boxes or points, one after another; None for none."""
Labels = Sequence[bool] | Array | None
"""True or False for each box or point; None for True everywhere."""

VISUAL = "visual"
"""The text where none is given, as in `Sam3Processor.add_geometric_prompt`."""


@dataclass(frozen=True)
class Prompt:
    """A question about an image: a text, boxes, points, or several of them together.

    Attributes:
        text: A noun phrase; without one, boxes and points say what is meant.
        boxes: (x0, y0, x1, y1) each, in pixels. The part of a box that is outside the image is cut off.
        box_labels: For each box, whether it shows what is meant (True) or what is not (False); all True by default.
        points: (x, y) each, in pixels.
        point_labels: As `box_labels`.
    """

    text: str | None = None
    boxes: Coordinates = None
    box_labels: Labels = None
    points: Coordinates = None
    point_labels: Labels = None


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """A prompt as the model takes it, padded to its capacity of N points and M boxes; masks are True where padded.

    Attributes:
        tokens: int64 [1, 32].
        geometry: `points` fp32 [N, 1, 2] (x, y), `points_mask` bool [1, N], `point_labels` int64 [N, 1];
            `boxes` fp32 [M, 1, 4] (cx, cy, w, h), `boxes_mask` bool [1, M], `box_labels` int64 [M, 1];
            coordinates normalized to [0, 1], labels 1 for positive and 0 for negative.
        notes: A sentence for each thing that the model does not get as it was given.
    """

    tokens: npt.NDArray[np.int64]
    geometry: dict[str, Array]
    notes: tuple[str, ...] = ()


def check_prompt(prompt: Prompt, capacity: Capacity, tokenizer: Tokenizer) -> None:
    """Checks everything of a prompt that does not depend on the image.

    Raises:
        Sam3Error: Nothing is asked, or the prompt makes no sense for any image.
    """
    _checked(prompt, capacity)
    _tokens(prompt.text, tokenizer)


def encode_prompt(prompt: Prompt, size: tuple[int, int], capacity: Capacity, tokenizer: Tokenizer) -> EncodedPrompt:
    """Checks a prompt, normalizes and pads it.

    Args:
        prompt: What is asked.
        size: Width and height of the image in pixels.
        capacity: The most points and boxes that the model takes.
        tokenizer: The model's.

    Raises:
        Sam3Error: Nothing is asked, or the prompt makes no sense for this image.
    """
    checked = _checked(prompt, capacity)
    tokens, notes = _tokens(prompt.text, tokenizer)
    boxes, clipped = inside(checked.boxes, size)
    check_points(checked.points, size)
    low, high = boxes[:, :2], boxes[:, 2:]
    scale = np.array(size, np.float64)
    normalized = np.concatenate([(low + high) / 2 / scale, (high - low) / scale], axis=1)
    geometry = {
        "points": _padded(checked.points / scale, capacity.points, np.float32),
        "points_mask": _padding(len(checked.points), capacity.points),
        "point_labels": _padded(checked.point_labels, capacity.points, np.int64),
        "boxes": _padded(normalized, capacity.boxes, np.float32),
        "boxes_mask": _padding(len(boxes), capacity.boxes),
        "box_labels": _padded(checked.box_labels, capacity.boxes, np.int64),
    }
    return EncodedPrompt(tokens, geometry, (*notes, *clipped))


@dataclass(frozen=True, eq=False)
class _Geometry:
    """Boxes float64 [m, 4] and points float64 [n, 2] in pixels, labels int64 [m] and [n]."""

    boxes: npt.NDArray[np.float64]
    box_labels: npt.NDArray[np.int64]
    points: npt.NDArray[np.float64]
    point_labels: npt.NDArray[np.int64]


def _checked(prompt: Prompt, capacity: Capacity) -> _Geometry:
    boxes, points = boxes_of(prompt.boxes), numbers_of(prompt.points, "point", "points", "x, y")
    box_labels = labels_of(prompt.box_labels, len(boxes), "box")
    point_labels = labels_of(prompt.point_labels, len(points), "point")
    for what, count, most in (("boxes", len(boxes), capacity.boxes), ("points", len(points), capacity.points)):
        if count > most:
            raise Sam3Error(f"The prompt has {count} {what}, this model takes at most {most}; give fewer.")
    if prompt.text is None and not len(boxes) and not len(points):
        raise Sam3Error("Nothing is asked; give a text, a box or a point.")
    return _Geometry(boxes, box_labels, points, point_labels)


def _tokens(text: str | None, tokenizer: Tokenizer) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    if text is None:
        return tokenizer.tokenize([VISUAL]).ids, ()
    if not isinstance(text, str):
        raise Sam3Error(f"The text is {shown(text)}; give a string.")
    if not tokenizer.encode(text):
        raise Sam3Error(f"The text {shown(text)} is empty; name what to look for, or leave the text out.")
    tokens = tokenizer.tokenize([text])
    if not tokens.cut[0]:
        return tokens.ids, ()
    kept = CONTEXT_LENGTH - 2
    count = kept + tokens.cut[0]
    note = f"The text {shown(text)} has {count} tokens; the model reads the first {kept} and ignores the rest."
    return tokens.ids, (note,)


def _padded(values: Array, capacity: int, dtype: npt.DTypeLike) -> Array:
    """[capacity, 1, …] with zeros after the values [count, …]."""
    padded = np.zeros((capacity, 1, *values.shape[1:]), dtype)
    padded[: len(values), 0] = values
    return padded


def _padding(count: int, capacity: int) -> npt.NDArray[np.bool_]:
    """[1, capacity], True after the first `count`."""
    return np.arange(capacity)[None] >= count
