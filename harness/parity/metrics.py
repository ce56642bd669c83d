"""Measures how far one array is from another in NumPy, with float64 arithmetic in chunks that limit memory.

Notation: `a` is the compiled model's output, `r` PyTorch eager fp32, `o` the float64 oracle; all have the same shape.
Elements that are NaN or infinite in any compared array are left out of every sum and maximum. `mask_mismatches`
compares the masks of these elements before any value is compared.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.core.program import Array

ATOL = 1e-5
"""Absolute part of the strict gate."""
RTOL = 1e-5
"""Relative part of the strict gate."""
FLOOR_EPS = 4
"""Units of fp32 rounding that PyTorch is always granted: the floor under its error in `r_rms` and `r_inf`."""

_CHUNK = 1 << 14  # 128 KiB of float64: a handful of temporaries of this size stay in a core's own cache


@dataclass(frozen=True)
class Difference:
    """Error of `a` against `r`; floats are NaN if there is no element to measure.

    Attributes:
        elements: Number of elements.
        outside: Number of elements that violate |a - r| ≤ ATOL + RTOL·|r|, or are NaN or infinite on one side only.
        max_abs, mean_abs: Largest and mean |a - r|.
        max_rel: Largest |a - r| / |r| over the elements where r ≠ 0 (`max_abs` covers those where r = 0).
        required_tolerance: Smallest t for which |a - r| ≤ t + t·|r| everywhere; inf where the NaN/Inf masks differ.
        sqnr_db: 10·log10(Σ|r|² / Σ|a - r|²), inf where equal.
    """

    elements: int
    outside: int
    max_abs: float
    mean_abs: float
    max_rel: float
    required_tolerance: float
    sqnr_db: float


@dataclass(frozen=True)
class OracleRatio:
    """Error of `a` against the float64 oracle divided by PyTorch's own; see `oracle_ratio`."""

    r_rms: float
    r_inf: float


def is_exact(dtype: np.dtype[Any]) -> bool:
    """Returns whether values of this dtype must be equal (integers and booleans) instead of close."""
    return dtype.kind in "biu"


def widen(chunk: Array) -> Array:
    """Converts a chunk of any dtype to float64, or to complex128 if it is complex."""
    converted: Array = chunk.astype(np.complex128 if chunk.dtype.kind == "c" else np.float64)
    return converted


def raw_chunks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Yields chunks of arrays of one size, flat."""
    flat_arrays = [array.reshape(-1) for array in arrays]
    for start in range(0, flat_arrays[0].size, _CHUNK):
        yield tuple(array[start : start + _CHUNK] for array in flat_arrays)


def chunks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Yields chunks of arrays of one size, flat and in float64, or complex128 for complex arrays."""
    for chunk in raw_chunks(*arrays):
        yield tuple(map(widen, chunk))


def same_specials(a: Array, r: Array) -> Array:
    """Returns where both are finite, both NaN, or both the same infinity (per real and imaginary part).

    Args:
        a: Array of any real or complex dtype.
        r: Array of the same shape.
    """
    if a.dtype.kind == "c" or r.dtype.kind == "c":
        return same_specials(np.real(a), np.real(r)) & same_specials(np.imag(a), np.imag(r))
    equal: Array = np.isfinite(a) & np.isfinite(r)
    equal |= np.isnan(a) & np.isnan(r)
    equal |= np.isinf(a) & (a == r)
    return equal


def mask_mismatches(a: Array, r: Array) -> int:
    """Returns the number of elements that are NaN, +inf or -inf on one side only."""
    if is_exact(a.dtype) and is_exact(r.dtype):
        return 0
    return sum(
        int(np.count_nonzero(~same_specials(widen(x), widen(y))))
        for x, y in raw_chunks(a, r)
        if not (_is_finite(x) and _is_finite(y))
    )


def any_finite(a: Array) -> bool:
    """Returns whether some element is neither NaN nor infinite."""
    return any(bool(np.isfinite(x).any()) for (x,) in raw_chunks(a))


def _is_finite(chunk: Array) -> bool:
    return bool(np.isfinite(chunk).all())


