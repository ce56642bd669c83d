"""Declares local variables of kernels that are written as TIR.

They have no scope: TVM 0.27 puts small buffers on the stack, where LLVM makes registers of them, but takes those of
scope `local` from the runtime's workspace, for every iteration of a parallel loop, and they stay in memory.
"""

from __future__ import annotations

from harness.compiler import tir as T


def array(length: int, dtype: str) -> T.Buffer:
    """Emits a small array without values."""
    return T.alloc_buffer((length,), dtype)


def variable(value: T.Operand, dtype: str) -> T.Buffer:
    """Emits an array of one element that holds the value."""
    cell = array(1, dtype)
    T.buffer_store(cell, T.const(value, dtype) if isinstance(value, int | float) else value, [0])
    return cell


def constant(value: T.Operand, dtype: str) -> T.Expr:
    """Emits a variable that holds the value and is not changed, and returns it."""
    return variable(value, dtype)[0]
