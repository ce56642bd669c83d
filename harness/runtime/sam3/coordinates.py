"""Checks boxes, points and labels from users: returns arrays, or raises one sentence on what is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.runtime.errors import ModelError

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
