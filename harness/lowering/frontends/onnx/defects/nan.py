"""NaN that becomes a number."""

from __future__ import annotations

from harness.lowering.frontends import nan
from harness.lowering.frontends.onnx.defect import OnnxDefect

_LOST = (nan.RELU, nan.ELU, nan.MAXIMUM, nan.MINIMUM, nan.HARDSIGMOID, nan.MAX_POOL, nan.AMAX, nan.AMIN)

DEFECTS = (
    *(OnnxDefect(**lost.facts) for lost in _LOST),
    *(OnnxDefect(**facts) for facts in nan.INDICES),
)