def difference(a: Array, r: Array) -> Difference:
    """Measures `a` against `r`, arrays of one shape and any real, complex, integer or boolean dtype.

    The required tolerance is max |a - r| / (1 + |r|), rounded up slightly so that it really passes.

    Raises:
        ValueError: The shapes differ.
    """
    _check_same_shape(a, r)
    outside = count = mismatches = 0
    max_abs = sum_abs = max_rel = tolerance = signal = noise = 0.0
    with np.errstate(all="ignore"):
        for x, y in chunks(a, r):
            finite = np.isfinite(x) & np.isfinite(y)
            if not finite.all():
                mismatches += int(np.count_nonzero(~same_specials(x, y)))
                x, y = x[finite], y[finite]
            size = np.abs(y)
            error = np.abs(x - y)
            outside += int(np.count_nonzero(error > ATOL + RTOL * size))
            if not error.size:
                continue
            count += error.size
            sum_abs += float(error.sum())
            max_abs = max(max_abs, float(error.max()))
            tolerance = max(tolerance, float((error / (1.0 + size)).max()))
            nonzero = size > 0
            if nonzero.all():
                max_rel = max(max_rel, float((error / size).max()))
            elif nonzero.any():
                max_rel = max(max_rel, float((error[nonzero] / size[nonzero]).max()))
            signal += float(np.square(size).sum())
            noise += float(np.square(error).sum())
    if tolerance > 0:
        tolerance = max(tolerance * (1 + 4 * sys.float_info.epsilon), math.nextafter(tolerance, math.inf))
    empty = count == 0
    return Difference(
        elements=a.size,
        outside=outside + mismatches,
        max_abs=math.nan if empty else max_abs,
        mean_abs=math.nan if empty else sum_abs / count,
        max_rel=math.nan if empty else max_rel,
        required_tolerance=math.inf if mismatches else (math.nan if empty else tolerance),
        sqnr_db=math.nan if empty else _decibel(signal, noise),
    )


def unequal(a: Array, r: Array) -> int:
    """Returns the number of unequal elements, compared in their own dtype; integers and booleans are judged by it."""
    _check_same_shape(a, r)
    return sum(int(np.count_nonzero(x != y)) for x, y in raw_chunks(a, r))


def bitwise_different(a: Array, b: Array) -> int:
    """Returns the number of elements whose bits differ; all NaNs are equal, -0 and +0 are not."""
    _check_same_shape(a, b)
    if a.dtype != b.dtype:
        return a.size
    count = 0
    for p, q in raw_chunks(a, b):
        if p.tobytes() == q.tobytes():
            continue
        bits_p, bits_q = (np.ascontiguousarray(chunk).view(np.uint8) for chunk in (p, q))
        differ = (bits_p != bits_q).reshape(-1, p.dtype.itemsize).any(axis=1)
        if not is_exact(p.dtype):
            differ &= ~(np.isnan(p) & np.isnan(q))
        count += int(np.count_nonzero(differ))
    return count


def oracle_ratio(a: Array, r: Array, o: Array) -> OracleRatio:
    """Measures the error against the oracle, divided by PyTorch's own.

    With e(x) = x - o: r_rms = rms(e(a)) / max(rms(e(r)), 4·eps·rms(o)), r_inf likewise with the largest magnitude; eps
    is fp32's. A ratio below 1 means that the compiled code is more accurate than PyTorch. If both denominators vanish
    (o = r = 0), the ratio is 0 if a is exact too, otherwise inf. It is NaN if no element is finite in all three arrays.
    """
    _check_same_shape(a, r)
    _check_same_shape(a, o)
    eps = float(np.finfo(np.float32).eps)
    count = 0
    square_a = square_r = square_o = max_a = max_r = max_o = 0.0
    with np.errstate(all="ignore"):
        for x, y, z in chunks(a, r, o):
            if not (_is_finite(x) and _is_finite(y) and _is_finite(z)):
                finite = np.isfinite(x) & np.isfinite(y) & np.isfinite(z)
                x, y, z = x[finite], y[finite], z[finite]
            if not z.size:
                continue
            count += z.size
            error_a, error_r, size = np.abs(x - z), np.abs(y - z), np.abs(z)
            square_a += float(np.square(error_a).sum())
            square_r += float(np.square(error_r).sum())
            square_o += float(np.square(size).sum())
            max_a = max(max_a, float(error_a.max()))
            max_r = max(max_r, float(error_r.max()))
            max_o = max(max_o, float(size.max()))
    if count == 0:
        return OracleRatio(math.nan, math.nan)
    rms_a, rms_r, rms_o = (math.sqrt(square / count) for square in (square_a, square_r, square_o))
    return OracleRatio(
        r_rms=_ratio(rms_a, max(rms_r, FLOOR_EPS * eps * rms_o)),
        r_inf=_ratio(max_a, max(max_r, FLOOR_EPS * eps * max_o)),
    )


def relative_rms(a: Array, o: Array) -> float:
    """Returns the root mean square of a - o divided by that of o, over the elements that are finite in both.

    The result is NaN if there is no such element, and inf if o is zero and a is not.
    """
    _check_same_shape(a, o)
    noise = signal = 0.0
    count = 0
    with np.errstate(all="ignore"):
        for x, z in chunks(a, o):
            finite = np.isfinite(x) & np.isfinite(z)
            noise += float(np.square(np.abs(x[finite] - z[finite])).sum())
            signal += float(np.square(np.abs(z[finite])).sum())
            count += int(np.count_nonzero(finite))
    return _ratio(math.sqrt(noise), math.sqrt(signal)) if count else math.nan


def _ratio(error: float, scale: float) -> float:
    if scale > 0:
        return error / scale
    return 0.0 if error == 0 else math.inf


def _decibel(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * (math.log10(signal) - math.log10(noise)) if signal > 0 else -math.inf


def _check_same_shape(a: Array, b: Array) -> None:
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {a.shape} and {b.shape}")
