"""Registers the defects of the frontend `torch`, one file for each subject; passes run in this order."""

from __future__ import annotations

from harness.compiler.lowering.frontends.defect import Defect
from harness.compiler.lowering.frontends.torch_export.defects import (
    arithmetic,
    graph,
    images,
    indexing,
    layers,
    promotion,
    reductions,
)

_SUBJECTS = (graph, layers, images, indexing, promotion, arithmetic, reductions)
DEFECTS: tuple[Defect, ...] = tuple(defect for subject in _SUBJECTS for defect in subject.DEFECTS)
