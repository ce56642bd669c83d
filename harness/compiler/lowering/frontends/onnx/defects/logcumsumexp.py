"""Works around running logarithms of sums that depend on what comes after them."""

from __future__ import annotations

import math
from typing import Any

import torch

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.onnx.defect import OnnxDefect


class _LogCumulativeSum(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.logcumsumexp(x, -1)


def _translate(x: Any, dim: int) -> Any:
    """Adds to each element what is 1, 2, 4, … places before it."""
    from onnxscript import opset23

    op: Any = opset23
    shape = [int(extent) for extent in x.shape]
    if not shape:
        return x
    axis, places = dim % len(shape), 1
    nothing = op.CastLike(op.Constant(value_float=-math.inf), x)
    while places < shape[axis]:
        begin, end, along = (op.Constant(value_ints=[number]) for number in (0, shape[axis] - places, axis))
        before = [places if index == axis else extent for index, extent in enumerate(shape)]
        earlier = op.Concat(
            op.Expand(nothing, op.Constant(value_ints=before)), op.Slice(x, begin, end, along), axis=axis
        )
        x, places = _log_of_sum(op, x, earlier), 2 * places
    return x


def _log_of_sum(op: Any, a: Any, b: Any) -> Any:
    """Returns log(exp(a) + exp(b)), which does not overflow."""
    largest = op.Max(a, b)
    largest = op.Where(op.IsInf(largest), op.CastLike(op.Constant(value_float=0.0), a), largest)
    return op.Add(op.Log(op.Add(op.Exp(op.Sub(a, largest)), op.Exp(op.Sub(b, largest)))), largest)


DEFECTS = (
    OnnxDefect(
        name="logcumsumexp",
        title="logcumsumexp loses elements before a larger one",
        location="torch.onnx, aten_logcumsumexp",
        description=(
            "The maximum of the whole axis is subtracted before numbers are added up, so that an element far below it "
            "is -inf, and all are NaN where one is."
        ),
        reproduction=lambda: (_LogCumulativeSum(), (torch.tensor([[0.0, 1.0, 200.0], [1.0, 2.0, math.nan]]),)),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="-inf instead of 0, and NaN instead of 1"),
        workaround="A translation of our own: to each element those 1, 2, 4, … places before it are added in turn.",
        translations={torch.ops.aten.logcumsumexp.default: _translate},
    ),
)
