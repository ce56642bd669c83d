"""Measures how the errors of an output are distributed, for who looks at them; nothing is judged by it."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.distribution import BINS, CELLS, EDGES, MASKS, PIXELS, Distribution, MaskPicture
from harness.core.outcome import Verdict
from harness.parity import metrics

Array = npt.NDArray[Any]

_SMALLEST = 8
"""Height and width from which on two axes are an image."""
_LEVELS = 8
"""Levels of grey on either side of zero."""
_MARK = (226, 0, 120)
"""Colour of pixels that differ: no grey, and far from both black and white."""


def with_distributions(
    verdicts: tuple[Verdict, ...], actual: Mapping[str, Array], reference: Mapping[str, Array]
) -> tuple[Verdict, ...]:
    """Adds to each verdict how errors are distributed, where both sides have the same shape and dtype.

    Args:
        verdicts: From a judge.
        actual: What the compiled model returned, by name; an output that is missing here is left as it is.
        reference: PyTorch's, by name.
    """
    return tuple(
        replace(verdict, distribution=distribution(verdict.name, actual[verdict.name], reference[verdict.name]))
        if _comparable(actual.get(verdict.name), reference.get(verdict.name))
        else verdict
        for verdict in verdicts
    )


def distribution(name: str, actual: Array, reference: Array) -> Distribution | None:
    """Measures one output; None if there is nothing to tell about it.

    Args:
        name: Its name, of which the last word says whether it is a mask: `mask`, `masks` or `logits`.
        actual: What the compiled model returned.
        reference: PyTorch's, of the same shape and dtype.
    """
    exact = metrics.is_exact(reference.dtype)
    masks = re.split(r"[/_]", name)[-1] in ("mask", "masks", "logits")
    image = is_image(reference.shape, masks)
    found = Distribution(
        histogram=() if exact else histogram(actual, reference),
        largest=largest_errors(actual, reference) if image and not exact else (),
        masks=mask_pictures(actual, reference) if image and masks else (),
    )
    return None if found == Distribution() else found


def is_image(shape: tuple[int, ...], masks: bool) -> bool:
    """Returns whether the last two axes are height and width.

    Feature maps are square, and tokens × channels are not; only masks have the shape of a photograph.
    """
    if len(shape) < 3 or 0 in shape or min(shape[-2:]) < _SMALLEST:
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
    """Draws the masks that tell most; see `Distribution`."""
    ours, theirs = _planes(actual), _planes(reference)
    differing = [int(np.count_nonzero(_differing(a, r))) for a, r in zip(ours, theirs, strict=True)]
    inside = [int(np.count_nonzero(_inside(r))) for r in theirs]
    telling = [(-wrong, -min(area, theirs[0].size - area)) for wrong, area in zip(differing, inside, strict=True)]
    chosen = sorted(sorted(range(len(telling)), key=telling.__getitem__)[:MASKS])
    return tuple(_picture(np.unravel_index(n, reference.shape[:-2]), differing[n], ours[n], theirs[n]) for n in chosen)


def _comparable(actual: Array | None, reference: Array | None) -> bool:
    if actual is None or reference is None:
        return False
    return bool(reference.size) and (actual.shape, actual.dtype) == (reference.shape, reference.dtype)


def _planes(array: Array) -> Array:
    return array.reshape(-1, *array.shape[-2:])


def _inside(mask: Array) -> Array:
    inside: Array = mask > 0
    return inside


def _differing(a: Array, r: Array) -> Array:
    differing: Array = _inside(a) != _inside(r)
    return differing if metrics.is_exact(r.dtype) else differing | (np.isnan(a) != np.isnan(r))


def _picture(index: tuple[Any, ...], differing: int, a: Array, r: Array) -> MaskPicture:
    finite = np.abs(r[np.isfinite(r)])
    scale = float(finite.max(initial=0)) or 1.0
    torch, tvm = (_png(_grey(_sampled(side), scale)) for side in (r, a))
    return MaskPicture(
        index=tuple(int(place) for place in index),
        size=(r.shape[0], r.shape[1]),
        differing=differing,
        torch=torch,
        tvm=None if tvm == torch else tvm,
        marks=_marks(_cells(_differing(a, r), PIXELS)) if differing else None,
    )


def _sampled(plane: Array) -> Array:
    """Takes the pixels in the middle of the cells of a picture, as it comes: an average would hide its edge."""
    edges = (np.arange(n + 1) * length // n for n, length in _lengths(plane, PIXELS))
    rows, columns = ((each[:-1] + each[1:]) // 2 for each in edges)
    sampled: Array = plane[np.ix_(rows, columns)]
    return sampled


def _cells(plane: Array, most: int) -> Array:
    """Takes the maximum of each cell."""
    rows, columns = (np.arange(n) * length // n for n, length in _lengths(plane, most))
    cells: Array = np.maximum.reduceat(np.maximum.reduceat(plane, rows, axis=0), columns, axis=1)
    return cells


def _lengths(plane: Array, most: int) -> list[tuple[int, int]]:
    """Returns the number of cells along each axis, nearly square, and of the pixels that they divide."""
    scale = max(1.0, max(plane.shape) / most)
    return [(max(1, round(length / scale)), length) for length in plane.shape]


def _grey(plane: Array, scale: float) -> Array:
    if plane.dtype == bool:
        return plane.astype(np.uint8) * 255
    with np.errstate(all="ignore"):
        levels = np.clip(np.ceil((plane.astype(np.float64) / scale + 1) * _LEVELS) - 1, 0, 2 * _LEVELS - 1)
    grey: Array = (np.nan_to_num(levels) * (255 // (2 * _LEVELS - 1))).astype(np.uint8)
    return grey


def _png(grey: Array) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(grey).save(file, "PNG", optimize=True)
    return file.getvalue()


def _marks(differing: Array) -> bytes:
    from PIL import Image

    picture = Image.fromarray(differing.astype(np.uint8)).convert("P")
    picture.putpalette([0, 0, 0, *_MARK])
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True, bits=1, transparency=0)
    return file.getvalue()
