"""Works around elementwise operators: division with a rounding mode, clamp, and tensors filled with a number."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node
from tvm import relax

from harness.compiler.lowering.frontends.defect import Defect, RawOutcome, Symptom
from harness.compiler.lowering.frontends.rewriting import argument, value_of


def _convert_division(node: Node, importer: Any) -> Any:
    """Divides as PyTorch does; `div_floor_floating` in c10/util/generic_math.h defines the result for floats."""
    emit = importer.block_builder.emit
    dtype = importer._convert_data_type(value_of(node).dtype)
    left, right = (
        emit(relax.op.astype(side, dtype)) if isinstance(side, relax.Expr) else relax.const(side, dtype)
        for side in importer.retrieve_args(node)[:2]
    )
    mode = node.kwargs.get("rounding_mode")
    is_float = value_of(node).is_floating_point()
    if mode is None:
        return emit(relax.op.divide(left, right))
    if mode == "trunc":
        return emit(relax.op.trunc(relax.op.divide(left, right)) if is_float else _truncate(left, right, dtype, emit))
    if not is_float:
        return emit(relax.op.floor_divide(left, right))
    if isinstance(node.args[1], int | float) and _is_power_of_two(node.args[1]):
        return emit(relax.op.floor(relax.op.divide(left, right)))
    return _floor(left, right, dtype, emit)


def _is_power_of_two(number: float) -> bool:
    """Returns whether division by the number is exact."""
    return abs(math.frexp(number)[0]) == 0.5


def _truncate(left: Any, right: Any, dtype: str, emit: Any) -> Any:
    """Divides integers towards zero, by a division towards minus infinity."""
    floored = emit(relax.op.floor_divide(left, right))
    inexact = relax.op.not_equal(relax.op.multiply(floored, right), left)
    rounds_up = relax.op.logical_and(inexact, relax.op.less(floored, relax.const(0, dtype)))
    return relax.op.add(floored, relax.op.astype(rounds_up, dtype))


def _floor(left: Any, right: Any, dtype: str, emit: Any) -> Any:
    """Computes the floor of the exact quotient: (left - mod) / right is nearly whole, so that rounding is safe."""
    zero, unit = relax.const(0, dtype), relax.const(1, dtype)
    remainder = emit(relax.op.mod(left, right))
    quotient = emit(relax.op.divide(relax.op.subtract(left, remainder), right))
    other_sign = relax.op.logical_xor(relax.op.less(remainder, zero), relax.op.less(right, zero))
    below = relax.op.logical_and(other_sign, relax.op.not_equal(remainder, zero))
    quotient = emit(relax.op.where(below, relax.op.subtract(quotient, unit), quotient))
    floored = emit(relax.op.floor(quotient))
    fraction = emit(relax.op.subtract(quotient, floored))
    rounded_up = emit(relax.op.add(floored, unit))
    whole = emit(relax.op.where(relax.op.greater(fraction, relax.const(0.5, dtype)), rounded_up, floored))
    return emit(relax.op.where(relax.op.equal(right, zero), relax.op.divide(left, right), whole))


def _convert_clamp(node: Node, importer: Any) -> Any:
    """Puts the bound first, because TVM's maximum and minimum return their second operand if one is NaN."""
    emit, dtype = importer.block_builder.emit, importer._convert_data_type(value_of(node).dtype)
    value = importer.env[node.args[0]]
    if value_of(node.args[0]).dtype != value_of(node).dtype:
        value = emit(relax.op.astype(value, dtype))
    for parameter in node.target._schema.arguments[1:]:
        bound = argument(node, parameter.name)
        choose = relax.op.maximum if parameter.name == "min" else relax.op.minimum
        if isinstance(bound, Node):
            value = emit(choose(relax.op.astype(importer.env[bound], dtype), value))
        elif bound is not None:
            value = emit(choose(relax.const(bound, dtype), value))
    return value


def _convert_full(node: Node, importer: Any) -> Any:
    """Broadcasts a constant; `full` and `full_like` both have it as their second argument."""
    value = value_of(node)
    scalar = relax.const(node.args[1], importer._convert_data_type(value.dtype))
    return importer.block_builder.emit(relax.op.broadcast_to(scalar, list(value.shape)))


