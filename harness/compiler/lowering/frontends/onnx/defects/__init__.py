"""Registers the defects of the frontend `onnx`, one file for each workaround; passes run in this order."""

from __future__ import annotations

from harness.compiler.lowering.frontends.onnx.defect import OnnxDefect
from harness.compiler.lowering.frontends.onnx.defects import (
    attention,
    booleans,
    clip,
    complex_views,
    cumprod,
    einsum,
    empty_tensors,
    floor_divide,
    gather,
    group_norm,
    log_sigmoid,
    logcumsumexp,
    nan,
    power,
    resize,
    roi_align,
    scatter,
    scatter_nd,
    subtraction,
    tile,
)

DEFECTS: tuple[OnnxDefect, ...] = (
    *attention.DEFECTS,
    *empty_tensors.DEFECTS,
    *gather.DEFECTS,
    *scatter_nd.DEFECTS,
    *clip.DEFECTS,
    *einsum.DEFECTS,
    *group_norm.DEFECTS,
    *tile.DEFECTS,
    *resize.DEFECTS,
    *roi_align.DEFECTS,
    *power.DEFECTS,
    *booleans.DEFECTS,
    *floor_divide.DEFECTS,
    *log_sigmoid.DEFECTS,
    *logcumsumexp.DEFECTS,
    *complex_views.DEFECTS,
    *cumprod.DEFECTS,
    *scatter.DEFECTS,
    *subtraction.DEFECTS,
    *nan.DEFECTS,
)
