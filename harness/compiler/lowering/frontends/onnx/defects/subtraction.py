"""Works around TVM's subtraction of integer tensors from numbers."""

from __future__ import annotations

from typing import Any

import torch

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.onnx.defect import OnnxDefect

_FLOAT32 = 1
"""In ONNX's numbers of dtypes."""


class _Rest(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 - x


def _translate(x: Any, number: float, alpha: float = 1) -> Any:
    from onnxscript import opset23

    op: Any = opset23
    if not x.dtype.is_floating_point() and float in (type(number), type(alpha)):
        x = op.Cast(x, to=_FLOAT32)

    def constant(value: float) -> Any:
        kind = "value_float" if type(value) is float else "value_int"
        return op.CastLike(op.Constant(**{kind: value}), x)

    return op.Sub(constant(number), x if alpha == 1 else op.Mul(x, constant(alpha)))


DEFECTS = (
    OnnxDefect(
        name="number_minus_integers",
        title="A Python float minus a tensor of integers is rejected",
        location="torch.onnx, type promotion",
        description="It is turned around, and the pass that promotes integers does not know a number on the left.",
        reproduction=lambda: (_Rest(), (torch.tensor([1, 2, -3]),)),
        raw=RawOutcome(Symptom.REJECTED, "ConversionError", r"aten\.sub"),
        workaround="A translation of the subtraction as it is written.",
        translations={torch.ops.aten.rsub.Scalar: _translate},
    ),
)
