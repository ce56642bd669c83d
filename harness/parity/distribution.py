"""Measures how the errors of an output are distributed, for display only; no verdict depends on it."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from harness.core.outcome import BINS, CELLS, EDGES, MASKS, PIXELS, Distribution, MaskPicture, Verdict
from harness.core.program import Array
from harness.parity import metrics

_MIN_IMAGE_SIZE = 8
"""Height and width from which the last two axes may be an image."""
_LEVELS = 8
"""Levels of grey on each side of zero."""
_MARK = (226, 0, 120)
"""Colour of pixels that differ, far from grey, black and white."""


def add_distributions(
    verdicts: tuple[Verdict, ...], actual: Mapping[str, Array], reference: Mapping[str, Array]
) -> tuple[Verdict, ...]:
    """Adds the distribution of errors to each verdict whose output has the reference's shape and dtype.

    Args:
        verdicts: Verdicts of a judge.
        actual: The compiled model's outputs by name; verdicts on outputs that are missing here are unchanged.
        reference: PyTorch's outputs by name.
    """

    def add(verdict: Verdict) -> Verdict:
        a, r = actual.get(verdict.name), reference.get(verdict.name)
        if a is None or r is None or not r.size or (a.shape, a.dtype) != (r.shape, r.dtype):
            return verdict
        return replace(verdict, distribution=distribution(verdict.name, a, r))

    return tuple(map(add, verdicts))


def distribution(name: str, actual: Array, reference: Array) -> Distribution | None:
    """Measures the distribution of one output's errors; None if it would be empty.

    Args:
        name: Name of the output, whose last word says whether it is a mask: `mask`, `masks` or `logits`.
        actual: The compiled model's output.
        reference: PyTorch's output, of the same shape and dtype.
    """
    is_exact = metrics.is_exact(reference.dtype)
    masks = re.split(r"[/_]", name)[-1] in ("mask", "masks", "logits")
    image = is_image(reference.shape, masks)
    measured = Distribution(
        histogram=() if is_exact else histogram(actual, reference),
        largest=largest_errors(actual, reference) if image and not is_exact else (),
        masks=mask_pictures(actual, reference) if image and masks else (),
    )
    return None if measured == Distribution() else measured


def is_image(shape: tuple[int, ...], masks: bool) -> bool:
    """Returns whether the last two axes are height and width.

    Feature maps are square, and tokens × channels are not; only masks have a photograph's shape.
    """
    if len(shape) < 3 or 0 in shape or min(shape[-2:]) < _MIN_IMAGE_SIZE:
        return False
    return masks or shape[-1] == shape[-2]


def histogram(actual: Array, reference: Array) -> tuple[int, ...]:
    """Counts elements by |actual - reference| / gate; see `Distribution`."""
    counts = np.zeros(BINS, np.int64)
    for a, r in metrics.chunks(actual, reference):
        with np.errstate(all="ignore"):
            error, gate = np.abs(a - r), metrics.ATOL + metrics.RTOL * np.abs(r)
        special = ~(np.isfinite(a) & np.isfinite(r))
        if special.any():
            error[special] = np.where(metrics.same_specials(a[special], r[special]), 0.0, np.inf)
            gate[special] = 1.0
        above = [error.size]
        for edge in EDGES:
            above.append(int(np.count_nonzero(error > edge * gate)) if above[-1] else 0)
        counts[:-1] += -np.diff(above)
        counts[-1] += above[-1]
    return tuple(int(count) for count in counts)


def largest_errors(actual: Array, reference: Array) -> tuple[tuple[float, ...], ...]:
    """Finds the largest |actual - reference| in each cell of the image; see `Distribution`."""
    largest, error = np.zeros(reference.shape[-2:]), np.empty(reference.shape[-2:])
    difference = np.empty_like(error, np.complex128 if reference.dtype.kind == "c" else np.float64)
    for a, r in zip(_planes(actual), _planes(reference), strict=True):
        with np.errstate(all="ignore"):
            np.abs(np.subtract(a, r, out=difference, dtype=difference.dtype), out=error)
        special = ~np.isfinite(error)
        if special.any():
            error[special] = np.where(metrics.same_specials(a[special], r[special]), 0.0, np.inf)
        np.maximum(largest, error, out=largest)
    return tuple(tuple(float(cell) for cell in row) for row in _cells(largest, CELLS))


def mask_pictures(actual: Array, reference: Array) -> tuple[MaskPicture, ...]:
    """Draws the masks with the most information; see `Distribution`."""
    tvm, torch = _planes(actual), _planes(reference)
    differing = [int(np.count_nonzero(_differing_pixels(a, r))) for a, r in zip(tvm, torch, strict=True)]
    areas = [int(np.count_nonzero(r > 0)) for r in torch]
    ranks = [(-count, -min(area, torch[0].size - area)) for count, area in zip(differing, areas, strict=True)]
    indices = sorted(sorted(range(len(ranks)), key=ranks.__getitem__)[:MASKS])
    return tuple(_picture(np.unravel_index(n, reference.shape[:-2]), differing[n], tvm[n], torch[n]) for n in indices)


def _planes(array: Array) -> Array:
    """Returns an array [..., h, w] as planes [n, h, w]."""
    return array.reshape(-1, *array.shape[-2:])


def _differing_pixels(a: Array, r: Array) -> Array:
    pixels: Array = (a > 0) != (r > 0)
    return pixels if metrics.is_exact(r.dtype) else pixels | (np.isnan(a) != np.isnan(r))


def _picture(index: tuple[Any, ...], differing: int, a: Array, r: Array) -> MaskPicture:
    """Draws the compiled model's mask `a` and PyTorch's `r`, [h, w], in levels of PyTorch's largest value."""
    finite = np.abs(r[np.isfinite(r)])
    scale = float(finite.max(initial=0)) or 1.0
    torch, tvm = (_grey(_sample(mask), scale) for mask in (r, a))
    return MaskPicture(
        index=tuple(int(position) for position in index),
        size=(r.shape[0], r.shape[1]),
        differing=differing,
        torch=torch,
        tvm=None if tvm == torch else tvm,
        marks=_marks(_cells(_differing_pixels(a, r), PIXELS)) if differing else None,
    )


