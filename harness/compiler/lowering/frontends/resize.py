"""Interpolates images linearly along one axis: from two pixels each, or by a product with a matrix of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tvm import relax

_TAPS = 2


class _Antialias(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(x, size=(3, 2), mode="bilinear", antialias=True)


class _OnePixel(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(x, size=(1, 3), mode="bilinear", align_corners=True)


def image() -> tuple[torch.Tensor, ...]:
    """Returns an image [1, 2, 7, 9], the input of the reproductions."""
    return (torch.randn(1, 2, 7, 9, generator=torch.Generator().manual_seed(0)),)


def reproduce_antialias() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Returns a module that shrinks an image with a filter, and the image."""
    return _Antialias(), image()


ONE_PIXEL: dict[str, Any] = {
    "name": "resize_to_one_pixel",
    "title": "Interpolation to one row or column with align_corners is rejected",
    "location": "tvm.topi.image.resize.get_inx",
    "description": "Its step is the number of pixels divided by that of the result, each less one.",
    "reproduction": lambda: (_OnePixel(), image()),
    "raw": RawOutcome(Symptom.REJECTED, "InternalError", "Divide by zero"),
    "workaround": "A legalization in `harness.compiler.schedules.common.resizing`: the first of two rows or columns.",
}
"""The fields of the defect of one pixel that both frontends share."""


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


def interpolate(data: relax.Expr, weights: NDArray[Any], axis: int, emit: Callable[[relax.Expr], relax.Expr]) -> Any:
    """Interpolates images [n, c, h, w] along axis 2 or 3.

    An enlarged image has two source pixels for each target pixel, which are read by index; a matrix of all weights
    would take megabytes.

    Args:
        data: The images.
        weights: fp32 [number of target pixels, number of source pixels], from `triangle_weights`.
        axis: 2 or 3.
        emit: Binds an expression to a variable.
    """
    from tvm import relax

    used = weights != 0
    if used.sum(axis=1).max() > _TAPS:
        if axis == 2:
            return emit(relax.op.matmul(relax.const(weights), data))
        return emit(relax.op.matmul(data, relax.const(np.ascontiguousarray(weights.T))))
    rows = np.arange(len(weights))
    first_pixels, last_pixels = used.argmax(axis=1), weights.shape[1] - 1 - used[:, ::-1].argmax(axis=1)
    shape = (-1, 1) if axis == 2 else (-1,)

    def part(pixels: NDArray[Any], factors: NDArray[Any]) -> relax.Expr:
        columns = emit(relax.op.take(data, relax.const(pixels.astype(np.int64)), axis))
        return emit(relax.op.multiply(columns, relax.const(factors.reshape(shape))))

    last_weights = np.where(first_pixels == last_pixels, np.float32(0), weights[rows, last_pixels])
    return emit(relax.op.add(part(first_pixels, weights[rows, first_pixels]), part(last_pixels, last_weights)))
