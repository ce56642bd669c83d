"""Works around the loss of NaN in Clip, Max and Min, and their import as slow functions."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.onnx.defect import OnnxDefect

if TYPE_CHECKING:
    from tvm import relax


class _Clamp(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-1, 1)


class _Positive(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(min=0)


def _convert(_builder: relax.BlockBuilder, inputs: list[Any], _attributes: dict[str, Any]) -> Any:
    """Puts the bound first, because TVM's maximum and minimum return their second operand if one is NaN."""
    from tvm import relax

    value, lowest, highest = [*inputs, None, None][:3]
    if lowest is not None:
        value = relax.op.maximum(lowest, value)
    return value if highest is None else relax.op.minimum(highest, value)


def _convert_max(_builder: relax.BlockBuilder, inputs: list[Any], _attributes: dict[str, Any]) -> Any:
    from tvm import relax

    return functools.reduce(lambda value, operand: relax.op.maximum(operand, value), inputs)


def _convert_min(_builder: relax.BlockBuilder, inputs: list[Any], _attributes: dict[str, Any]) -> Any:
    from tvm import relax

    return functools.reduce(lambda value, operand: relax.op.minimum(operand, value), inputs)


DEFECTS = (
    OnnxDefect(
        name="clip_nan",
        title="Clip turns NaN into a bound",
        location="LLVM code generation of tirx.Max and tirx.Min",
        description=(
            "max(a, b) is compiled to `a > b ? a : b`, so that a NaN on the left is lost, and the converter puts the "
            "tensor on the left. PyTorch's clamp keeps NaN. The converter also calls a compiled function where "
            "relax.maximum and relax.minimum would do, which no rule recognizes."
        ),
        reproduction=lambda: (_Clamp(), (torch.tensor([math.nan, -2.0, 2.0]),)),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="-1 instead of NaN"),
        workaround="A converter that emits these operators, with the bound on the left.",
        converters={"Clip": _convert},
    ),
    OnnxDefect(
        name="max_stack",
        title="Max and Min of tensors are the reduction of a stack of them",
        location="tvm.relax.frontend.onnx.onnx_frontend.MultiInputBase",
        description=(
            "The operands are broadcast to one shape and stacked in memory, and the maximum is taken over the new "
            "axis. A clamp with one bound is exported that way. A NaN is lost as well."
        ),
        reproduction=lambda: (_Positive(), (torch.tensor([math.nan, -1.0, 1.0]),)),
        raw=RawOutcome(Symptom.SLOW, absent="R.maximum(", wrong="relax.stack and relax.max instead of relax.maximum"),
        workaround="Converters that emit relax.maximum or relax.minimum of two at a time.",
        converters={"Max": _convert_max, "Min": _convert_min},
    ),
)