def _sample(plane: Array) -> Array:
    """Takes the pixels in the middle of a picture's cells; an average would blur its edge."""
    edges = (np.arange(n + 1) * length // n for n, length in _lengths(plane, PIXELS))
    rows, columns = ((axis_edges[:-1] + axis_edges[1:]) // 2 for axis_edges in edges)
    pixels: Array = plane[np.ix_(rows, columns)]
    return pixels


def _cells(plane: Array, limit: int) -> Array:
    """Takes the maximum of each cell."""
    rows, columns = (np.arange(n) * length // n for n, length in _lengths(plane, limit))
    cells: Array = np.maximum.reduceat(np.maximum.reduceat(plane, rows, axis=0), columns, axis=1)
    return cells


def _lengths(plane: Array, limit: int) -> list[tuple[int, int]]:
    """Returns, for each axis, the number of nearly square cells and of the pixels that they divide."""
    scale = max(1.0, max(plane.shape) / limit)
    return [(max(1, round(length / scale)), length) for length in plane.shape]


def _grey(plane: Array, scale: float) -> bytes:
    """Draws a mask as a PNG file: black and white if it is boolean, else 16 levels of grey from -scale to scale."""
    from PIL import Image

    if plane.dtype == bool:
        levels = plane * 255
    else:
        with np.errstate(all="ignore"):
            levels = np.clip(np.ceil((plane.astype(np.float64) / scale + 1) * _LEVELS) - 1, 0, 2 * _LEVELS - 1)
        levels = np.nan_to_num(levels) * (255 // (2 * _LEVELS - 1))
    return _png(Image.fromarray(levels.astype(np.uint8)))


def _marks(differing: Array) -> bytes:
    """Draws a PNG file that is transparent except where pixels differ, bool [h, w]."""
    from PIL import Image

    picture = Image.fromarray(differing.astype(np.uint8)).convert("P")
    picture.putpalette([0, 0, 0, *_MARK])
    return _png(picture, bits=1, transparency=0)


def _png(picture: Any, **options: int) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True, **options)
    return file.getvalue()
