"""Clip: a compiled function instead of operators, and NaN."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from harness.lowering.frontends.onnx.defect import OnnxDefect
from harness.lowering.frontends.torch_export.defect import RawOutcome, Symptom

if TYPE_CHECKING:
    from tvm import relax


class _Clamp(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(min=0)


def _convert(_builder: relax.BlockBuilder, inputs: list[Any], _attributes: dict[str, Any]) -> Any:
    """The bound comes first: TVM's maximum and minimum return their second operand where one is NaN."""
    from tvm import relax

    value, lowest, highest = [*inputs, None, None][:3]
    if lowest is not None:
        value = relax.op.maximum(lowest, value)
    return value if highest is None else relax.op.minimum(highest, value)


DEFECTS = (
    OnnxDefect(
        name="clip_nan",
        title="Clip turns NaN into a bound",
        where="LLVM code generation of tirx.Max and tirx.Min",
        what=(
            "max(a, b) is compiled to `a > b ? a : b`, so that a NaN on the left is lost, and the converter puts the "
            "tensor on the left. PyTorch's clamp keeps NaN. The converter also calls a compiled function where "
            "relax.maximum and relax.minimum would do, which no rule recognizes."
        ),
        reproduction=lambda: (_Clamp(), (torch.tensor([math.nan, -1.0, 1.0]),)),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="0 instead of NaN"),
        workaround="A converter that emits these operators, with the bound on the left.",
        converters={"Clip": _convert},
    ),
)
