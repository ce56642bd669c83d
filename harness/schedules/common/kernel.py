"""What kernels for CPUs and GPUs are written with: functions, buffers, and the length of a sum.

The kernels are built with TVM's IR builder instead of schedules, because blocking, packing and edges are then ordinary
Python. Every function is marked opaque and scheduled, so that no pass fuses or reschedules it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from harness.schedules.common.kernel_info import KernelInfo, Kind

_SHORTEST = 64
"""Terms of a sum that one register accumulates at least, if there are as many."""
OPAQUE = 8
"""`relax::OpPatternKind::kOpaque`."""
KERNEL = KernelInfo(Kind.KERNEL)
"""Of a kernel of which nothing is known but its arguments."""
HELPER = KernelInfo(Kind.HELPER)
"""Of a function that brings an operand of a kernel into its layout."""


def chunk_length(terms: int) -> int:
    """Terms that one register accumulates before their sum is added to a second one, in equal parts.

    The rounding error of a two-level sum is least near √terms: with random signs its variance grows with terms·part
    inside the parts and with terms²/part across them. Parts much shorter than `_SHORTEST` cost time.
    """
    longest = max(_SHORTEST, 8 * math.ceil(math.sqrt(terms) / 8))
    return ceil_div(terms, ceil_div(terms, longest))


@dataclass(frozen=True)
class Argument:
    """A tensor parameter of a kernel."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"


def bytes_of_all(tensors: Iterable[tuple[Sequence[Any], Any]]) -> int | None:
    """The bytes of tensors, given as shape and dtype; None if an extent of one of them is symbolic."""
    total = 0
    for shape, dtype in tensors:
        if not all(isinstance(extent, int | tirx.IntImm) for extent in shape):
            return None
        total += math.prod(int(extent) for extent in shape) * int(tvm.DataType(str(dtype)).itemsize)
    return total


def prim_func(
    name: str, arguments: Sequence[Argument], body: Callable[..., None], info: KernelInfo = KERNEL
) -> tirx.PrimFunc:
    """A function whose body is emitted by `body`, which gets one buffer per argument.

    Args:
        name: Its name.
        arguments: Its tensors, the result last.
        body: Emits the loops.
        info: Its facts; the type of the result and the bytes of the arguments are added.
    """
    moved = bytes_of_all((argument.shape, argument.dtype) for argument in arguments)
    info = replace(info, dtype=arguments[-1].dtype, bytes_moved=moved)
    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_name(name)
            T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True, "op_pattern": OPAQUE, **info.attributes})
            buffers = [T.arg(a.name, T.buffer(a.shape, a.dtype)) for a in arguments]
            # Relax asks some questions about the root block of every function.
            with T.sblock("root"):
                T.reads()
                T.writes()
                body(*buffers)
        return builder.get()


def registers(shape: tuple[int, ...], dtype: str = "float32") -> tirx.Buffer:
    """A buffer of less than 1 KiB (`kMaxStackAlloca`) that LLVM keeps in registers where its indices are constants.

    TVM 0.27 takes larger ones, and those of scope `local`, from a workspace: two calls wherever one is declared, and
    stores that LLVM must keep although nobody reads them.
    """
    return T.alloc_buffer(shape, dtype)


def view(buffer: tirx.Buffer, *shape: int) -> tirx.Buffer:
    """The same contiguous memory under another shape."""
    return T.decl_buffer(shape, buffer.dtype, data=buffer.data)


def ceil_div(a: int, b: int) -> int:
    """⌈a / b⌉."""
    return -(-a // b)


def at_most(count: int, total: int, first: Any) -> Any:
    """min(count, total - first), constant where parts of `count` come out even."""
    return count if total % count == 0 else T.min(count, total - first)


def fp32(value: float) -> Any:
    """An fp32 constant."""
    return tirx.const(value, "float32")