def _convert_full_like(node: Node, importer: Any) -> Any:
    if value_of(node).dtype != torch.float64 and math.isfinite(node.args[1]):
        return importer._full_like(node)
    return _convert_full(node, importer)


DEFECTS = (
    Defect(
        name="floor_divide_by_number",
        title="// by a Python number is rejected",
        location="BaseFXGraphImporter._div",
        description=(
            "The number becomes relax.const(2), an int32, whatever the dtype of the tensor, and Relax does not "
            "mix dtypes. SAM 3's decoder divides a float arange by 2 that way in its sine embedding. (With a "
            "tensor as divisor, floor(a / b) is also one too large where a / b rounds up to a whole number, as in "
            "1.0 // 0.1.)"
        ),
        function=lambda x: x // 2,
        args=(torch.arange(4.0),),
        raw=RawOutcome(Symptom.REJECTED, "TypeError", "must have the same datatype"),
        workaround="A converter that casts both sides to the result's dtype and divides as PyTorch does.",
        converters={"div.Tensor_mode": _convert_division},
    ),
    Defect(
        name="clamp_integer",
        title="clamp of an integer tensor with one bound is rejected",
        location="BaseFXGraphImporter._clamp",
        description="The missing bound becomes an infinity, which has no integer value.",
        function=lambda x: x.clamp(min=0),
        args=(torch.tensor([-1, 1, 5]),),
        raw=RawOutcome(Symptom.REJECTED, "RuntimeError", "infinity"),
        workaround=(
            "Converters that emit a maximum for the lower and a minimum for the upper bound, in the result's dtype."
        ),
        converters=dict.fromkeys(
            ("clamp.default", "clamp.Tensor", "clamp_min.default", "clamp_max.default"), _convert_clamp
        ),
    ),
    Defect(
        name="clamp_nan",
        title="clamp turns NaN into a bound",
        location="LLVM code generation of tirx.Max and tirx.Min",
        description=(
            "max(a, b) is compiled to `a > b ? a : b`, so that a NaN on the left is lost, and the importer puts "
            "the tensor on the left. PyTorch's clamp keeps NaN."
        ),
        function=lambda x: x.clamp(min=0),
        args=(torch.tensor([math.nan, -1.0, 1.0]),),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="0 instead of NaN"),
        workaround="The converters of clamp_integer put the bound on the left.",
    ),
    Defect(
        name="infinite_fill",
        title="full with an infinite value does not compile",
        location="tvm.topi.full",
        description=(
            "Its check of infinite values expects the dtype as a string, but gets an object: a TypeError in the "
            "compiler."
        ),
        function=lambda x: torch.full((2, 2), float("-inf")).maximum(x),
        args=(torch.zeros(2, 2),),
        raw=RawOutcome(Symptom.REJECTED, "TypeError", "PrimType"),
        workaround="A converter that broadcasts a constant.",
        converters={"full.default": _convert_full},
    ),
    Defect(
        name="double_fill",
        title="full_like with a number beyond float32 is rejected",
        location="tvm.topi.full_like",
        description="The number is held to the range of float32, whatever the dtype of the tensor is.",
        function=lambda x: torch.full_like(x, 1e200) * x,
        args=(torch.tensor([1.0, -2.0], dtype=torch.float64),),
        raw=RawOutcome(Symptom.REJECTED, "ValueError", "exceeds maximum of float32"),
        workaround="A converter that broadcasts a constant of float64.",
        converters={"full_like.default": _convert_full_like},
    ),
    Defect(
        name="infinite_fill_like",
        title="full_like with an infinite value does not compile",
        location="tvm.topi.full",
        description="As infinite_fill: a TypeError in the compiler.",
        function=lambda x: torch.full_like(x, -math.inf).maximum(x),
        args=(torch.tensor([1.0, -2.0]),),
        raw=RawOutcome(Symptom.REJECTED, "TypeError", "PrimType"),
        workaround="The converter of double_fill.",
    ),
)
