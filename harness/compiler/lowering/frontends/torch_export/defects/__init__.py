"""Registers the defects of the frontend `torch`, one file for each workaround; passes run in this order."""

from __future__ import annotations

from harness.compiler.lowering.frontends.torch_export.defect import TorchDefect
from harness.compiler.lowering.frontends.torch_export.defects import (
    assertions,
    attention,
    clamp,
    division_rounding,
    double_fill,
    empty_tensors,
    grid_sample,
    group_norm,
    indexing,
    infinite_fill,
    matmul_dtype,
    nan,
    promotion,
    reductions,
    resize,
    roi_align,
    scatter,
    select_negative,
    slice_scatter,
    stable_sort,
)

DEFECTS: tuple[TorchDefect, ...] = (
    *assertions.DEFECTS,
    *attention.DEFECTS,
    *empty_tensors.DEFECTS,
    *grid_sample.DEFECTS,
    *select_negative.DEFECTS,
    *indexing.DEFECTS,
    *promotion.DEFECTS,
    *division_rounding.DEFECTS,
    *clamp.DEFECTS,
    *reductions.DEFECTS,
    *resize.DEFECTS,
    *roi_align.DEFECTS,
    *scatter.DEFECTS,
    *slice_scatter.DEFECTS,
    *stable_sort.DEFECTS,
    *infinite_fill.DEFECTS,
    *group_norm.DEFECTS,
    *matmul_dtype.DEFECTS,
    *double_fill.DEFECTS,
    *nan.DEFECTS,
)
