"""Works around dtype promotion: elementwise operators on operands of different dtypes, including Python numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import GraphModule, Node

from harness.compiler.lowering.frontends.backend_defects import BOOLEAN_SUM
from harness.compiler.lowering.frontends.defect import Defect, RawOutcome, Symptom
from harness.compiler.lowering.frontends.rewriting import calls, insert, overloads, source_line, value_of
from harness.compiler.lowering.frontends.torch_export.complex.values import touches_complex

_aten = torch.ops.aten

_ARITHMETIC = (
    *overloads("add sub rsub mul div remainder fmod", "Tensor", "Scalar"),
    *overloads("pow", "Tensor_Scalar", "Scalar", "Tensor_Tensor"),
    *overloads("maximum minimum atan2", "default"),
)
_COMPARISONS = overloads("eq ne lt le gt ge", "Tensor", "Scalar")
_FIRST_OPERAND_CAST = overloads("cumsum cumprod sin cos exp log log2 sqrt rsqrt sigmoid tanh erf reciprocal", "default")


def _cast(operand: Any, dtype: torch.dtype, successor: Node) -> Any:
    """Returns a tensor cast to `dtype`, or a Python number as the corresponding Python type."""
    if not isinstance(operand, Node):
        return float(operand) if dtype.is_floating_point else int(operand)
    if value_of(operand).dtype == dtype:
        return operand
    return insert(successor, _aten._to_copy.default, operand, dtype=dtype)


def _operand(argument: Any) -> Any:
    return value_of(argument) if isinstance(argument, Node) else argument


def _explicit_alpha(module: GraphModule) -> None:
    for node in calls(module, *overloads("add sub", "Tensor"), *overloads("rsub", "Tensor", "Scalar")):
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
        if not touches_complex(node):  # the importer rejects it
            node.args = tuple(_cast(operand, value_of(node).dtype, node) for operand in node.args[:2])
    for node in calls(module, *_COMPARISONS):
        dtype = torch.result_type(*map(_operand, node.args))
        # the compiler has no comparison of booleans
        dtype = torch.int8 if dtype is torch.bool else dtype
        node.args = tuple(_cast(operand, dtype, node) for operand in node.args)
    for node in calls(module, _aten.ne.Tensor, _aten.ne.Scalar):
        if value_of(next(operand for operand in node.args if isinstance(operand, Node))).is_floating_point():
            _compare_for_equality(node)
    for node in calls(module, _aten.where.self):
        condition, *branches = node.args
        node.args = (condition, *(_cast(branch, value_of(node).dtype, node) for branch in branches))
    for node in calls(module, _aten.cat.default):
        dtype = value_of(node).dtype
        if not dtype.is_complex:
            node.args = ([_cast(operand, dtype, node) for operand in node.args[0]], *node.args[1:])
    for node in calls(module, *_FIRST_OPERAND_CAST):
        node.args = (_cast(node.args[0], value_of(node).dtype, node), *node.args[1:])


_MASK = torch.tensor([True, False])

DEFECTS = (
    Defect(
        name="integer_true_division",
        title="An integer tensor with a Python float, or divided, stays an integer",
        location="BaseFXGraphImporter._binary_op",
        description=(
            "The Python number becomes a constant of the tensor's dtype and the result keeps that dtype: int64 / "
            "2 is an integer division, int64 * 2.5 multiplies by 2. PyTorch promotes both to float32."
        ),
        function=lambda x: x / 2,
        args=(torch.tensor([1, 2, 3]),),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="int64 instead of float32, truncated"),
        workaround="A pass that casts the operands of elementwise operators to the dtype that PyTorch computes in.",
        passes=(_explicit_alpha, *BOOLEAN_SUM.passes, _promote),
    ),
    Defect(
        name="boolean_arithmetic",
        title="A boolean tensor plus a Python number is rejected",
        location="BaseFXGraphImporter._binary_op",
        description=(
            "The Python number becomes a boolean constant, and adding booleans is not possible. PyTorch promotes "
            "to int64."
        ),
        function=lambda x: x + 1,
        args=(_MASK,),
        raw=RawOutcome(Symptom.REJECTED, "InternalError", "kDLFloat"),
        workaround="The pass of integer_true_division.",
    ),
    BOOLEAN_SUM,
    Defect(
        name="boolean_comparison",
        title="Comparing boolean tensors does not compile",
        location="LLVM code generation of equal and not_equal",
        description="Booleans are compared with a floating-point instruction, which LLVM's verifier rejects.",
        function=lambda x: x != x.flip(0),
        args=(_MASK,),
        raw=RawOutcome(Symptom.REJECTED, "InternalError", "Invalid operand types for FCmp"),
        workaround="The pass of integer_true_division compares them as int8.",
    ),
    Defect(
        name="not_equal_nan",
        title="NaN is not unequal to itself",
        location="LLVM code generation of tirx.NE",
        description=(
            "x != x is compiled to an ordered comparison, which is false where one side is NaN; PyTorch says true."
        ),
        function=lambda x: x != x,
        args=(torch.tensor([math.nan, 1.0]),),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="False for NaN"),
        workaround="The pass of integer_true_division asks for equality and negates.",
    ),
    Defect(
        name="boolean_cumsum",
        title="cumsum of a boolean tensor is rejected",
        location="BaseFXGraphImporter._cumsum",
        description=(
            "The sum is built in the input's dtype, and booleans can't be added. PyTorch sums booleans and "
            "integers in int64."
        ),
        function=lambda x: x.cumsum(0),
        args=(_MASK,),
        raw=RawOutcome(Symptom.REJECTED, "InternalError", "kDLFloat"),
        workaround="The pass of integer_true_division casts to the result's dtype first.",
    ),
    Defect(
        name="where_mixed_dtypes",
        title="where with branches of different dtypes is rejected",
        location="BaseFXGraphImporter._where",
        description="The branches are handed on as they are, and Relax does not mix dtypes.",
        function=lambda mask, x: torch.where(mask, x, torch.arange(2)),
        args=(_MASK, torch.tensor([0.5, 1.5])),
        raw=RawOutcome(Symptom.REJECTED, "TypeError", "must have the same datatype"),
        workaround="The pass of integer_true_division casts the branches to the result's dtype.",
    ),
    Defect(
        name="cat_mixed_dtypes",
        title="cat of tensors of different dtypes is rejected",
        location="BaseFXGraphImporter._cat",
        description="The tensors are handed on as they are, and Relax does not mix dtypes; PyTorch promotes them.",
        function=lambda x, count: torch.cat([x, count]),
        args=(torch.tensor([0.5, 1.5]), torch.tensor([1, 2])),
        raw=RawOutcome(Symptom.REJECTED, "TypeError", "to have the same dtype"),
        workaround="The pass of integer_true_division casts the tensors to the result's dtype.",
    ),
    Defect(
        name="add_alpha",
        title="alpha of add and sub is ignored",
        location="BaseFXGraphImporter._binary_op",
        description=(
            "torch.add(x, y, alpha=3) is x + 3·y; only positional arguments are read, so that the result is x + y."
        ),
        function=lambda x: torch.add(x, x, alpha=3),
        args=(torch.tensor([1.0, 2.0]),),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="the factor is missing"),
        workaround="A pass that multiplies first.",
    ),
)
