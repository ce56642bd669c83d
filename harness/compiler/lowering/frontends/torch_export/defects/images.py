"""Works around operators on images: interpolation, grid_sample and roi_align."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx import Node
from tvm import relax

from harness.compiler.lowering.frontends.backend_defects import ONE_PIXEL
from harness.compiler.lowering.frontends.defect import Defect, RawOutcome, Symptom, normal
from harness.compiler.lowering.frontends.images import (
    EMPTY_BOX,
    IMAGE,
    MOVED_BOX,
    aligned_roi,
    interpolate,
    roi_align,
    triangle_weights,
)
from harness.compiler.lowering.frontends.rewriting import argument, value_of

_METHODS = ("bilinear", "nearest", "bicubic")
_PADDINGS = ("zeros", "border", "reflection")


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


def _bilinear_weights(size: int, target: int, factor: float) -> NDArray[Any]:
    """Computes weights [target, size] of pixels that lie 1/factor apart, which need not be the ratio of the sizes."""
    positions = np.maximum((np.arange(target) + 0.5) / factor - 0.5, 0.0)
    return triangle_weights(positions, size, 1.0 / factor, antialias=False)


def _axes(node: Node) -> list[tuple[int, int, int, float | None]]:
    """Returns number, old size, new size and factor, if one is given, of the axes that a call interpolates along."""
    if node.target is torch.ops.aten._upsample_bilinear2d_aa.default:
        factors = [argument(node, "scales_h"), argument(node, "scales_w")]
    else:
        factors = argument(node, "scale_factors") or [None, None]
    return list(zip((2, 3), value_of(node.args[0]).shape[2:], value_of(node).shape[2:], factors, strict=True))


def _convert_nearest(node: Node, importer: Any) -> Any:
    emit, value = importer.block_builder.emit, importer.env[node.args[0]]
    for axis, size, target, factor in _axes(node):
        if target == size:
            continue
        if target % size == 0 and (factor is None or factor == target // size):
            value = emit(relax.op.repeat(value, target // size, axis))
        else:
            value = emit(relax.op.take(value, relax.const(_nearest_sources(size, target, factor), "int64"), axis))
    return value


def _convert_bilinear(node: Node, importer: Any) -> Any:
    exact = all(factor is None or factor * size == target for _, size, target, factor in _axes(node))
    if argument(node, "align_corners") or exact:
        return importer._upsample_bilinear2d(node)
    value = importer.env[node.args[0]]
    for axis, size, target, factor in _axes(node):
        assert factor is not None
        value = interpolate(value, _bilinear_weights(size, target, factor), axis, importer.block_builder.emit)
    return value


def _convert_antialias(node: Node, importer: Any) -> Any:
    value, align_corners = importer.env[node.args[0]], argument(node, "align_corners")
    for axis, size, target, factor in reversed(_axes(node)):
        if target != size:
            weights = _antialias_weights(size, target, align_corners, factor)
            value = interpolate(value, weights, axis, importer.block_builder.emit)
    return value


def _convert_grid_sample(node: Node, importer: Any) -> Any:
    image, grid, method, padding, align_corners = importer.retrieve_args(node)
    return importer.block_builder.emit(
        relax.op.image.grid_sample(
            image,
            relax.op.permute_dims(grid, [0, 3, 1, 2]),
            method=_METHODS[method],
            layout="NCHW",
            padding_mode=_PADDINGS[padding],
            align_corners=align_corners,
        )
    )


def _convert_roi_align(node: Node, importer: Any) -> Any:
    image, boxes, scale, height, width, ratio, aligned = importer.retrieve_args(node)
    return roi_align(importer.block_builder.emit, image, boxes, (height, width), scale, ratio, aligned)


DEFECTS = (
    Defect(
        name="grid_sample_layout",
        title="grid_sample reads the grid in the wrong layout",
        location="ExportedProgramImporter._grid_sampler_2d",
        description=(
            "The grid [N, H, W, 2] is handed to relax.op.image.grid_sample, which expects [N, 2, H, W]. The "
            "result is wrong without an error when H = W = 2, and has the wrong shape otherwise. In SAM 3's "
            "geometry encoder (points, grid [B, N, 1, 2]) the shape is wrong, so that the squeeze behind it "
            "removes nothing and the permute then rejects the rank."
        ),
        function=lambda image, grid: torch.nn.functional.grid_sample(image, grid, align_corners=False),
        args=normal((1, 2, 5, 6), (1, 2, 2, 2)),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="values differ by more than 1"),
        workaround="A converter that permutes the grid first.",
        converters={"grid_sampler_2d.default": _convert_grid_sample},
    ),
    Defect(
        name="nearest_half_pixel",
        title="nearest interpolation picks other pixels than PyTorch",
        location="ExportedProgramImporter._upsample_impl",
        description=(
            "Pixels are chosen by rounding the position of the pixel's centre; PyTorch's mode `nearest` takes the "
            "floor of the position of its corner. Equal for whole factors, wrong otherwise, without an error."
        ),
        function=lambda x: torch.nn.functional.interpolate(x, size=(3, 2), mode="nearest"),
        args=IMAGE,
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="other pixels"),
        workaround="A converter that takes PyTorch's pixels by index, or repeats each where the factor is whole.",
        converters={"upsample_nearest2d.vec": _convert_nearest},
    ),
    Defect(
        name="antialias_ignored",
        title="antialias of bilinear interpolation is ignored",
        location="ExportedProgramImporter._upsample_bilinear2d_aa",
        description=(
            "The image is resized without the filter: a wrong result without an error wherever it gets smaller."
        ),
        function=lambda x: torch.nn.functional.interpolate(x, size=(3, 2), mode="bilinear", antialias=True),
        args=IMAGE,
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="values differ by up to 0.9"),
        workaround="A converter that applies the filter's weights along each axis.",
        converters=dict.fromkeys(
            ("_upsample_bilinear2d_aa.default", "_upsample_bilinear2d_aa.vec"), _convert_antialias
        ),
    ),
    Defect(
        name="bilinear_scale",
        title="bilinear interpolation by a factor takes the ratio of the sizes instead",
        location="ExportedProgramImporter._upsample_impl",
        description=(
            "The factor gives the size of the result and is then forgotten: 7 pixels times 1.7 are 11, and the pixels "
            "are taken 7/11 apart instead of 1/1.7. Right only where the size is a whole number without rounding."
        ),
        function=lambda x: torch.nn.functional.interpolate(x, scale_factor=1.7, mode="bilinear"),
        args=IMAGE,
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="values of other places in the image"),
        workaround="A converter that computes the weights from the factor.",
        converters={"upsample_bilinear2d.vec": _convert_bilinear},
    ),
    ONE_PIXEL,
    Defect(
        name="roi_align_offset",
        title="roi_align with aligned=True and a scale samples at the wrong place",
        location="ExportedProgramImporter._torchvision_roi_align",
        description=(
            "Half a pixel is subtracted from the boxes before they are scaled instead of after, so that they are "
            "moved by scale / 2. Right only where spatial_scale is 1. (SAM 3 uses aligned=False, which is right, "
            "with the adaptive number of samples too.)"
        ),
        function=aligned_roi,
        args=MOVED_BOX,
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="values of the neighbourhood"),
        workaround="A converter that scales first.",
        converters={"roi_align.default": _convert_roi_align},
    ),
    Defect(
        name="roi_align_no_size",
        title="roi_align with aligned=True of a box without size is not 0",
        location="relax.op.vision.roi_align",
        description=(
            "With the adaptive number of samples a box without width or height has none, and PyTorch's mean of "
            "them is 0; TVM takes one sample. With aligned=False, as in SAM 3, boxes are at least one pixel wide "
            "and high."
        ),
        function=aligned_roi,
        args=EMPTY_BOX,
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="1 instead of 0"),
        workaround="The converter of roi_align_offset sets them to 0.",
    ),
)
