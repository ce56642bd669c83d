"""Boxes, points and labels as users give them, checked: arrays, or one sentence on what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.runtime.errors import Sam3Error

_TEXT_SHOWN = 40


def boxes_of(given: Any) -> npt.NDArray[np.float64]:
    """Boxes [m, 4] with an area."""
    boxes = numbers_of(given, "box", "boxes", "x0, y0, x1, y1")
    for index, box in enumerate(boxes.tolist(), 1):
        x0, y0, x1, y1 = box
        if x1 <= x0 or y1 <= y0:
            fault = "reversed" if x1 < x0 or y1 < y0 else "empty"
            raise Sam3Error(
                f"Box {index} ({listed(box)}) is {fault}; give (x0, y0, x1, y1) with x0 < x1 and y0 < y1, in pixels."
            )
    return boxes


def inside(boxes: npt.NDArray[np.float64], size: tuple[int, int]) -> tuple[npt.NDArray[np.float64], tuple[str, ...]]:
    """The parts of boxes [m, 4] that are inside the image, and a note for each box that is larger."""
    width, height = size
    for index, box in enumerate(boxes.tolist(), 1):
        x0, y0, x1, y1 = box
        if x0 >= width or y0 >= height or x1 <= 0 or y1 <= 0:
            raise Sam3Error(
                f"Box {index} ({listed(box)}) is outside the image of {width} x {height} pixels; "
                "give one that overlaps it."
            )
    inside = np.clip(boxes, 0, np.array([width, height, width, height], np.float64))
    notes = tuple(
        f"Box {index} reaches beyond the image of {width} x {height} pixels; the part inside counts."
        for index in (np.flatnonzero((boxes != inside).any(axis=1)) + 1).tolist()
    )
    return inside, notes


def check_points(points: npt.NDArray[np.float64], size: tuple[int, int]) -> None:
    """Points [n, 2] must be inside the image or on its edge."""
    width, height = size
    for index, (x, y) in enumerate(points.tolist(), 1):
        if not (0 <= x <= width and 0 <= y <= height):
            raise Sam3Error(
                f"Point {index} ({x:g}, {y:g}) is outside the image of {width} x {height} pixels; give one inside."
            )


def numbers_of(given: Any, one: str, several: str, coordinates: str) -> npt.NDArray[np.float64]:
    """Finite float64 [count, number of coordinates]."""
    length = coordinates.count(",") + 1
    if given is None:
        return np.empty((0, length))
    try:
        numbers = np.asarray(given, np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise Sam3Error(f"The {several} {shown(given)} are no numbers; give ({coordinates}) for each.") from error
    if numbers.ndim and not len(numbers):
        return np.empty((0, length))
    if numbers.ndim != 2 or numbers.shape[1] != length:
        raise Sam3Error(f"The {several} {shown(given)} are no list of ({coordinates}); give such a list.")
    for index in np.flatnonzero(~np.isfinite(numbers).all(axis=1)).tolist():
        row = listed(numbers[index])
        raise Sam3Error(f"{one.capitalize()} {index + 1} ({row}) is not finite; give ({coordinates}) in pixels.")
    return numbers


def labels_of(given: Any, count: int, one: str) -> npt.NDArray[np.int64]:
    """int64 [count]; all 1 where none are given."""
    if given is None:
        return np.ones(count, np.int64)
    labels = np.asarray(given)
    if labels.ndim != 1 or not np.isin(labels, (0, 1)).all():
        raise Sam3Error(f"The {one} labels {shown(given)} are no list of True and False; give one for each {one}.")
    if len(labels) != count:
        raise Sam3Error(f"The numbers of {one} labels and of prompts differ, {len(labels)} and {count}; give as many.")
    return labels.astype(np.int64)


def listed(numbers: Iterable[float]) -> str:
    """Writes numbers with commas between them."""
    return ", ".join(f"{number:g}" for number in numbers)


def shown(value: Any) -> str:
    """A value, in one line that is not too long."""
    text = ascii(value) if not isinstance(value, str) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= _TEXT_SHOWN else f"{text[:_TEXT_SHOWN]}…"
