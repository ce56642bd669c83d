"""Building blocks of kernels for CPUs and GPUs: functions, buffers, and the length of a sum.

The kernels are built with TVM's IR builder instead of schedules, because blocking, packing and edges are then ordinary
Python. Every function is marked opaque and scheduled, so that no pass fuses or reschedules it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from harness.compiler.schedules.common.kernel_info import KernelInfo, Kind

_SHORTEST = 64
"""Terms of a sum that one register accumulates at least, if there are as many."""
_CPU = 1
"""`kDLCPU` of DLPack."""
_NOTHING = -1
"""Number of what a thread keeps before it has made anything."""
_LINE_BYTES = 64
"""Bytes of a line of a cache."""
OPAQUE = 8
"""`relax::OpPatternKind::kOpaque`."""
KERNEL = KernelInfo(Kind.KERNEL)
"""Facts of a kernel of which nothing is known but its arguments."""
HELPER = KernelInfo(Kind.HELPER)
"""Facts of a function that brings an operand of a kernel into its layout."""


def chunk_length(terms: int) -> int:
    """Terms that one register accumulates before their sum is added to a second one, in equal parts.

    The rounding error of a two-level sum is least near √terms: with random signs its variance grows with terms·part
    inside the parts and with terms²/part across them. Parts much shorter than `_SHORTEST` cost time.
    """
    longest = max(_SHORTEST, 8 * math.ceil(math.sqrt(terms) / 8))
    return ceil_div(terms, ceil_div(terms, longest))


@dataclass(frozen=True)
class Argument:
    """A tensor parameter of a kernel; its extents may be symbolic."""

    name: str
    shape: tuple[Any, ...]
    dtype: str = "float32"


def bytes_of_all(tensors: Iterable[tuple[Sequence[Any], Any]]) -> int | None:
    """Returns the bytes of tensors, given as shape and dtype; None if an extent of one of them is symbolic."""
    total = 0
    for shape, dtype in tensors:
        if not all(isinstance(extent, int | tirx.IntImm) for extent in shape):
            return None
        total += math.prod(int(extent) for extent in shape) * int(tvm.DataType(str(dtype)).itemsize)
    return total


def free_variables(arguments: Sequence[Argument]) -> list[tirx.Var]:
    """The variables in extents of tensors that are no extent themselves: a kernel gets their values as well."""
    extents = [extent for argument in arguments for extent in argument.shape if not isinstance(extent, int)]
    used = {variable for extent in extents for variable in tirx.analysis.undefined_vars(extent)}
    return sorted(used - {extent for extent in extents if isinstance(extent, tirx.Var)}, key=lambda v: str(v.name))


def prim_func(
    name: str, arguments: Sequence[Argument], body: Callable[..., None], info: KernelInfo = KERNEL
) -> tirx.PrimFunc:
    """Builds a function whose body is emitted by `body`, which gets one buffer per argument.

    Its parameters are the tensors, the `free_variables` of their extents, and the result. All variables are its own.

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
            buffers = [T.arg(a.name, T.buffer(a.shape, a.dtype)) for a in arguments[:-1]]
            for variable in free_variables(arguments):
                T.arg(str(variable.name), variable)
            buffers += [T.arg(a.name, T.buffer(a.shape, a.dtype)) for a in arguments[-1:]]
            # Relax asks some questions about the root block of every function.
            with T.sblock("root"):
                T.reads()
                T.writes()
                body(*buffers)
        function = builder.get()
    # Relax's variables stay Relax's, so that kernels of two calls can be one function.
    return s_tir.renew_defs(function) if moved is None else function


def registers(shape: tuple[int, ...], dtype: str = "float32") -> tirx.Buffer:
    """Emits a buffer of less than 1 KiB (`kMaxStackAlloca`); LLVM keeps it in registers if indices are constants.

    TVM 0.27 takes larger ones, and those of scope `local`, from a workspace: two calls wherever one is declared, and
    stores that LLVM must keep although nobody reads them.
    """
    return T.alloc_buffer(shape, dtype)


@dataclass(frozen=True)
class Kept:
    """What a thread keeps from one iteration of a parallel loop to the next.

    Attributes:
        buffers: Its memory.
        number: Number of what lies in it.
    """

    buffers: tuple[tirx.Buffer, ...]
    number: tirx.Buffer

    @contextmanager
    def unless(self, number: int | tirx.Expr) -> Iterator[None]:
        """Emits what makes it, which a thread does unless what lies there is of the same `number`, from 0 on."""
        with T.If(self.number[0] != number), T.Then():
            T.buffer_store(self.number, number, [0])
            yield


@contextmanager
def each_thread_keeps(tasks: int, dtype: str, *shapes: Sequence[int]) -> Iterator[tuple[Any, Kept]]:
    """Emits a parallel loop over tasks, and buffers that each thread has for itself in all of its tasks.

    TVM gives a thread tasks that follow each other, so that what one of them leaves is there for the next. Memory is
    asked for where the thread begins, because TVM 0.27 moves allocations out to where all threads would share them.

    Args:
        tasks: How many.
        dtype: Type of the buffers' elements.
        shapes: Their shapes.

    Yields:
        The number of the task, and the buffers.
    """
    if tasks == 1:
        # TVM removes a loop of one iteration, and refuses code for threads without a loop.
        number = registers((1,), "int32")
        T.buffer_store(number, tirx.const(_NOTHING, "int32"), [0])
        with T.serial(0, 1) as task:
            yield task, Kept(tuple(T.alloc_buffer(shape, dtype) for shape in shapes), number)
        return
    bytes_each = int(tvm.DataType(dtype).itemsize)
    in_line = _LINE_BYTES // bytes_each
    sizes = [ceil_div(math.prod(shape), in_line) * in_line for shape in shapes]
    total = bytes_each * sum(sizes)
    with T.attr(tirx.const(0, "int32"), "pragma_parallel_launch_point", 1):
        memory = T.TVMBackendAllocWorkspace(_CPU, 0, tirx.const(total + _LINE_BYTES, "uint64"), 2, 32)
        line = T.decl_buffer(((total + _LINE_BYTES) // 4,), "int32", data=memory)
        with T.If(tirx.isnullptr(line.data)), T.Then():
            T.evaluate(T.tvm_throw_last_error())
        buffers = tuple(
            T.decl_buffer(shape, dtype, data=line.data, elem_offset=sum(sizes[:n])) for n, shape in enumerate(shapes)
        )
        number = T.decl_buffer((1,), "int32", data=line.data, elem_offset=total // 4)
        T.buffer_store(number, tirx.const(_NOTHING, "int32"), [0])
        with T.parallel(0, tasks) as task:
            yield task, Kept(buffers, number)
        T.evaluate(T.TVMBackendFreeWorkspace(_CPU, 0, line.data))


def view(buffer: tirx.Buffer, *shape: int) -> tirx.Buffer:
    """Declares the same contiguous memory under another shape."""
    return T.decl_buffer(shape, buffer.dtype, data=buffer.data)


def ceil_div(a: int, b: int) -> int:
    """Computes ⌈a / b⌉."""
    return -(-a // b)


def at_most(count: int, total: int, first: Any) -> Any:
    """Computes min(count, total - first), a constant where parts of `count` come out even."""
    return count if total % count == 0 else T.min(count, total - first)


def fp32(value: float) -> Any:
    """Returns an fp32 constant."""
    return tirx.const(value, "float32")
