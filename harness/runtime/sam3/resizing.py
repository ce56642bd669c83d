"""Resizes masks in PyTorch's arithmetic and order: `interpolate(…, mode="bilinear", align_corners=False)`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from harness.runtime.arrays import Floats


def resize(values: Floats, height: int, width: int) -> Floats:
    """Resizes values fp32 [n, h, w] to [n, height, width]; each output is interpolated between four neighbours."""
    low_column, high_column, low_column_weight, high_column_weight = _neighbours(values.shape[2], width)
    low_row, high_row, low_row_weight, high_row_weight = _neighbours(values.shape[1], height)
    enlarged = np.empty((len(values), height, width), np.float32)
    # One plane after another, so that intermediate arrays stay in a cache.
    for result, plane in zip(enlarged, values, strict=True):
        rows = _mix(plane[:, low_column], low_column_weight, plane[:, high_column], high_column_weight)
        result[...] = _mix(rows[low_row], low_row_weight[:, None], rows[high_row], high_row_weight[:, None])
    return enlarged


def resize_antialiased(values: Floats, height: int, width: int) -> Floats:
    """Resizes values as `resize` does, with `antialias=True`: an output averages all values that it covers."""
    widened = _resize_lines(np.ascontiguousarray(values), width)
    return np.ascontiguousarray(_resize_lines(widened.swapaxes(1, 2), height).swapaxes(1, 2))


def _neighbours(count: int, length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Floats, Floats]:
    """Returns the two of `count` values in a line between which each of `length` outputs lies, and their weights."""
    # torch.nn.functional.interpolate: src = (dst + 0.5) · count / length - 0.5 in fp32, not below 0.
    scale = np.float32(count) / np.float32(length)
    position = np.maximum(
        (np.arange(length, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5), np.float32(0)
    )
    low = np.minimum(position.astype(np.int64), count - 1)
    high_weight = position - low.astype(np.float32)
    return low, np.minimum(low + 1, count - 1), np.float32(1) - high_weight, high_weight


def _mix(first: Floats, weight: Floats, second: Floats, other_weight: Floats) -> Floats:
    """Mixes two arrays by their weights, in the memory of the first one; both are overwritten."""
    first *= weight
    second *= other_weight
    first += second
    return first


def _resize_lines(values: Floats, length: int) -> Floats:
    """Resizes values [n, m, k] to [n, m, length] by `_compute_indices_min_size_weights_aa` of UpSampleKernel.h."""
    first, weights = _antialias_weights(values.shape[-1], length)
    total: Floats = values[..., first] * weights[0]
    for tap, weight in enumerate(weights[1:], start=1):
        total += values[..., np.minimum(first + tap, values.shape[-1] - 1)] * weight
    return total


def _antialias_weights(count: int, length: int) -> tuple[npt.NDArray[np.int64], Floats]:
    """Returns the first value that each output covers, and the weights [taps, length] from that value on."""
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
