"""Works around elementwise operators: bounds, powers, booleans, division and subtraction, running products, and NaN."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import onnxscript
import torch
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import Equal

from harness.compiler.lowering.frontends.backend_defects import BOOLEAN_SUM, LOST_NAN, lost_nan
from harness.compiler.lowering.frontends.defect import Converter, Defect, RawOutcome, Symptom

_op: Any = onnxscript.opset23
_FLOAT32 = 1
"""In ONNX's numbers of dtypes."""


def _convert_clip(_builder: relax.BlockBuilder, inputs: list[Any], _attributes: dict[str, Any]) -> Any:
    """Puts the bound first, because TVM's maximum and minimum return their second operand if one is NaN."""
    value, lowest, highest = [*inputs, None, None][:3]
    if lowest is not None:
        value = relax.op.maximum(lowest, value)
    return value if highest is None else relax.op.minimum(highest, value)


def _pairwise(choose: Callable[..., Any]) -> Converter:
    return lambda _builder, inputs, _attributes: functools.reduce(lambda x, operand: choose(operand, x), inputs)


def _convert_power(_builder: relax.BlockBuilder, inputs: list[Any], _attributes: dict[str, Any]) -> Any:
    """Raises integers in float64, which is exact up to 2^53, and rounds, because the result has the base's dtype."""
    base, exponent = inputs
    dtype = str(base.ty.dtype)
    if dtype.startswith("float"):
        return relax.op.power(base, exponent if str(exponent.ty.dtype) == dtype else relax.op.astype(exponent, dtype))
    result = relax.op.power(relax.op.astype(base, "float64"), relax.op.astype(exponent, "float64"))
    return relax.op.astype(relax.op.round(result), dtype)


