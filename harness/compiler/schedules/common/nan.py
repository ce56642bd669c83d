"""Keeps NaN in elementwise maxima and minima, where TVM's take a number, which hides errors.

TVM compiles max(a, b) to `a > b ? a : b`, which is b wherever one is NaN, and on GPUs to an instruction that returns
the number. Relu, clip, maximum and minimum are made of it. Reductions compare integers (`ordering.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
import tvm_ffi
from tvm import s_tir

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import replace_loops

FLOATS = ("float", "bfloat")
"""The beginnings of the names of floating-point dtypes."""


@tvm.transform.module_pass(opt_level=0, name="KeepNan")
def keep_nan(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Keeps NaN in the elementwise maxima and minima of functions without a schedule."""

    def replace_in_block(block: s_tir.SBlock) -> s_tir.SBlock:
        is_elementwise = isinstance(block.body, T.BufferStore) and block.init is None
        return _replace_extremes(block) if is_elementwise else block

    def replaced(_: str, function: T.PrimFunc) -> T.PrimFunc:
        return function.with_body(tvm_ffi.structural_map(function.body, (s_tir.SBlock, replace_in_block)))

    return replace_loops(module, replaced)


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
