"""Works around dtype promotion: elementwise operators on operands of different dtypes, including Python numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from harness.compiler.lowering.frontends import booleans
from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.rewriting import calls, insert, source_line, value_of
from harness.compiler.lowering.frontends.torch_export.defect import TorchDefect

_aten = torch.ops.aten

_ARITHMETIC = (
    *(_aten.add.Tensor, _aten.add.Scalar, _aten.sub.Tensor, _aten.sub.Scalar, _aten.rsub.Scalar, _aten.rsub.Tensor),
    *(
        _aten.mul.Tensor,
        _aten.mul.Scalar,
        _aten.div.Tensor,
        _aten.div.Scalar,
        _aten.pow.Tensor_Scalar,
        _aten.pow.Scalar,
    ),
    *(_aten.pow.Tensor_Tensor, _aten.maximum.default, _aten.minimum.default, _aten.remainder.Scalar),
    *(_aten.remainder.Tensor, _aten.fmod.Scalar, _aten.fmod.Tensor, _aten.atan2.default),
)
_COMPARISONS = tuple(
    getattr(getattr(_aten, name), overload)
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for overload in ("Tensor", "Scalar")
)
_UNARY = (
    *(
        _aten.sin.default,
        _aten.cos.default,
        _aten.exp.default,
        _aten.log.default,
        _aten.log2.default,
        _aten.sqrt.default,
    ),
    *(_aten.rsqrt.default, _aten.sigmoid.default, _aten.tanh.default, _aten.erf.default, _aten.reciprocal.default),
)
_FIRST_OPERAND_CAST = (_aten.cumsum.default, _aten.cumprod.default, *_UNARY)


class _Half(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


class _CountTrue(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class _RunningCount(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0)


class _Select(torch.nn.Module):
    def forward(self, mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, x, torch.arange(2))


class _Joined(torch.nn.Module):
    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, count])


class _SameBits(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x != x.flip(0)


class _IsNumber(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x != x


class _Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(x, x, alpha=3)


def _mask() -> torch.Tensor:
    return torch.tensor([True, False])


def _cast(operand: Any, dtype: torch.dtype, successor: Node) -> Any:
    """Returns a tensor cast to `dtype`, or a Python number as the corresponding Python type."""
    if isinstance(operand, Node):
        return (
            operand
            if value_of(operand).dtype == dtype
            else insert(successor, _aten._to_copy.default, operand, dtype=dtype)
        )
    return float(operand) if dtype.is_floating_point else int(operand)


def _is_complex(node: Node) -> bool:
    values = [node, *(operand for operand in node.args if isinstance(operand, Node))]
    return any(value_of(value).is_complex() for value in values)


def _operand(argument: Any) -> Any:
    return value_of(argument) if isinstance(argument, Node) else argument


def _explicit_alpha(module: GraphModule) -> None:
    for node in calls(module, _aten.add.Tensor, _aten.sub.Tensor, _aten.rsub.Scalar, _aten.rsub.Tensor):
        alpha = node.kwargs.get("alpha", 1)
        if alpha != 1:
            position = 0 if node.target in (_aten.rsub.Scalar, _aten.rsub.Tensor) else 1
            operands = list(node.args)
            scaled = operands[position]
            operands[position] = (
                insert(node, _aten.mul.Tensor, scaled, alpha) if isinstance(scaled, Node) else scaled * alpha
            )
            node.args, node.kwargs = tuple(operands), {}


def _compare_for_equality(node: Node) -> None:
    equality = _aten.eq.Tensor if node.target is _aten.ne.Tensor else _aten.eq.Scalar
    node.replace_all_uses_with(insert(node, _aten.logical_not.default, insert(node, equality, *node.args)))
    node.graph.erase_node(node)


def _promote(module: GraphModule) -> None:
    for node in calls(module, _aten.pow.Scalar, _aten.pow.Tensor_Tensor):
        if not (value_of(node).is_floating_point() or value_of(node).is_complex()):
            raise NotImplementedError(
                f"{node.target} of integers is not known to TVM, called at {source_line(node)}: raise floats there."
            )
    for node in calls(module, *_ARITHMETIC):
        if _is_complex(node):  # the importer rejects it
            continue
        dtype = value_of(node).dtype
        node.args = tuple(_cast(operand, dtype, node) for operand in node.args[:2])
    for node in calls(module, *_COMPARISONS):
        left, right = node.args
        dtype = torch.result_type(_operand(left), _operand(right))
        # the compiler has no comparison of booleans
        dtype = torch.int8 if dtype is torch.bool else dtype
        node.args = (_cast(left, dtype, node), _cast(right, dtype, node))
    for node in calls(module, _aten.ne.Tensor, _aten.ne.Scalar):
        if value_of(next(operand for operand in node.args if isinstance(operand, Node))).is_floating_point():
            _compare_for_equality(node)
    for node in calls(module, _aten.where.self):
        condition, left, right = node.args
        dtype = value_of(node).dtype
        node.args = (condition, _cast(left, dtype, node), _cast(right, dtype, node))
    for node in calls(module, _aten.cat.default):
        dtype = value_of(node).dtype
        if not dtype.is_complex:
            node.args = ([_cast(operand, dtype, node) for operand in node.args[0]], *node.args[1:])
    for node in calls(module, *_FIRST_OPERAND_CAST):
        node.args = (_cast(node.args[0], value_of(node).dtype, node), *node.args[1:])


def _reproduce(module: Callable[[], torch.nn.Module], *inputs: torch.Tensor) -> Any:
    return lambda: (module(), inputs)


DEFECTS = (
    TorchDefect(
        name="integer_true_division",
        title="An integer tensor with a Python float, or divided, stays an integer",
        location="BaseFXGraphImporter._binary_op",
        description=(
            "The Python number becomes a constant of the tensor's dtype and the result keeps that dtype: int64 / "
            "2 is an integer division, int64 * 2.5 multiplies by 2. PyTorch promotes both to float32."
        ),
        reproduction=_reproduce(_Half, torch.tensor([1, 2, 3])),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="int64 instead of float32, truncated"),
        workaround="A pass that casts the operands of elementwise operators to the dtype that PyTorch computes in.",
        passes=(_explicit_alpha, booleans.to_logic, _promote),
    ),
    TorchDefect(
        name="boolean_arithmetic",
        title="A boolean tensor plus a Python number is rejected",
        location="BaseFXGraphImporter._binary_op",
        description=(
            "The Python number becomes a boolean constant, and adding booleans is not possible. PyTorch promotes "
            "to int64."
        ),
        reproduction=_reproduce(_CountTrue, _mask()),
        raw=RawOutcome(Symptom.REJECTED, "InternalError", "kDLFloat"),
        workaround="The pass of integer_true_division.",
    ),
    TorchDefect(**booleans.FACTS),
    TorchDefect(
        name="boolean_comparison",
        title="Comparing boolean tensors does not compile",
        location="LLVM code generation of equal and not_equal",
        description="Booleans are compared with a floating-point instruction, which LLVM's verifier rejects.",
        reproduction=_reproduce(_SameBits, _mask()),
        raw=RawOutcome(Symptom.REJECTED, "InternalError", "Invalid operand types for FCmp"),
        workaround="The pass of integer_true_division compares them as int8.",
    ),
    TorchDefect(
        name="not_equal_nan",
        title="NaN is not unequal to itself",
        location="LLVM code generation of tirx.NE",
        description=(
            "x != x is compiled to an ordered comparison, which is false where one side is NaN; PyTorch says true."
        ),
        reproduction=_reproduce(_IsNumber, torch.tensor([math.nan, 1.0])),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="False for NaN"),
        workaround="The pass of integer_true_division asks for equality and negates.",
    ),
    TorchDefect(
        name="boolean_cumsum",
        title="cumsum of a boolean tensor is rejected",
        location="BaseFXGraphImporter._cumsum",
        description=(
            "The sum is built in the input's dtype, and booleans can't be added. PyTorch sums booleans and "
            "integers in int64."
        ),
        reproduction=_reproduce(_RunningCount, _mask()),
        raw=RawOutcome(Symptom.REJECTED, "InternalError", "kDLFloat"),
        workaround="The pass of integer_true_division casts to the result's dtype first.",
    ),
    TorchDefect(
        name="where_mixed_dtypes",
        title="where with branches of different dtypes is rejected",
        location="BaseFXGraphImporter._where",
        description="The branches are handed on as they are, and Relax does not mix dtypes.",
        reproduction=_reproduce(_Select, _mask(), torch.tensor([0.5, 1.5])),
        raw=RawOutcome(Symptom.REJECTED, "TypeError", "must have the same datatype"),
        workaround="The pass of integer_true_division casts the branches to the result's dtype.",
    ),
    TorchDefect(
        name="cat_mixed_dtypes",
        title="cat of tensors of different dtypes is rejected",
        location="BaseFXGraphImporter._cat",
        description="The tensors are handed on as they are, and Relax does not mix dtypes; PyTorch promotes them.",
        reproduction=_reproduce(_Joined, torch.tensor([0.5, 1.5]), torch.tensor([1, 2])),
        raw=RawOutcome(Symptom.REJECTED, "TypeError", "to have the same dtype"),
        workaround="The pass of integer_true_division casts the tensors to the result's dtype.",
    ),
    TorchDefect(
        name="add_alpha",
        title="alpha of add and sub is ignored",
        location="BaseFXGraphImporter._binary_op",
        description=(
            "torch.add(x, y, alpha=3) is x + 3·y; only positional arguments are read, so that the result is x + y."
        ),
        reproduction=_reproduce(_Scaled, torch.tensor([1.0, 2.0])),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="the factor is missing"),
        workaround="A pass that multiplies first.",
    ),
)
