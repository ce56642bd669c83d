"""roi_align with aligned=True and a scale."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from harness.lowering.frontends.torch_export.defect import Defect, RawOutcome, Symptom


class _Align(torch.nn.Module):
    def forward(self, image: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        import torchvision

        pooled: torch.Tensor = torchvision.ops.roi_align(image, boxes, 2, spatial_scale=0.5, aligned=True)
        return pooled


def _reproduction() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    image = torch.arange(16.0).reshape(1, 1, 4, 4)
    return _Align(), (image, torch.tensor([[0.0, 1.0, 1.0, 5.0, 6.0]]))


def _convert(node: Node, importer: Any) -> Any:
    """Scales the boxes, then moves them by half a pixel; a box of no size has no samples, so that its mean is 0.

    Source: torchvision/csrc/ops/cpu/roi_align_kernel.cpp.
    """
    from tvm import relax

    emit = importer.block_builder.emit
    image, boxes, scale, height, width, ratio, aligned = importer.retrieve_args(node)
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
            pooled_size=(height, width),
            spatial_scale=scale,
            sample_ratio=ratio,
            aligned=aligned,
            layout="NCHW",
            mode="avg",
        )
    )
    if not aligned or ratio > 0:
        return result
    first = emit(relax.op.strided_slice(corners, axes=[1], begin=[0], end=[2]))
    second = emit(relax.op.strided_slice(corners, axes=[1], begin=[2], end=[4]))
    smallest = emit(relax.op.min(emit(relax.op.subtract(second, first)), axis=1))
    filled = emit(relax.op.reshape(emit(relax.op.greater(smallest, relax.const(0.0, dtype))), [-1, 1, 1, 1]))
    return emit(relax.op.where(filled, result, relax.const(0.0, dtype)))


def _reproduce_empty() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    return _Align(), (torch.ones(1, 1, 4, 4), torch.tensor([[0.0, 2.0, 2.0, 2.0, 2.0]]))


DEFECTS = (
    Defect(
        name="roi_align_offset",
        title="roi_align with aligned=True and a scale samples at the wrong place",
        where="ExportedProgramImporter._torchvision_roi_align",
        what=(
            "Half a pixel is subtracted from the boxes before they are scaled instead of after, so that they are "
            "moved by scale / 2. Right only where spatial_scale is 1. (SAM 3 uses aligned=False, which is right, "
            "with the adaptive number of samples too.)"
        ),
        reproduction=_reproduction,
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="values of the neighbourhood"),
        workaround="A converter that scales first.",
        converters={"roi_align.default": _convert},
    ),
    Defect(
        name="roi_align_no_size",
        title="roi_align with aligned=True of a box without size is not 0",
        where="relax.op.vision.roi_align",
        what=(
            "With the adaptive number of samples a box without width or height has none, and PyTorch's mean of "
            "them is 0; TVM takes one sample. With aligned=False, as in SAM 3, boxes are at least one pixel wide "
            "and high."
        ),
        reproduction=_reproduce_empty,
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="1 instead of 0"),
        workaround="The converter of roi_align_offset sets them to 0.",
    ),
)
