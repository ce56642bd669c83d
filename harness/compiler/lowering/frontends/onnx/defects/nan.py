"""Lists the operators whose NaN becomes a number."""

from __future__ import annotations

from harness.compiler.lowering.frontends import nan
from harness.compiler.lowering.frontends.onnx.defect import OnnxDefect

_NAN_DEFECTS = (nan.RELU, nan.ELU, nan.MAXIMUM, nan.MINIMUM, nan.HARDSIGMOID, nan.MAX_POOL, nan.AMAX, nan.AMIN)

DEFECTS = (
    *(OnnxDefect(**lost.facts) for lost in _NAN_DEFECTS),
    *(OnnxDefect(**facts) for facts in (nan.INFINITY, *nan.INDICES, *nan.SORTS)),
)
