"""Masks at other sizes, in PyTorch's arithmetic and order: `interpolate(…, mode="bilinear", align_corners=False)`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def resized(values: Floats, height: int, width: int) -> Floats:
    """Values fp32 [n, h, w] at another size, each interpolated of its four neighbours."""
    enlarged: Floats = _along_columns(_along_columns(values, width).swapaxes(1, 2), height).swapaxes(1, 2)
    return enlarged


def resized_with_antialias(values: Floats, height: int, width: int) -> Floats:
    """The same with `antialias=True`: where an axis shrinks, all values that an output covers count."""
    across = _antialiased(np.ascontiguousarray(values), width)
    return np.ascontiguousarray(_antialiased(across.swapaxes(1, 2), height).swapaxes(1, 2))


def _along_columns(values: Floats, length: int) -> Floats:
    """Values [n, m, k] to [n, m, length]."""
    count = values.shape[-1]
    # torch.nn.functional.interpolate: src = (dst + 0.5) · k / length - 0.5 in fp32, not below 0.
    scale = np.float32(count) / np.float32(length)
    place = np.maximum((np.arange(length, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5), np.float32(0))
    low = np.minimum(place.astype(np.int64), count - 1)
    high = np.minimum(low + 1, count - 1)
    upper = place - low.astype(np.float32)
    lower = np.float32(1) - upper
    interpolated: Floats = values[..., low] * lower + values[..., high] * upper
    return interpolated


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
