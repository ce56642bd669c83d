"""RoiAlign with half_pixel coordinates and a scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from harness.lowering.frontends.onnx.defect import OnnxDefect
from harness.lowering.frontends.torch_export.defect import RawOutcome, Symptom

if TYPE_CHECKING:
    from tvm import relax


class _Align(torch.nn.Module):
    def forward(self, image: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        import torchvision

        pooled: torch.Tensor = torchvision.ops.roi_align(image, boxes, 2, spatial_scale=0.5, aligned=True)
        return pooled


def _reproduction() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    import torchvision  # noqa: F401  # the operator has to be there before the export begins

    return _Align(), (torch.arange(16.0).reshape(1, 1, 4, 4), torch.tensor([[0.0, 1.0, 1.0, 5.0, 6.0]]))


def _reproduce_empty() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    import torchvision  # noqa: F401

    return _Align(), (torch.ones(1, 1, 4, 4), torch.tensor([[0.0, 2.0, 2.0, 2.0, 2.0]]))


def _convert(builder: relax.BlockBuilder, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Scales the boxes, then moves them by half a pixel; a box of no size has no samples, so that its mean is 0."""
    from tvm import relax

    image, boxes, batch = (builder.normalize(value) for value in inputs)
    dtype = boxes.ty.dtype.dtype
    aligned = attributes.get("coordinate_transformation_mode", b"half_pixel") == b"half_pixel"
    scale, ratio = float(attributes.get("spatial_scale", 1.0)), int(attributes.get("sampling_ratio", 0))
    corners = boxes
    if aligned:
        scaled = relax.op.multiply(boxes, relax.const(scale, dtype))
        boxes, scale = relax.op.subtract(scaled, relax.const(0.5, dtype)), 1.0
    index = relax.op.expand_dims(relax.op.astype(batch, dtype), axis=1)
    result = relax.op.vision.roi_align(
        image,
        relax.op.concat([index, boxes], axis=1),
        pooled_size=(attributes.get("output_height", 1), attributes.get("output_width", 1)),
        spatial_scale=scale,
        sample_ratio=ratio,
        aligned=aligned,
        layout="NCHW",
        mode=attributes.get("mode", b"avg").decode(),
    )
    if not aligned or ratio > 0:
        return result
    first = relax.op.strided_slice(corners, axes=[1], begin=[0], end=[2])
    second = relax.op.strided_slice(corners, axes=[1], begin=[2], end=[4])
    smallest = relax.op.min(relax.op.subtract(second, first), axis=1)
    filled = relax.op.expand_dims(relax.op.greater(smallest, relax.const(0.0, dtype)), [1, 2, 3])
    return relax.op.where(filled, result, relax.const(0.0, dtype))


DEFECTS = (
    OnnxDefect(
        name="roi_align_offset",
        title="RoiAlign with half_pixel coordinates and a scale samples at the wrong place",
        where="tvm.relax.frontend.onnx.onnx_frontend.RoiAlign",
        what=(
            "Half a pixel is subtracted from the boxes before they are scaled instead of after, so that they are moved "
            "by scale / 2. (SAM 3 uses output_half_pixel, which is right.)"
        ),
        reproduction=_reproduction,
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="values of the neighbourhood"),
        workaround="A converter that scales first.",
        converters={"RoiAlign": _convert},
    ),
    OnnxDefect(
        name="roi_align_no_size",
        title="RoiAlign with half_pixel coordinates of a box without size is not 0",
        where="relax.op.vision.roi_align",
        what=(
            "With the adaptive number of samples a box without width or height has none, and PyTorch's mean of them is "
            "0; TVM takes one sample."
        ),
        reproduction=_reproduce_empty,
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="1.5 instead of 0"),
        workaround="The converter of roi_align_offset sets them to 0.",
    ),
)
