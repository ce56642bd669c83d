"""Emits operators on images for both frontends: linear interpolation along one axis, and PyTorch's RoI align."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tvm import relax

from harness.compiler.lowering.frontends.defect import normal

Emit = Callable[[relax.Expr], relax.Expr]
"""Binds an expression to a variable, or normalizes it."""

IMAGE = normal((1, 2, 7, 9))
"""Arguments of the functions that interpolate, in the defects of both frontends."""
MOVED_BOX = (torch.arange(16.0).reshape(1, 1, 4, 4), torch.tensor([[0.0, 1.0, 1.0, 5.0, 6.0]]))
"""Arguments of RoI align, whose samples are misplaced if boxes are moved before they are scaled."""
EMPTY_BOX = (torch.ones(1, 1, 4, 4), torch.tensor([[0.0, 2.0, 2.0, 2.0, 2.0]]))
"""Arguments of RoI align with an empty box."""

_TAPS = 2


def aligned_roi(image: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """Aligns regions in PyTorch with the option and the scale that the frontends get wrong."""
    from torchvision.ops import roi_align as align

    regions: torch.Tensor = align(image, boxes, 2, spatial_scale=0.5, aligned=True)
    return regions


def triangle_weights(positions: NDArray[Any], size: int, step: float, antialias: bool) -> NDArray[Any]:
    """Computes the weights of the triangle filter.

    Antialias makes the filter as wide as a target pixel where that is wider than a source pixel (PyTorch:
    `_compute_indices_weights_aa` in ATen/native/cpu/UpSampleKernel.cpp). Taps outside the image are left out with
    antialias, and read the border's pixel without it.

    Args:
        positions: Position of each target pixel, in source pixels from the centre of the first.
        size: Number of source pixels.
        step: Distance of two target pixels, in source pixels.
        antialias: Whether the filter may be wider than a source pixel.

    Returns:
        fp32 [number of target pixels, size].
    """
    width = max(step, 1.0) if antialias else 1.0
    weights = np.zeros((len(positions), size))
    for row, position in enumerate(positions):
        taps = np.arange(np.floor(position - width), np.ceil(position + width) + 1)
        values = np.maximum(0.0, 1.0 - np.abs(taps - position) / width)
        if antialias:
            inside = (taps >= 0) & (taps < size)
            taps, values = taps[inside], values[inside] / values[inside].sum()
        np.add.at(weights[row], np.clip(taps, 0, size - 1).astype(int), values)
    return weights.astype(np.float32)


def interpolate(data: relax.Expr, weights: NDArray[Any], axis: int, emit: Emit) -> relax.Expr:
    """Interpolates images [n, c, h, w] along axis 2 or 3.

    An enlarged image has two source pixels for each target pixel, which are read by index; a matrix of all weights
    would take megabytes.

    Args:
        data: The images.
        weights: fp32 [number of target pixels, number of source pixels], from `triangle_weights`.
        axis: 2 or 3.
        emit: Binds an expression to a variable.
    """
    used = weights != 0
    if used.sum(axis=1).max() > _TAPS:
        if axis == 2:
            return emit(relax.op.matmul(relax.const(weights), data))
        return emit(relax.op.matmul(data, relax.const(np.ascontiguousarray(weights.T))))
    rows = np.arange(len(weights))
    first_pixels, last_pixels = used.argmax(axis=1), weights.shape[1] - 1 - used[:, ::-1].argmax(axis=1)
    shape = (-1, 1) if axis == 2 else (-1,)

    def part(pixels: NDArray[Any], factors: NDArray[Any]) -> relax.Expr:
        columns = relax.op.take(data, relax.const(pixels.astype(np.int64)), axis)
        return emit(relax.op.multiply(columns, relax.const(factors.reshape(shape))))

    last_weights = np.where(first_pixels == last_pixels, np.float32(0), weights[rows, last_pixels])
    return emit(relax.op.add(part(first_pixels, weights[rows, first_pixels]), part(last_pixels, last_weights)))


def roi_align(
    emit: Emit,
    image: relax.Expr,
    boxes: relax.Expr,
    size: tuple[int, int],
    scale: float,
    ratio: int,
    aligned: bool,
    mode: str = "avg",
) -> relax.Expr:
    """Emits RoI align: boxes are scaled, then moved by half a pixel; an empty box has no samples, so its mean is 0.

    Source: torchvision/csrc/ops/cpu/roi_align_kernel.cpp.

    Args:
        emit: Binds or normalizes an expression.
        image: Data [n, c, h, w].
        boxes: Index of the image, x0, y0, x1, y1 of each box, [m, 5].
        size: Rows and columns of the result.
        scale: Factor of the coordinates.
        ratio: Samples in each direction of a bin; 0 or less for as many samples as the bin has pixels.
        aligned: Whether boxes are moved by half a pixel.
        mode: Reduction of the samples of a bin.
    """
    dtype = boxes.ty.dtype.dtype
    corners = emit(relax.op.strided_slice(boxes, axes=[1], begin=[1], end=[5]))
    if aligned:
        index = emit(relax.op.strided_slice(boxes, axes=[1], begin=[0], end=[1]))
        scaled = emit(relax.op.multiply(corners, relax.const(scale, dtype)))
        moved = emit(relax.op.subtract(scaled, relax.const(0.5, dtype)))
        boxes, scale = emit(relax.op.concat([index, moved], axis=1)), 1.0
    result = emit(
        relax.op.vision.roi_align(
            image,
            boxes,
            pooled_size=size,
            spatial_scale=scale,
            sample_ratio=ratio,
            aligned=aligned,
            layout="NCHW",
            mode=mode,
        )
    )
    if not aligned or ratio > 0:
        return result
    upper_left = emit(relax.op.strided_slice(corners, axes=[1], begin=[0], end=[2]))
    lower_right = emit(relax.op.strided_slice(corners, axes=[1], begin=[2], end=[4]))
    smallest = relax.op.min(relax.op.subtract(lower_right, upper_left), axis=1)
    is_nonempty = emit(relax.op.greater(smallest, relax.const(0.0, dtype)))
    return emit(relax.op.where(relax.op.reshape(is_nonempty, [-1, 1, 1, 1]), result, relax.const(0.0, dtype)))
