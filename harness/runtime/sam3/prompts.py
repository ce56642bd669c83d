"""Checks prompts on an image, and encodes them as the padded arrays that the compiled model takes.

The meaning is that of upstream's `sam3.model.sam3_image_processor.Sam3Processor`; boxes and points are given in pixels
of the image, where (0, 0) is its upper left corner and (width, height) its lower right one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.runtime.arrays import Array
from harness.runtime.errors import ModelError
from harness.runtime.sam3.description import Capacity
from harness.runtime.sam3.tokenizer import CONTEXT_LENGTH, Tokenizer

_MAX_LENGTH = 40


def parse_boxes(raw: Any) -> npt.NDArray[np.float64]:
    """Returns boxes as float64 [m, 4]; raises a `ModelError` if one has no area."""
    boxes = parse_numbers(raw, "box", "boxes", "x0, y0, x1, y1")
    for index, box in enumerate(boxes.tolist(), 1):
        x0, y0, x1, y1 = box
        if x1 <= x0 or y1 <= y0:
            fault = "reversed" if x1 < x0 or y1 < y0 else "empty"
            raise ModelError(
                f"Box {index} ({join_numbers(box)}) is {fault}; "
                "give (x0, y0, x1, y1) with x0 < x1 and y0 < y1, in pixels."
            )
    return boxes


def clip_boxes(
    boxes: npt.NDArray[np.float64], size: tuple[int, int]
) -> tuple[npt.NDArray[np.float64], tuple[str, ...]]:
    """Clips boxes [m, 4] to the image; returns them with a note for each box that was larger, or less than a pixel.

    Raises:
        ModelError: A box is outside the image.
    """
    width, height = size
    for index, box in enumerate(boxes.tolist(), 1):
        x0, y0, x1, y1 = box
        if x0 >= width or y0 >= height or x1 <= 0 or y1 <= 0:
            raise ModelError(
                f"Box {index} ({join_numbers(box)}) is outside the image of {width} x {height} pixels; "
                "give one that overlaps it."
            )
    clipped = np.clip(boxes, 0, np.array([width, height, width, height], np.float64))
    notes = tuple(
        f"Box {index} reaches beyond the image of {width} x {height} pixels; the part inside counts."
        for index in (np.flatnonzero((boxes != clipped).any(axis=1)) + 1).tolist()
    )
    notes += tuple(
        f"Box {index} ({join_numbers(boxes[index - 1])}) is less than a pixel; coordinates are pixels of the image of "
        f"{width} x {height}, and not parts of 1."
        for index in (np.flatnonzero((boxes[:, 2:] - boxes[:, :2] < 1).all(axis=1)) + 1).tolist()
    )
    return clipped, notes


def check_points(points: npt.NDArray[np.float64], size: tuple[int, int]) -> None:
    """Checks that points [n, 2] are inside the image or on its edge.

    Raises:
        ModelError: A point is outside.
    """
    width, height = size
    for index, (x, y) in enumerate(points.tolist(), 1):
        if not (0 <= x <= width and 0 <= y <= height):
            raise ModelError(
                f"Point {index} ({x:g}, {y:g}) is outside the image of {width} x {height} pixels; give one inside."
            )


def parse_numbers(raw: Any, singular: str, plural: str, coordinates: str) -> npt.NDArray[np.float64]:
    """Returns finite numbers as float64 [count, number of coordinates].

    Args:
        raw: The user's numbers; None for none.
        singular: Name of one thing in sentences, such as `box`.
        plural: Name of several things, such as `boxes`.
        coordinates: Names of the coordinates, separated by commas.

    Raises:
        ModelError: The value is no list of such numbers.
    """
    length = coordinates.count(",") + 1
    if raw is None:
        return np.empty((0, length))
    try:
        numbers = np.asarray(raw, np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"The {plural} {abbreviate(raw)} are no numbers; give ({coordinates}) for each.") from error
    if numbers.ndim and not len(numbers):
        return np.empty((0, length))
    if numbers.ndim != 2 or numbers.shape[1] != length:
        raise ModelError(f"The {plural} {abbreviate(raw)} are no list of ({coordinates}); give such a list.")
    for index in np.flatnonzero(~np.isfinite(numbers).all(axis=1)).tolist():
        row = join_numbers(numbers[index])
        raise ModelError(f"{singular.capitalize()} {index + 1} ({row}) is not finite; give ({coordinates}) in pixels.")
    return numbers


def parse_labels(raw: Any, count: int, singular: str) -> npt.NDArray[np.int64]:
    """Returns labels as int64 [count]; all are 1 where no labels are given.

    Raises:
        ModelError: The value is no list of `count` labels.
    """
    if raw is None:
        return np.ones(count, np.int64)
    labels = np.asarray(raw)
    if labels.ndim != 1 or not np.isin(labels, (0, 1)).all():
        raise ModelError(
            f"The {singular} labels {abbreviate(raw)} are no list of True and False; give one for each {singular}."
        )
    if len(labels) != count:
        raise ModelError(
            f"The numbers of {singular} labels and of prompts differ, {len(labels)} and {count}; give as many."
        )
    return labels.astype(np.int64)


def join_numbers(numbers: Iterable[float]) -> str:
    """Returns numbers as text, with commas between them."""
    return ", ".join(f"{number:g}" for number in numbers)


def abbreviate(value: Any) -> str:
    """Returns a value as one line of limited length."""
    text = ascii(value) if not isinstance(value, str) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}…"


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
    boxes, box_labels, points, point_labels = _parse_geometry(prompt, capacity)
    tokens, notes = _tokenize(prompt.text, tokenizer)
    boxes, clipped = clip_boxes(boxes, size)
    check_points(points, size)
    low, high = boxes[:, :2], boxes[:, 2:]
    scale = np.array(size, np.float64)
    normalized = np.concatenate([(low + high) / 2 / scale, (high - low) / scale], axis=1)
    geometry = {
        "points": _padded(points / scale, capacity.points, np.float32),
        "points_mask": _padding(len(points), capacity.points),
        "point_labels": _padded(point_labels, capacity.points, np.int64),
        "boxes": _padded(normalized, capacity.boxes, np.float32),
        "boxes_mask": _padding(len(boxes), capacity.boxes),
        "box_labels": _padded(box_labels, capacity.boxes, np.int64),
    }
    return EncodedPrompt(tokens, geometry, (*notes, *clipped))


def _parse_geometry(prompt: Prompt, capacity: Capacity) -> tuple[Array, Array, Array, Array]:
    """Returns the geometry of a prompt: boxes float64 [m, 4], their labels, points float64 [n, 2], and their labels.

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
    return boxes, box_labels, points, point_labels


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
