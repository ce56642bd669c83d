"""Works around Pow of integers, and of two dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.onnx.defect import OnnxDefect

if TYPE_CHECKING:
    from tvm import relax


class _Power(torch.nn.Module):
    def forward(self, x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
        return x**exponent


class _Square(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x**2


def _convert(_builder: relax.BlockBuilder, inputs: list[Any], _attributes: dict[str, Any]) -> Any:
    """Raises integers in float64, which is exact up to 2^53, and rounds, because the result has the base's dtype."""
    from tvm import relax

    base, exponent = inputs
    dtype = str(base.ty.dtype)
    if dtype.startswith("float"):
        return relax.op.power(base, exponent if str(exponent.ty.dtype) == dtype else relax.op.astype(exponent, dtype))
    result = relax.op.power(relax.op.astype(base, "float64"), relax.op.astype(exponent, "float64"))
    return relax.op.astype(relax.op.round(result), dtype)


DEFECTS = (
    OnnxDefect(
        name="pow_two_dtypes",
        title="Pow with an exponent of another dtype is rejected",
        location="tvm.relax.frontend.onnx.onnx_frontend.Pow",
        description=(
            "ONNX allows an exponent of another dtype; the operands are handed on, and Relax does not mix dtypes."
        ),
        reproduction=lambda: (_Power(), (torch.tensor([4.0, 2.0]), torch.tensor([2, 3]))),
        raw=RawOutcome(Symptom.REJECTED, "TypeError", "must have the same datatype"),
        workaround="A converter that casts the exponent.",
        converters={"Pow": _convert},
    ),
    OnnxDefect(
        name="pow_integer",
        title="Pow of integers does not compile",
        location="relax.op.power",
        description="Relax's power knows floating-point numbers alone.",
        reproduction=lambda: (_Square(), (torch.tensor([-4, 4]),)),
        raw=RawOutcome(Symptom.REJECTED, "InternalError", "power only applies to float"),
        workaround="The converter of pow_two_dtypes computes in float64 and rounds.",
    ),
)