def _convert_equal(builder: relax.BlockBuilder, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    types = [getattr(value, "ty", None) for value in inputs]
    if any(isinstance(ty, relax.TensorType) and str(ty.dtype) == "bool" for ty in types):
        return relax.op.equal(*(relax.op.astype(value, "int8") for value in inputs))
    return Equal.get_converter(13)(builder, inputs, attributes, [{}, {}])


def _translate_floor_divide(left: Any, right: Any) -> Any:
    """Divides as PyTorch does; `div_floor_floating` in c10/util/generic_math.h defines the result for floats."""
    is_float = left.dtype.is_floating_point()
    zero, unit, half = (_op.CastLike(_op.Constant(value_float=number), left) for number in (0.0, 1.0, 0.5))
    if is_float:
        remainder = _op.Mod(left, right, fmod=1)
        quotient = _op.Div(_op.Sub(left, remainder), right)  # nearly whole, so that rounding it is safe
    else:
        quotient = _op.Div(left, right)
        remainder = _op.Sub(left, _op.Mul(quotient, right))
    other_sign = _op.Xor(_op.Less(remainder, zero), _op.Less(right, zero))
    below = _op.And(other_sign, _op.Not(_op.Equal(remainder, zero)))
    quotient = _op.Where(below, _op.Sub(quotient, unit), quotient)
    if not is_float:
        return quotient
    floored = _op.Floor(quotient)
    over_half = _op.Greater(_op.Sub(quotient, floored), half)
    whole = _op.Where(over_half, _op.Add(floored, unit), floored)
    return _op.Where(_op.Equal(right, zero), _op.Div(left, right), whole)


def _translate_log_sigmoid(value: Any) -> Any:
    return _op.Neg(_op.Softplus(_op.Neg(value)))


def _translate_logcumsumexp(x: Any, dim: int) -> Any:
    """Adds to each element what is 1, 2, 4, … places before it."""
    shape = [int(extent) for extent in x.shape]
    if not shape:
        return x
    axis, places = dim % len(shape), 1
    nothing = _op.CastLike(_op.Constant(value_float=-math.inf), x)
    while places < shape[axis]:
        begin, end, along = (_op.Constant(value_ints=[number]) for number in (0, shape[axis] - places, axis))
        before = [places if index == axis else extent for index, extent in enumerate(shape)]
        padding = _op.Expand(nothing, _op.Constant(value_ints=before))
        x = _log_of_sum(x, _op.Concat(padding, _op.Slice(x, begin, end, along), axis=axis))
        places *= 2
    return x


def _log_of_sum(a: Any, b: Any) -> Any:
    """Returns log(exp(a) + exp(b)), which does not overflow."""
    largest = _op.Max(a, b)
    largest = _op.Where(_op.IsInf(largest), _op.CastLike(_op.Constant(value_float=0.0), a), largest)
    return _op.Add(_op.Log(_op.Add(_op.Exp(_op.Sub(a, largest)), _op.Exp(_op.Sub(b, largest)))), largest)


def _translate_product(x: Any, axes: Sequence[int], **_options: Any) -> Any:
    return _op.ReduceProd(x, _op.Constant(value_ints=list(axes)), keepdims=0)


def _translate_rsub(x: Any, number: float, alpha: float = 1) -> Any:
    if not x.dtype.is_floating_point() and float in (type(number), type(alpha)):
        x = _op.Cast(x, to=_FLOAT32)

    def constant(value: float) -> Any:
        kind = "value_float" if type(value) is float else "value_int"
        return _op.CastLike(_op.Constant(**{kind: value}), x)

    return _op.Sub(constant(number), x if alpha == 1 else _op.Mul(x, constant(alpha)))


DEFECTS = (
    Defect(
        name="clip_nan",
        title="Clip turns NaN into a bound",
        location="LLVM code generation of tirx.Max and tirx.Min",
        description=(
            "max(a, b) is compiled to `a > b ? a : b`, so that a NaN on the left is lost, and the converter puts the "
            "tensor on the left. PyTorch's clamp keeps NaN. The converter also calls a compiled function where "
            "relax.maximum and relax.minimum would do, which no rule recognizes."
        ),
        function=lambda x: x.clamp(-1, 1),
        args=(torch.tensor([math.nan, -2.0, 2.0]),),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="-1 instead of NaN"),
        workaround="A converter that emits these operators, with the bound on the left.",
        converters={"Clip": _convert_clip},
    ),
    Defect(
        name="max_stack",
        title="Max and Min of tensors are the reduction of a stack of them",
        location="tvm.relax.frontend.onnx.onnx_frontend.MultiInputBase",
        description=(
            "The operands are broadcast to one shape and stacked in memory, and the maximum is taken over the new "
            "axis. A clamp with one bound is exported that way. A NaN is lost as well."
        ),
        function=lambda x: x.clamp(min=0),
        args=(torch.tensor([math.nan, -1.0, 1.0]),),
        raw=RawOutcome(Symptom.SLOW, absent="R.maximum(", wrong="relax.stack and relax.max instead of relax.maximum"),
        workaround="Converters that emit relax.maximum or relax.minimum of two at a time.",
        converters={"Max": _pairwise(relax.op.maximum), "Min": _pairwise(relax.op.minimum)},
    ),
    Defect(
        name="pow_two_dtypes",
        title="Pow with an exponent of another dtype is rejected",
        location="tvm.relax.frontend.onnx.onnx_frontend.Pow",
        description=(
            "ONNX allows an exponent of another dtype; the operands are handed on, and Relax does not mix dtypes."
        ),
        function=lambda x, exponent: x**exponent,
        args=(torch.tensor([4.0, 2.0]), torch.tensor([2, 3])),
        raw=RawOutcome(Symptom.REJECTED, "TypeError", "must have the same datatype"),
        workaround="A converter that casts the exponent.",
        converters={"Pow": _convert_power},
    ),
    Defect(
        name="pow_integer",
        title="Pow of integers does not compile",
        location="relax.op.power",
        description="Relax's power knows floating-point numbers alone.",
        function=lambda x: x**2,
        args=(torch.tensor([-4, 4]),),
        raw=RawOutcome(Symptom.REJECTED, "InternalError", "power only applies to float"),
        workaround="The converter of pow_two_dtypes computes in float64 and rounds.",
    ),
    Defect(
        name="boolean_equal",
        title="Equal of booleans does not compile",
        location="LLVM code generation of equal and not_equal",
        description=(
            "Booleans are compared with a floating-point instruction, which LLVM's verifier rejects. PyTorch's "
            "exporter compares them in an integer division with rounding down, and for == of masks."
        ),
        function=lambda x: x // 3,
        args=(torch.tensor([-4, 4, -1, 3]),),
        raw=RawOutcome(Symptom.REJECTED, "InternalError", "Invalid operand types for FCmp"),
        workaround="A converter that compares them as int8.",
        converters={"Equal": _convert_equal},
    ),
    BOOLEAN_SUM,
    Defect(
        name="floor_divide",
        title="// of floating-point numbers is the floor of the rounded quotient",
        location="torch.onnx, aten_floor_divide",
        description=(
            "1.0 // 0.1 is 9 in PyTorch, because 0.1 is a little more than a tenth in float32; the quotient rounds up "
            "to 10 before the floor is taken. Divisors that are powers of two, as in SAM 3's decoder, are right."
        ),
        function=lambda x: x // 0.1,
        args=(torch.tensor([1.0, -1.0, 0.35]),),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="10 instead of 9"),
        workaround="A translation of our own, which divides what is left without the remainder.",
        translations={torch.ops.aten.floor_divide.default: _translate_floor_divide},
    ),
    Defect(
        name="log_sigmoid",
        title="logsigmoid is the logarithm of a sigmoid that has become 0",
        location="torch.onnx, aten_log_sigmoid",
        description=(
            "The sigmoid of -100 is too small for float32's normal numbers, so that its logarithm is -inf or inexact."
        ),
        function=lambda x: torch.nn.functional.logsigmoid(x),
        args=(torch.tensor([-100.0, -20.0, 0.0, 20.0, 100.0]),),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="-inf instead of -100"),
        workaround="A translation of our own: -softplus(-x).",
        translations={torch.ops.aten.log_sigmoid.default: _translate_log_sigmoid},
    ),
    Defect(
        name="logcumsumexp",
        title="logcumsumexp loses elements before a larger one",
        location="torch.onnx, aten_logcumsumexp",
        description=(
            "The maximum of the whole axis is subtracted before numbers are added up, so that an element far below it "
            "is -inf, and all are NaN where one is."
        ),
        function=lambda x: torch.logcumsumexp(x, -1),
        args=(torch.tensor([[0.0, 1.0, 200.0], [1.0, 2.0, math.nan]]),),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="-inf instead of 0, and NaN instead of 1"),
        workaround="A translation of our own: to each element those 1, 2, 4, … places before it are added in turn.",
        translations={torch.ops.aten.logcumsumexp.default: _translate_logcumsumexp},
    ),
    Defect(
        name="cumprod",
        title="cumprod is not known",
        location="torch.onnx, prims.prod",
        description=(
            "It is decomposed into products of ever longer parts, and the product among the primitives has no "
            "translation."
        ),
        function=lambda x: x.cumprod(0),
        args=(torch.tensor([2.0, -3.0, 0.5]),),
        raw=RawOutcome(Symptom.REJECTED, "ConversionError", r"prims\.prod"),
        workaround="A translation of that product.",
        translations={torch.ops.prims.prod.default: _translate_product},
    ),
    Defect(
        name="number_minus_integers",
        title="A Python float minus a tensor of integers is rejected",
        location="torch.onnx, type promotion",
        description="It is turned around, and the pass that promotes integers does not know a number on the left.",
        function=lambda x: 0.5 - x,
        args=(torch.tensor([1, 2, -3]),),
        raw=RawOutcome(Symptom.REJECTED, "ConversionError", r"aten\.sub"),
        workaround="A translation of the subtraction as it is written.",
        translations={torch.ops.aten.rsub.Scalar: _translate_rsub},
    ),
    *LOST_NAN,
    lost_nan("hardsigmoid", lambda x: torch.nn.functional.hardsigmoid(x), "1 instead of NaN"),
    lost_nan("amax", lambda x: x.amax(-1), "2 instead of NaN"),
    lost_nan("amin", lambda x: x.amin(-1), "-1 instead of NaN"),
)
