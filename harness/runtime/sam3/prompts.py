"""Encodes prompts on an image as the padded arrays that the compiled model takes.

The meaning is that of upstream's `sam3.model.sam3_image_processor.Sam3Processor`; boxes and points are given in pixels
of the image, where (0, 0) is its upper left corner and (width, height) its lower right one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.runtime.errors import ModelError
from harness.runtime.sam3.coordinates import (
    abbreviate,
    check_points,
    clip_boxes,
    parse_boxes,
    parse_labels,
    parse_numbers,
)
from harness.runtime.sam3.description import Capacity
from harness.runtime.sam3.tokenizer import CONTEXT_LENGTH, Tokenizer

Array = npt.NDArray[Any]

Coordinates = Sequence[Sequence[float]] | Array | None
"""Boxes or points, one after another; None for none."""
Labels = Sequence[bool] | Array | None
"""True or False for each box or point; None for True everywhere."""

VISUAL = "visual"
"""The text of a prompt without text, as in `Sam3Processor.add_geometric_prompt`."""


@dataclass(frozen=True)
class Prompt:
    """A prompt for all objects of a kind in an image: a text, boxes, points, or several of them together.

    Attributes:
        text: A noun phrase; without a text, boxes and points are the prompt.
        boxes: (x0, y0, x1, y1) each, in pixels. Boxes are clipped to the image.
        box_labels: For each box, whether it is positive (True) or negative (False); all True by default.
        points: (x, y) each, in pixels.
        point_labels: Labels of the points, like `box_labels`.
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
        notes: A sentence for each part of the prompt that was changed or ignored.
    """

    tokens: npt.NDArray[np.int64]
    geometry: dict[str, Array]
    notes: tuple[str, ...] = ()


def check_prompt(prompt: Prompt, capacity: Capacity, tokenizer: Tokenizer) -> None:
    """Checks everything of a prompt that does not depend on the image.

    Raises:
        ModelError: The prompt is empty, or invalid for any image.
    """
    _parse_geometry(prompt, capacity)
    _tokenize(prompt.text, tokenizer)


def encode_prompt(prompt: Prompt, size: tuple[int, int], capacity: Capacity, tokenizer: Tokenizer) -> EncodedPrompt:
    """Checks a prompt, normalizes and pads it.

    Args:
        prompt: The prompt.
        size: Width and height of the image in pixels.
        capacity: The maximum numbers of points and boxes of the model.
        tokenizer: The model's.

    Raises:
        ModelError: The prompt is empty, or invalid for this image.
    """
    parsed = _parse_geometry(prompt, capacity)
    tokens, notes = _tokenize(prompt.text, tokenizer)
    boxes, clipped = clip_boxes(parsed.boxes, size)
    check_points(parsed.points, size)
    low, high = boxes[:, :2], boxes[:, 2:]
    scale = np.array(size, np.float64)
    normalized = np.concatenate([(low + high) / 2 / scale, (high - low) / scale], axis=1)
    geometry = {
        "points": _padded(parsed.points / scale, capacity.points, np.float32),
        "points_mask": _padding(len(parsed.points), capacity.points),
        "point_labels": _padded(parsed.point_labels, capacity.points, np.int64),
        "boxes": _padded(normalized, capacity.boxes, np.float32),
        "boxes_mask": _padding(len(boxes), capacity.boxes),
        "box_labels": _padded(parsed.box_labels, capacity.boxes, np.int64),
    }
    return EncodedPrompt(tokens, geometry, (*notes, *clipped))


@dataclass(frozen=True, eq=False)
class _Geometry:
    """Boxes float64 [m, 4] and points float64 [n, 2] in pixels, labels int64 [m] and [n]."""

    boxes: npt.NDArray[np.float64]
    box_labels: npt.NDArray[np.int64]
    points: npt.NDArray[np.float64]
    point_labels: npt.NDArray[np.int64]


def _parse_geometry(prompt: Prompt, capacity: Capacity) -> _Geometry:
    """Returns boxes and points of a prompt as arrays.

    Raises:
        ModelError: They are no numbers, too many, or not as many as their labels, or the prompt is empty.
    """
    boxes, points = parse_boxes(prompt.boxes), parse_numbers(prompt.points, "point", "points", "x, y")
    box_labels = parse_labels(prompt.box_labels, len(boxes), "box")
    point_labels = parse_labels(prompt.point_labels, len(points), "point")
    for plural, count, limit in (("boxes", len(boxes), capacity.boxes), ("points", len(points), capacity.points)):
        if count > limit:
            raise ModelError(f"The prompt has {count} {plural}, this model takes at most {limit}; give fewer.")
    if prompt.text is None and not len(boxes) and not len(points):
        raise ModelError("Nothing is asked; give a text, a box or a point.")
    return _Geometry(boxes, box_labels, points, point_labels)


def _tokenize(text: str | None, tokenizer: Tokenizer) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Returns the tokens int64 [1, 32] of a prompt's text, with a note if the text is longer than the model reads.

    Raises:
        ModelError: The text is no string, or has no tokens.
    """
    if text is None:
        return tokenizer.tokenize([VISUAL]).ids, ()
    if not isinstance(text, str):
        raise ModelError(f"The text is {abbreviate(text)}; give a string.")
    if not tokenizer.encode(text):
        raise ModelError(f"The text {abbreviate(text)} is empty; name what to look for, or leave the text out.")
    tokens = tokenizer.tokenize([text])
    if not tokens.cut[0]:
        return tokens.ids, ()
    limit = CONTEXT_LENGTH - 2
    count = limit + tokens.cut[0]
    note = f"The text {abbreviate(text)} has {count} tokens; the model reads the first {limit} and ignores the rest."
    return tokens.ids, (note,)


def _padded(values: Array, capacity: int, dtype: npt.DTypeLike) -> Array:
    """Returns an array [capacity, 1, …] with the values [count, …] and zeros after them."""
    padded = np.zeros((capacity, 1, *values.shape[1:]), dtype)
    padded[: len(values), 0] = values
    return padded


def _padding(count: int, capacity: int) -> npt.NDArray[np.bool_]:
    """Returns a mask [1, capacity] that is True after the first `count` places."""
    return np.arange(capacity)[None] >= count
