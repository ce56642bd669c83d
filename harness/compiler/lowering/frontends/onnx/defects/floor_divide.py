"""Works around the division of floating-point numbers that rounds down."""

from __future__ import annotations

from typing import Any

import torch

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.onnx.defect import OnnxDefect


class _FloorDivide(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x // 0.1


def _translate(left: Any, right: Any) -> Any:
    """Divides as PyTorch does; `div_floor_floating` in c10/util/generic_math.h defines the result for floats."""
    from onnxscript import opset23

    op: Any = opset23

    is_float = left.dtype.is_floating_point()
    zero, unit, half = (op.CastLike(op.Constant(value_float=number), left) for number in (0.0, 1.0, 0.5))
    if is_float:
        remainder = op.Mod(left, right, fmod=1)
        quotient = op.Div(op.Sub(left, remainder), right)  # nearly whole, so that rounding it is safe
    else:
        quotient = op.Div(left, right)
        remainder = op.Sub(left, op.Mul(quotient, right))
    other_sign = op.Xor(op.Less(remainder, zero), op.Less(right, zero))
    below = op.And(other_sign, op.Not(op.Equal(remainder, zero)))
    quotient = op.Where(below, op.Sub(quotient, unit), quotient)
    if not is_float:
        return quotient
    floored = op.Floor(quotient)
    over_half = op.Greater(op.Sub(quotient, floored), half)
    whole = op.Where(over_half, op.Add(floored, unit), floored)
    return op.Where(op.Equal(right, zero), op.Div(left, right), whole)


DEFECTS = (
    OnnxDefect(
        name="floor_divide",
        title="// of floating-point numbers is the floor of the rounded quotient",
        location="torch.onnx, aten_floor_divide",
        description=(
            "1.0 // 0.1 is 9 in PyTorch, because 0.1 is a little more than a tenth in float32; the quotient rounds up "
            "to 10 before the floor is taken. Divisors that are powers of two, as in SAM 3's decoder, are right."
        ),
        reproduction=lambda: (_FloorDivide(), (torch.tensor([1.0, -1.0, 0.35]),)),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="10 instead of 9"),
        workaround="A translation of our own, which divides what is left without the remainder.",
        translations={torch.ops.aten.floor_divide.default: _translate},
    ),
)
