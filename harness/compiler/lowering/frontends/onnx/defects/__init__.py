"""Registers the defects of the frontend `onnx`, one file for each subject; passes run in this order."""

from __future__ import annotations

from harness.compiler.lowering.frontends.defect import Defect
from harness.compiler.lowering.frontends.onnx.defects import (
    arithmetic,
    complex_views,
    empty_tensors,
    images,
    indexing,
    layers,
)

_SUBJECTS = (layers, empty_tensors, indexing, images, arithmetic, complex_views)
DEFECTS: tuple[Defect, ...] = tuple(defect for subject in _SUBJECTS for defect in subject.DEFECTS)
