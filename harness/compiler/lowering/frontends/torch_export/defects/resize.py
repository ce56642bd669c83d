"""Works around interpolate, which chooses other nearest neighbours than PyTorch and ignores antialias."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx import Node

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.resize import (
    ONE_PIXEL,
    image,
    interpolate,
    reproduce_antialias,
    triangle_weights,
)
from harness.compiler.lowering.frontends.rewriting import argument
from harness.compiler.lowering.frontends.torch_export.defect import TorchDefect


class _Nearest(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(x, size=(3, 2), mode="nearest")


class _Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(x, scale_factor=1.7, mode="bilinear")


def _nearest_sources(size: int, target: int, factor: float | None) -> NDArray[Any]:
    """Returns the source pixel of each target pixel: floor(target · scale), with the scale rounded to float32 first.

    Source: `nearest_neighbor_compute_source_index` in ATen/native/UpSample.h; the scale is 1/factor if a factor is
    given.
    """
    scale = np.float32(1.0 / factor) if factor else np.float32(size) / np.float32(target)
    sources = np.floor(np.arange(target, dtype=np.float32) * scale).astype(np.int64)
    clipped: NDArray[Any] = np.minimum(sources, size - 1)
    return clipped


def _antialias_weights(size: int, target: int, align_corners: bool, factor: float | None) -> NDArray[Any]:
    """Computes the filter's weights [target, size]; PyTorch centres it equally with and without align_corners."""
    if align_corners:
        scale = (size - 1) / (target - 1) if target > 1 else 0.0
    else:
        scale = 1.0 / factor if factor else size / target
    return triangle_weights(scale * (np.arange(target) + 0.5) - 0.5, size, scale, antialias=True)


def _factors(node: Node) -> tuple[float | None, float | None]:
    factors = argument(node, 2 if "nearest" in node.target.__name__ else 3, "scale_factors")
    return (factors[0], factors[1]) if factors else (None, None)


def _bilinear_weights(size: int, target: int, factor: float) -> NDArray[Any]:
    """Computes weights [target, size] of pixels that lie 1/factor apart, which need not be the ratio of the sizes."""
    positions = np.maximum((np.arange(target) + 0.5) / factor - 0.5, 0.0)
    return triangle_weights(positions, size, 1.0 / factor, antialias=False)


def _convert_nearest(node: Node, importer: Any) -> Any:
    from tvm import relax

    emit = importer.block_builder.emit
    value = importer.env[node.args[0]]
    size, target = node.args[0].meta["val"].shape[2:], node.meta["val"].shape[2:]
    for axis, (source_size, target_size, factor) in enumerate(zip(size, target, _factors(node), strict=True), start=2):
        if target_size == source_size:
            continue
        if target_size % source_size == 0 and (factor is None or factor == target_size // source_size):
            value = emit(relax.op.repeat(value, target_size // source_size, axis))
            continue
        value = emit(
            relax.op.take(value, relax.const(_nearest_sources(source_size, target_size, factor), "int64"), axis)
        )
    return value


def _convert_bilinear(node: Node, importer: Any) -> Any:
    factors, align_corners = _factors(node), bool(argument(node, 2, "align_corners", False))
    size, target = node.args[0].meta["val"].shape[2:], node.meta["val"].shape[2:]
    exact = all(factor is None or factor * s == t for factor, s, t in zip(factors, size, target, strict=True))
    if align_corners or exact:
        return importer._upsample_bilinear2d(node)
    value = importer.env[node.args[0]]
    for axis, (source_size, target_size, factor) in enumerate(zip(size, target, factors, strict=True), start=2):
        assert factor is not None
        value = interpolate(
            value, _bilinear_weights(source_size, target_size, factor), axis, importer.block_builder.emit
        )
    return value


def _convert_antialias(node: Node, importer: Any) -> Any:
    emit = importer.block_builder.emit
    value = importer.env[node.args[0]]
    align_corners = bool(argument(node, 2, "align_corners", False))
    (height, width), (rows, columns) = node.args[0].meta["val"].shape[2:], node.meta["val"].shape[2:]
    tall, wide = _factors(node)
    if columns != width:
        value = interpolate(value, _antialias_weights(width, columns, align_corners, wide), 3, emit)
    if rows != height:
        value = interpolate(value, _antialias_weights(height, rows, align_corners, tall), 2, emit)
    return value


DEFECTS = (
    TorchDefect(
        name="nearest_half_pixel",
        title="nearest interpolation picks other pixels than PyTorch",
        location="ExportedProgramImporter._upsample_impl",
        description=(
            "Pixels are chosen by rounding the position of the pixel's centre; PyTorch's mode `nearest` takes the "
            "floor of the position of its corner. Equal for whole factors, wrong otherwise, without an error."
        ),
        reproduction=lambda: (_Nearest(), image()),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="other pixels"),
        workaround="A converter that takes PyTorch's pixels by index, or repeats each where the factor is whole.",
        converters={"upsample_nearest2d.vec": _convert_nearest},
    ),
    TorchDefect(
        name="antialias_ignored",
        title="antialias of bilinear interpolation is ignored",
        location="ExportedProgramImporter._upsample_bilinear2d_aa",
        description=(
            "The image is resized without the filter: a wrong result without an error wherever it gets smaller."
        ),
        reproduction=reproduce_antialias,
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="values differ by up to 0.9"),
        workaround="A converter that applies the filter's weights along each axis.",
        converters={
            "_upsample_bilinear2d_aa.default": _convert_antialias,
            "_upsample_bilinear2d_aa.vec": _convert_antialias,
        },
    ),
    TorchDefect(
        name="bilinear_scale",
        title="bilinear interpolation by a factor takes the ratio of the sizes instead",
        location="ExportedProgramImporter._upsample_impl",
        description=(
            "The factor gives the size of the result and is then forgotten: 7 pixels times 1.7 are 11, and the pixels "
            "are taken 7/11 apart instead of 1/1.7. Right only where the size is a whole number without rounding."
        ),
        reproduction=lambda: (_Scaled(), image()),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="values of other places in the image"),
        workaround="A converter that computes the weights from the factor.",
        converters={"upsample_bilinear2d.vec": _convert_bilinear},
    ),
    TorchDefect(**ONE_PIXEL),
)
