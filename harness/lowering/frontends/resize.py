"""Linear interpolation of images as products with matrices of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray


class _Antialias(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(x, size=(3, 2), mode="bilinear", antialias=True)


def image() -> tuple[torch.Tensor, ...]:
    """Returns an image [1, 2, 7, 9], the input of the reproductions."""
    return (torch.randn(1, 2, 7, 9, generator=torch.Generator().manual_seed(0)),)


def reproduce_antialias() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Returns a module that makes an image smaller with a filter, and the image."""
    return _Antialias(), image()


def triangle_weights(positions: NDArray[Any], size: int, step: float, antialias: bool) -> NDArray[Any]:
    """Computes the weights of the triangle filter.

    Antialias makes the filter as wide as a target pixel where that is wider than a source pixel (PyTorch:
    `_compute_indices_weights_aa` in ATen/native/cpu/UpSampleKernel.cpp). At the border, taps outside the image are left
    out with antialias, and are the border's pixel without it.

    Args:
        positions: Where each target pixel lies, in source pixels from the centre of the first.
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
