"""The registry of defects: one file for each fix, one line each; passes run in this order."""

from __future__ import annotations

from harness.lowering.frontends.onnx.defect import OnnxDefect
from harness.lowering.frontends.onnx.defects import attention

DEFECTS: tuple[OnnxDefect, ...] = (*attention.DEFECTS,)
