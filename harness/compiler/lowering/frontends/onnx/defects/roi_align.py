"""Works around RoiAlign with half_pixel coordinates and a scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.onnx.defect import OnnxDefect
from harness.compiler.lowering.frontends.roi_align import reproduce_empty, reproduce_offset, roi_align

if TYPE_CHECKING:
    from tvm import relax


def _convert(builder: relax.BlockBuilder, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Converts `RoiAlign` as PyTorch computes it; image indices become a column of the boxes."""
    from tvm import relax

    image, boxes, batch = (builder.normalize(value) for value in inputs)
    index = relax.op.expand_dims(relax.op.astype(batch, boxes.ty.dtype.dtype), axis=1)
    return roi_align(
        builder.normalize,
        image,
        builder.normalize(relax.op.concat([index, boxes], axis=1)),
        (attributes.get("output_height", 1), attributes.get("output_width", 1)),
        float(attributes.get("spatial_scale", 1.0)),
        int(attributes.get("sampling_ratio", 0)),
        attributes.get("coordinate_transformation_mode", b"half_pixel") == b"half_pixel",
        attributes.get("mode", b"avg").decode(),
    )


DEFECTS = (
    OnnxDefect(
        name="roi_align_offset",
        title="RoiAlign with half_pixel coordinates and a scale samples at the wrong place",
        location="tvm.relax.frontend.onnx.onnx_frontend.RoiAlign",
        description=(
            "Half a pixel is subtracted from the boxes before they are scaled instead of after, so that they are moved "
            "by scale / 2. (SAM 3 uses output_half_pixel, which is right.)"
        ),
        reproduction=reproduce_offset,
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="values of the neighbourhood"),
        workaround="A converter that scales first.",
        converters={"RoiAlign": _convert},
    ),
    OnnxDefect(
        name="roi_align_no_size",
        title="RoiAlign with half_pixel coordinates of a box without size is not 0",
        location="relax.op.vision.roi_align",
        description=(
            "With the adaptive number of samples a box without width or height has none, and PyTorch's mean of them is "
            "0; TVM takes one sample."
        ),
        reproduction=reproduce_empty,
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="1.5 instead of 0"),
        workaround="The converter of roi_align_offset sets them to 0.",
    ),
)
