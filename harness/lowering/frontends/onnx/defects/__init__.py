"""The registry of defects: one file for each fix, one line each; passes run in this order."""

from __future__ import annotations

from harness.lowering.frontends.onnx.defect import OnnxDefect
from harness.lowering.frontends.onnx.defects import (
    attention,
    clip,
    einsum,
    empty_tensors,
    gather,
    group_norm,
    tile,
)

DEFECTS: tuple[OnnxDefect, ...] = (
    *attention.DEFECTS,
    *empty_tensors.DEFECTS,
    *gather.DEFECTS,
    *clip.DEFECTS,
    *einsum.DEFECTS,
    *group_norm.DEFECTS,
    *tile.DEFECTS,
)
