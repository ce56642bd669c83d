"""Draws geometries of convolutions for the tests of the CPU's kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch.nn import functional
from tvm import relax

from conformance.support.operators import normal

Pair = tuple[int, int]


@dataclass(frozen=True)
class Geometry:
    """The geometry of a convolution, without its image and its filters."""

    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1

    def conv2d(self, x: relax.Expr, weight: relax.Expr) -> relax.Expr:
        """Returns the operator."""
        return relax.op.nn.conv2d(x, weight, self.stride, self.padding * 2, self.dilation, self.groups)


PLAIN = Geometry()
AROUND = Geometry(padding=(1, 1))
"""With filters of 3 × 3 the result is as large as the image."""


def filters(out: int, inner: int, height: int, width: int) -> np.ndarray:
    """Draws filters, scaled so that results are about 1."""
    return normal((out, inner, height, width), 1, scale=1 / math.sqrt(inner * height * width))


@st.composite
def convolutions(
    draw: st.DrawFn, batch: int, groups: Sequence[int], inner: Sequence[int], height: int, width: int
) -> tuple[np.ndarray, np.ndarray, Geometry]:
    """Images, filters and the geometry of a convolution whose result is not empty.

    Args:
        draw: Of hypothesis.
        batch: Images at most.
        groups: Numbers of groups.
        inner: Numbers of channels of a group.
        height, width: Of an image at most.
    """
    pairs = st.tuples
    images, parts, channels = draw(st.integers(1, batch)), draw(st.sampled_from(groups)), draw(st.sampled_from(inner))
    outer = draw(st.sampled_from([1, 5, 16]))
    size = draw(pairs(st.integers(3, height), st.integers(3, width)))
    kernel = draw(pairs(st.integers(1, 4), st.integers(1, 4)))
    stride = draw(pairs(st.integers(1, 3), st.integers(1, 3)))
    padding = draw(pairs(st.integers(0, 2), st.integers(0, 2)))
    dilation = draw(pairs(st.integers(1, 2), st.integers(1, 2)))
    assume(all(n + 2 * p > d * (k - 1) for n, p, d, k in zip(size, padding, dilation, kernel, strict=True)))
    image = normal((images, parts * channels, *size))
    return image, filters(parts * outer, channels, *kernel), Geometry(stride, padding, dilation, parts)


def as_product(
    x: np.ndarray, weight: np.ndarray, at: Geometry, product: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> np.ndarray:
    """Computes a convolution as products of PyTorch's columns, [pixels, depth], and weights, [filters, depth]."""
    columns = functional.unfold(torch.from_numpy(x), weight.shape[2:], at.dilation, at.padding, at.stride).numpy()
    shapes = (torch.empty(array.shape, device="meta") for array in (x, weight))
    shape = functional.conv2d(*shapes, None, at.stride, at.padding, at.dilation, at.groups).shape
    of_groups = [
        np.stack([product(image.T, rows.reshape(len(rows), -1)).T for image in images])
        for images, rows in zip(np.split(columns, at.groups, 1), np.split(weight, at.groups), strict=True)
    ]
    return np.concatenate(of_groups, 1).reshape(shape)


def of_upsampled(multiplied: Callable[[relax.Expr, relax.Expr], relax.Expr]) -> Callable[..., relax.Expr]:
    """Returns a 3 × 3 convolution of an image that nearest neighbours make twice as large."""

    def operator(x: relax.Expr, weight: relax.Expr) -> relax.Expr:
        return multiplied(relax.op.repeat(relax.op.repeat(x, 2, 2), 2, 3), weight)

    return operator


def upsampled_by_places(
    x: np.ndarray, weight: np.ndarray, convolved: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> np.ndarray:
    """Computes the convolution of an upsampled image as 9 convolutions of single pixels, in fp32 and in order.

    They are of the image and of the differences of its neighbours, above and below, left and right.
    """
    height, width = x.shape[2:]
    padded = np.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1)])
    lines = [padded[:, :, n : n + height] for n in range(3)]
    parts = [
        [down[..., n : n + width] for n in range(3)] for down in (lines[1], lines[1] - lines[0], lines[2] - lines[1])
    ]
    images = [[middle, middle - left, right - middle] for left, middle, right in parts]
    sums = np.array([[1, 1, 1], [-1, 0, 0], [0, 0, 1]], np.float64)
    filters = np.einsum("ay,ocyx,bx->aboc", sums, weight.astype(np.float64), sums).astype(np.float32)
    products = [[convolved(images[a][b], filters[a, b, :, :, None, None]) for b in range(3)] for a in range(3)]
    result = np.empty((len(x), len(weight), 2 * height, 2 * width), np.float32)
    for y in range(2):
        middle, left, right = (products[0][b] + products[y + 1][b] for b in range(3))
        result[:, :, y::2, ::2], result[:, :, y::2, 1::2] = middle + left, middle + right
    return result


def transposed_by_taps(
    x: np.ndarray, weight: np.ndarray, convolved: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> np.ndarray:
    """Computes a transposed convolution of 2 × 2 with stride 2 as one convolution for each kernel pixel."""
    taps = np.stack([convolved(x, weight[..., i, j].T[..., None, None]) for i in range(2) for j in range(2)], -1)
    images, filters, height, width, _ = taps.shape
    pixels = taps.reshape(images, filters, height, width, 2, 2).transpose(0, 1, 2, 4, 3, 5)
    return pixels.reshape(images, filters, 2 * height, 2 * width)
