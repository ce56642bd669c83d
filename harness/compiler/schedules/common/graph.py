"""Reads and writes Relax expressions: shapes, constants, definitions, and calls of kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import ir, relax, sym, topi

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import Argument

Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]

MOVES = ("relax.permute_dims", "relax.reshape", "relax.expand_dims", "relax.squeeze")
"""Operators that keep every element and may give it another index."""


def permutation(call: ir.Call) -> tuple[int, ...]:
    """Returns the axes of a `relax.permute_dims`."""
    rank = len(call.ty.shape)
    axes = call.attrs.axes
    return tuple(range(rank))[::-1] if axes is None else tuple(int(axis) % rank for axis in axes)


def transposed(value: relax.Expr) -> relax.Expr | None:
    """Returns the source of a swap of the last two dimensions; None of anything else."""
    if not is_call(value, "relax.permute_dims"):
        return None
    rank = len(value.ty.shape)
    return value.args[0] if permutation(value) == (*range(rank - 2), rank - 1, rank - 2) else None


def operator_name(value: relax.Expr) -> str:
    """Returns the name of the Relax operator that a value is a call of; empty if it is none."""
    return str(getattr(value.op, "name", "")) if isinstance(value, ir.Call) else ""


def is_call(value: relax.Expr, *names: str) -> bool:
    """Returns whether a value is a call of one of these Relax operators."""
    return operator_name(value) in names


def static_shape(value: relax.Expr, dtype: str | None = "float32") -> tuple[int, ...] | None:
    """Returns the shape of a tensor of a dtype (any if None); None if the shape is not static or the dtype differs."""
    ty = value.ty
    if not isinstance(ty, relax.TensorType) or ty.shape is None or (dtype is not None and str(ty.dtype) != dtype):
        return None
    extents = list(ty.shape)
    if not all(isinstance(extent, T.IntImm) for extent in extents):
        return None
    return tuple(int(extent) for extent in extents)


def extents(value: relax.Expr) -> tuple[Any, ...] | None:
    """Returns the shape of a tensor, with symbolic extents as they are; None if its rank is unknown."""
    ty = value.ty
    if not isinstance(ty, relax.TensorType) or ty.shape is None:
        return None
    return tuple(int(extent) if isinstance(extent, T.IntImm) else extent for extent in ty.shape)


def argument(name: str, value: relax.Expr) -> Argument:
    """Returns the parameter of a kernel for a tensor."""
    return Argument(name, extents(value) or (), str(value.ty.dtype))


def number(value: relax.Expr) -> float | None:
    """Returns the value of an fp32 constant of one element; None for anything else."""
    if isinstance(value, T.FloatImm):
        return float(value.value)
    if isinstance(value, ir.GenericConst) and static_shape(value) is not None and value.value.numpy().size == 1:
        return float(value.value.numpy().item())
    return None


def around(shape: Sequence[int], axis: int) -> tuple[int, int, int]:
    """Returns a shape as [outer, count, inner], where count is the extent of an axis, which may be negative."""
    axis %= len(shape)
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def same(shape: Sequence[T.Index], other: Sequence[T.Index]) -> bool:
    """Returns whether two shapes, or two indices, are the same for all values of their variables."""
    analyzer = sym.Analyzer()
    if len(shape) != len(other):
        return False
    pairs = zip(map(T.convert, shape), map(T.convert, other), strict=True)
    return all(analyzer.can_prove_equal(extent, counterpart) for extent, counterpart in pairs)


def call(builder: relax.BlockBuilder, name: str, function: T.PrimFunc, arguments: Sequence[relax.Expr]) -> relax.Expr:
    """Emits a call of a kernel whose last parameter is its result; identical kernels share one function."""
    result: T.Buffer = function.params[-1]
    variable = builder.add_func(function, name)
    ty = relax.TensorType([int(extent) for extent in result.shape], str(result.dtype))
    return relax.call_tir(variable, list(arguments), out_ty=ty)


def default(bb: relax.BlockBuilder, node: relax.Call) -> relax.Expr:
    """Legalizes a call as TVM does."""
    return ir.Op.get(node.op.name).get_attr("FLegalize")(bb, node)


def reshaped(bb: relax.BlockBuilder, value: relax.Expr, shape: Sequence[int]) -> relax.Expr:
    """Emits a reshape of the value, which `RewriteDataflowReshape` turns into a view."""
    if static_shape(value) == tuple(shape):
        return value
    return bb.emit(bb.call_te(topi.reshape, value, list(shape)))


def call_on_views(
    bb: relax.BlockBuilder, name: str, function: T.PrimFunc, operands: Sequence[relax.Expr], shape: Sequence[int]
) -> relax.Expr:
    """Emits a kernel's call on views of operands, in its parameters' shapes; returns a view of the result."""
    parameters = zip(operands, function.params, strict=False)
    views = [reshaped(bb, operand, [int(extent) for extent in buffer.shape]) for operand, buffer in parameters]
    return reshaped(bb, bb.emit(call(bb, name, function, views)), shape)


def between(
    bindings: Mapping[relax.Var, relax.Expr], value: relax.Expr, inputs: Sequence[relax.Expr]
) -> list[relax.Var]:
    """Returns the variables between some inputs and a value, with the value if it is bound, without the inputs."""
    variables: dict[relax.Var, None] = {}
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, relax.Var):
            if part in variables or part not in bindings or any(part.same_as(x) for x in inputs):
                continue
            variables[part] = None
            part = bindings[part]
        waiting.extend(_arguments(part))
    return list(variables)


def _arguments(value: relax.Expr) -> list[relax.Expr]:
    if isinstance(value, relax.Tuple):
        return list(value.fields)
    if isinstance(value, relax.TupleGetItem):
        return [value.tuple_value]
    return list(value.args) if isinstance(value, ir.Call) else []
