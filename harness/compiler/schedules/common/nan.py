"""Keeps NaN and infinities in maxima, minima and their indices, where TVM's take a number, which hides errors.

TVM compiles max(a, b) to `a > b ? a : b`, which is b wherever one is NaN, and on GPUs to an instruction that returns
the number. Relu, clip, maximum, minimum and pooling are made of it. A reduction begins with the least finite number,
which is the maximum of nothing but -inf then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, s_tir, te, topi

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import Legalize
from harness.compiler.schedules.common.kernel import replace_loops

FLOATS = ("float", "bfloat")
"""The beginnings of the names of floating-point dtypes."""


def keep_nan(reductions: bool) -> tvm.transform.Pass:
    """Returns the module pass that keeps NaN in maxima and minima of functions without a schedule.

    Args:
        reductions: Whether to change reductions, too, which rules for GPUs would not recognize afterwards.
    """

    def replace_in_block(block: s_tir.SBlock) -> s_tir.SBlock:
        stores = isinstance(block.body, T.BufferStore)
        return _replace_extremes(block) if stores and (reductions or block.init is None) else block

    def replaced(_: str, function: T.PrimFunc) -> T.PrimFunc:
        return function.with_body(tvm_ffi.structural_map(function.body, (s_tir.SBlock, replace_in_block)))

    @tvm.transform.module_pass(opt_level=0, name="KeepNan")
    def run(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return replace_loops(module, replaced)

    return run


@tvm.transform.module_pass(opt_level=0, name="KeepInfinities")
def keep_infinities(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Begins maxima and minima with an infinity, and pads with it; before fusion, which adds constants of the model."""

    def replaced(_: str, function: T.PrimFunc) -> T.PrimFunc:
        starts = _starts(function)
        return _infinite(function, starts) if starts else function

    return replace_loops(module, replaced)


def _starts(function: T.PrimFunc) -> set[tuple[str, float]]:
    """Returns the dtypes and values of the extreme finite numbers that maxima and minima of a function begin with."""
    found = set()

    def visit(node: object) -> None:
        if isinstance(node, s_tir.SBlock) and isinstance(node.init, T.BufferStore):
            value, extreme = node.init.value, getattr(node.body, "value", None)
            if isinstance(value, T.FloatImm) and isinstance(extreme, T.Max | T.Min):
                dtype, number = str(value.ty.dtype), float(value.value)
                if abs(number) == float(T.max_value(dtype).value):
                    found.add((dtype, number))

    tvm_ffi.structural_walk(function.body, visit)
    return found


def _infinite(function: T.PrimFunc, starts: set[tuple[str, float]]) -> T.PrimFunc:
    """Returns the function with an infinity in place of each of these numbers."""

    def replace(node: T.FloatImm) -> T.FloatImm:
        dtype, value = str(node.ty.dtype), float(node.value)
        return T.FloatImm(dtype, math.copysign(math.inf, value)) if (dtype, value) in starts else node

    return function.with_body(tvm_ffi.structural_map(function.body, (T.FloatImm, replace)))


def _replace_extremes(block: s_tir.SBlock) -> s_tir.SBlock:
    return tvm_ffi.structural_map(
        block,
        [
            (T.Max, lambda node: _select(node, lambda a, b: a > b)),
            (T.Min, lambda node: _select(node, lambda a, b: a < b)),
        ],
    )


def _select(node: T.Max | T.Min, better: Callable[[T.Expr, T.Expr], T.Expr]) -> T.Expr:
    a, b = node.a, node.b
    if not str(node.ty.dtype).startswith(FLOATS):
        return node
    for value, bound in ((a, b), (b, a)):
        if isinstance(bound, T.FloatImm):  # one instruction of x86: the second operand is taken where one is NaN
            return T.Select(better(bound, value), bound, value)
    return T.Select(T.any(better(a, b), is_nan(a)), a, b)


def is_nan(value: T.Expr) -> T.Expr:
    """Returns whether a number of any floating-point type is NaN; TVM's `isnan` does not support bfloat16."""
    return T.isnan(T.Cast("float32", value) if str(value.ty.dtype) == "bfloat16" else value)


_Candidate = tuple[T.Expr, T.Expr]
"""An index, and the number there."""


def _index(name: str, better: Callable[[T.Expr, T.Expr], T.Expr], worst: float) -> Legalize:
    """Returns the legalization of the index of an extreme, or of the first NaN, as PyTorch's."""

    def legalize(bb: relax.BlockBuilder, node: relax.Call) -> relax.Expr:
        axis, result = node.attrs.axis, node.ty
        dtype = str(result.dtype)

        def choose(left: _Candidate, right: _Candidate) -> _Candidate:
            (i, a), (j, b) = left, right
            equal = T.any(a == b, T.all(is_nan(a), is_nan(b)))
            ahead = T.any(better(a, b), T.all(is_nan(a), T.Not(is_nan(b))))
            wins = T.any(ahead, T.all(equal, i < j))
            return T.Select(wins, i, j), T.Select(wins, a, b)

        def identity(index: str, value: str) -> _Candidate:
            return T.max_value(index), T.const(worst, value)

        extreme = te.comm_reducer(choose, identity, name=name)

        def compute(data: te.Tensor) -> te.Tensor:
            if axis is None:
                data = topi.reshape(data, (topi.utils.prod(data.shape),))
            reduced_axis = 0 if axis is None else int(axis) % len(data.shape)
            k = te.reduce_axis((0, data.shape[reduced_axis]), "k")

            def element(*index: T.Var) -> Any:
                place = (*index[:reduced_axis], k.var, *index[reduced_axis:])
                return extreme((T.Cast(dtype, k.var), data(*place)), axis=k)

            shape = [*data.shape[:reduced_axis], *data.shape[reduced_axis + 1 :]]
            index, _ = te.compute(shape, element, name=name)
            return topi.reshape(index, list(result.shape)) if node.attrs.keepdims else index

        return bb.call_te(compute, node.args[0], primfunc_name_hint=name)

    return legalize


LEGALIZE: dict[str, Legalize] = {
    "relax.argmax": _index("argmax", lambda a, b: a > b, float("-inf")),
    "relax.argmin": _index("argmin", lambda a, b: a < b, float("inf")),
}
"""Legalizations of the index of an extreme, by operator."""
