"""Works around roi_align with aligned=True and a scale."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.roi_align import reproduce_empty, reproduce_offset, roi_align
from harness.compiler.lowering.frontends.torch_export.defect import TorchDefect


def _convert(node: Node, importer: Any) -> Any:
    """Converts `roi_align` as PyTorch computes it."""
    image, boxes, scale, height, width, ratio, aligned = importer.retrieve_args(node)
    return roi_align(importer.block_builder.emit, image, boxes, (height, width), scale, ratio, aligned)


DEFECTS = (
    TorchDefect(
        name="roi_align_offset",
        title="roi_align with aligned=True and a scale samples at the wrong place",
        location="ExportedProgramImporter._torchvision_roi_align",
        description=(
            "Half a pixel is subtracted from the boxes before they are scaled instead of after, so that they are "
            "moved by scale / 2. Right only where spatial_scale is 1. (SAM 3 uses aligned=False, which is right, "
            "with the adaptive number of samples too.)"
        ),
        reproduction=reproduce_offset,
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="values of the neighbourhood"),
        workaround="A converter that scales first.",
        converters={"roi_align.default": _convert},
    ),
    TorchDefect(
        name="roi_align_no_size",
        title="roi_align with aligned=True of a box without size is not 0",
        location="relax.op.vision.roi_align",
        description=(
            "With the adaptive number of samples a box without width or height has none, and PyTorch's mean of "
            "them is 0; TVM takes one sample. With aligned=False, as in SAM 3, boxes are at least one pixel wide "
            "and high."
        ),
        reproduction=reproduce_empty,
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="1 instead of 0"),
        workaround="The converter of roi_align_offset sets them to 0.",
    ),
)
