"""Masks at other sizes, in PyTorch's arithmetic and order: `interpolate(…, mode="bilinear", align_corners=False)`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def resized(values: Floats, height: int, width: int) -> Floats:
    """Values fp32 [n, h, w] at another size [n, height, width], each interpolated of its four neighbours."""
    left, right, by_left, by_right = _neighbours(values.shape[2], width)
    above, below, by_above, by_below = _neighbours(values.shape[1], height)
    enlarged = np.empty((len(values), height, width), np.float32)
    # One array after the other, so that they stay in a cache.
    for result, each in zip(enlarged, values, strict=True):
        rows = _mixed(each[:, left], by_left, each[:, right], by_right)
        result[...] = _mixed(rows[above], by_above[:, None], rows[below], by_below[:, None])
    return enlarged


def resized_with_antialias(values: Floats, height: int, width: int) -> Floats:
    """The same with `antialias=True`: where an axis shrinks, all values that an output covers count."""
    across = _antialiased(np.ascontiguousarray(values), width)
    return np.ascontiguousarray(_antialiased(across.swapaxes(1, 2), height).swapaxes(1, 2))


def _neighbours(count: int, length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Floats, Floats]:
    """Of `count` values in a line, the two that each of `length` outputs lies between, and their weights."""
    # torch.nn.functional.interpolate: src = (dst + 0.5) · count / length - 0.5 in fp32, not below 0.
    scale = np.float32(count) / np.float32(length)
    place = np.maximum((np.arange(length, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5), np.float32(0))
    low = np.minimum(place.astype(np.int64), count - 1)
    upper = place - low.astype(np.float32)
    return low, np.minimum(low + 1, count - 1), np.float32(1) - upper, upper


def _mixed(first: Floats, weight: Floats, second: Floats, other_weight: Floats) -> Floats:
    """Mixes two arrays by their weights, in the memory of the first one; both are overwritten."""
    first *= weight
    second *= other_weight
    first += second
    return first


def _antialiased(values: Floats, length: int) -> Floats:
    """Values [n, m, k] to [n, m, length], as `_compute_indices_min_size_weights_aa` of PyTorch's UpSampleKernel.h."""
    first, weights = _antialias_weights(values.shape[-1], length)
    total: Floats = values[..., first] * weights[0]
    for tap, weight in enumerate(weights[1:], start=1):
        total += values[..., np.minimum(first + tap, values.shape[-1] - 1)] * weight
    return total


def _antialias_weights(count: int, length: int) -> tuple[npt.NDArray[np.int64], Floats]:
    """The first value that each output covers, and the weights [taps, length] of it and those after it."""
    scale = np.float32(count) / np.float32(length)
    support = max(scale, np.float32(1))
    center = scale * (np.arange(length, dtype=np.float32) + np.float32(0.5))
    first = np.maximum((center - support + np.float32(0.5)).astype(np.int64), 0)
    taps = np.minimum((center + support + np.float32(0.5)).astype(np.int64), count) - first
    steps = np.arange(taps.max())[:, None]
    distance = ((steps + first).astype(np.float32) - center + np.float32(0.5)) * (np.float32(1) / support)
    weights = np.where(steps < taps, np.maximum(np.float32(1) - np.abs(distance), np.float32(0)), np.float32(0))
    total = np.zeros(length, np.float32)
    for weight in weights:
        total += weight
    return first, (weights / total).astype(np.float32)
