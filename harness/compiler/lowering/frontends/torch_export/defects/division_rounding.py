"""Works around div with a rounding mode (floor_divide, //) by a Python number."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.torch_export.defect import TorchDefect


class _FloorDivide(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x // 2


def _convert(node: Node, importer: Any) -> Any:
    """Divides as PyTorch does; `div_floor_floating` in c10/util/generic_math.h defines the result for floats."""
    from tvm import relax

    emit = importer.block_builder.emit
    left, right = importer.retrieve_args(node)[:2]
    dtype = importer._convert_data_type(node.meta["val"].dtype)
    left, right = (
        emit(relax.op.astype(side, dtype)) if isinstance(side, relax.Expr) else relax.const(side, dtype)
        for side in (left, right)
    )
    mode = node.kwargs.get("rounding_mode")
    if mode is None:
        return emit(relax.op.divide(left, right))
    is_float = node.meta["val"].dtype.is_floating_point
    if mode == "trunc":
        return emit(relax.op.trunc(emit(relax.op.divide(left, right))) if is_float else _truncate(left, right, emit))
    if not is_float:
        return emit(relax.op.floor_divide(left, right))
    if isinstance(node.args[1], int | float) and _is_power_of_two(node.args[1]):
        return emit(relax.op.floor(emit(relax.op.divide(left, right))))
    return _floor(left, right, dtype, emit)


def _is_power_of_two(number: float) -> bool:
    """Returns whether division by the number is exact."""
    return abs(math.frexp(number)[0]) == 0.5


def _truncate(left: Any, right: Any, emit: Any) -> Any:
    """Divides integers towards zero, by a division towards minus infinity."""
    from tvm import relax

    floored = emit(relax.op.floor_divide(left, right))
    inexact = emit(relax.op.not_equal(emit(relax.op.multiply(floored, right)), left))
    negative = emit(relax.op.less(floored, relax.const(0, floored.ty.dtype.dtype)))
    rounds_up = emit(relax.op.logical_and(inexact, negative))
    return relax.op.add(floored, emit(relax.op.astype(rounds_up, floored.ty.dtype.dtype)))


def _floor(left: Any, right: Any, dtype: str, emit: Any) -> Any:
    """Computes the floor of the exact quotient: (left - mod) / right is nearly whole, so that rounding is safe."""
    from tvm import relax

    zero, unit = relax.const(0, dtype), relax.const(1, dtype)
    remainder = emit(relax.op.mod(left, right))
    quotient = emit(relax.op.divide(emit(relax.op.subtract(left, remainder)), right))
    other_sign = emit(relax.op.logical_xor(emit(relax.op.less(remainder, zero)), emit(relax.op.less(right, zero))))
    below = emit(relax.op.logical_and(other_sign, emit(relax.op.not_equal(remainder, zero))))
    quotient = emit(relax.op.where(below, emit(relax.op.subtract(quotient, unit)), quotient))
    floored = emit(relax.op.floor(quotient))
    fraction = emit(relax.op.subtract(quotient, floored))
    rounded_up = emit(relax.op.add(floored, unit))
    whole = emit(relax.op.where(emit(relax.op.greater(fraction, relax.const(0.5, dtype))), rounded_up, floored))
    by_zero = emit(relax.op.equal(right, zero))
    return emit(relax.op.where(by_zero, emit(relax.op.divide(left, right)), whole))


DEFECTS = (
    TorchDefect(
        name="floor_divide_by_number",
        title="// by a Python number is rejected",
        location="BaseFXGraphImporter._div",
        description=(
            "The number becomes relax.const(2), an int32, whatever the dtype of the tensor, and Relax does not "
            "mix dtypes. SAM 3's decoder divides a float arange by 2 that way in its sine embedding. (With a "
            "tensor as divisor, floor(a / b) is also one too large where a / b rounds up to a whole number, as in "
            "1.0 // 0.1.)"
        ),
        reproduction=lambda: (_FloorDivide(), (torch.arange(4, dtype=torch.float32),)),
        raw=RawOutcome(Symptom.REJECTED, "TypeError", "must have the same datatype"),
        workaround="A converter that casts both sides to the result's dtype and divides as PyTorch does.",
        converters={"div.Tensor_mode": _convert},
    ),
)
