"""Builds kernels for CPUs and GPUs: functions, buffers, parallel loops, and the length of a sum.

The kernels are built with TVM's IR builder instead of schedules, because blocking, packing and edges are then ordinary
Python. Every function is marked opaque and scheduled, so that no pass fuses or reschedules it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import overload

import tvm
from tvm import s_tir

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel_info import KernelInfo, Kind

_SHORTEST = 64
"""Least number of terms that one register accumulates, if a sum has as many."""
_CPU = 1
"""`kDLCPU` of DLPack."""
_EMPTY = -1
"""Key of a workspace that has not been filled."""
_LINE_BYTES = 64
"""Size of a cache line in bytes."""
OPAQUE = 8
"""`relax::OpPatternKind::kOpaque`."""
KERNEL = KernelInfo(Kind.KERNEL)
"""Facts of a kernel of which only the arguments are known."""
HELPER = KernelInfo(Kind.HELPER)
"""Facts of a function that brings an operand of a kernel into its layout."""


def chunk_length(terms: int) -> int:
    """Returns the number of terms that one register accumulates before a second one, in equal chunks.

    The rounding error of a two-level sum is least near √terms: with random signs its variance grows with terms·chunk
    inside the chunks and with terms²/chunk across them. Chunks much shorter than `_SHORTEST` cost time.
    """
    longest = max(_SHORTEST, 8 * math.ceil(math.sqrt(terms) / 8))
    return ceil_div(terms, ceil_div(terms, longest))


@dataclass(frozen=True)
class Argument:
    """A tensor parameter of a kernel; its extents may be symbolic."""

    name: str
    shape: tuple[T.Index, ...]
    dtype: str = "float32"


def bytes_of_all(tensors: Iterable[tuple[Sequence[T.Index], object]]) -> int | None:
    """Returns the size of tensors in bytes, given as shape and dtype; None if an extent is symbolic."""
    total = 0
    for shape, dtype in tensors:
        extents = [int(extent) for extent in shape if isinstance(extent, int | T.IntImm)]
        if len(extents) < len(shape):
            return None
        total += math.prod(extents) * int(tvm.DataType(str(dtype)).itemsize)
    return total


def free_variables(arguments: Sequence[Argument]) -> list[T.Var]:
    """Returns the variables in extents that are not an extent by themselves; a kernel takes them as parameters, too."""
    extents = [extent for argument in arguments for extent in argument.shape if not isinstance(extent, int)]
    variables = {variable for extent in extents for variable in T.analysis.undefined_vars(extent)}
    return sorted(variables - {extent for extent in extents if isinstance(extent, T.Var)}, key=lambda v: str(v.name))


def prim_func(
    name: str, arguments: Sequence[Argument], body: Callable[..., None], info: KernelInfo = KERNEL
) -> T.PrimFunc:
    """Builds a function whose body is emitted by `body`, which gets one buffer per argument.

    Its parameters are the tensors, the `free_variables` of their extents, and the result. All variables are its own.

    Args:
        name: Its name.
        arguments: Its tensors, the result last.
        body: Emits the loops for the buffers.
        info: Its facts; the type of the result and the bytes of the arguments are added.
    """
    bytes_moved = bytes_of_all((argument.shape, argument.dtype) for argument in arguments)
    info = replace(info, dtype=arguments[-1].dtype, bytes_moved=bytes_moved)
    with T.IRBuilder() as builder:
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
    return s_tir.renew_defs(function) if bytes_moved is None else function


def replace_loops(module: tvm.IRModule, replaced: Callable[[str, T.PrimFunc], T.PrimFunc]) -> tvm.IRModule:
    """Returns a module with other functions in place of those without a schedule, by their names."""
    result = module.clone()
    for variable, function in module.functions_items():
        if isinstance(function, T.PrimFunc) and not bool((function.attrs or {}).get("tirx.is_scheduled")):
            result[variable] = replaced(variable.name_hint, function)
    return result


def registers(shape: tuple[int, ...], dtype: str = "float32") -> T.Buffer:
    """Emits a buffer of less than 1 KiB (`kMaxStackAlloca`), which LLVM keeps in registers if indices are constants.

    TVM 0.27 takes larger ones, and those of scope `local`, from a workspace: two calls for each, and stores that LLVM
    must keep although nothing reads them.
    """
    return T.alloc_buffer(shape, dtype)


def variable(value: T.Operand, dtype: str | None = None) -> T.Buffer:
    """Emits a register that holds the value, and returns it as a buffer of one element.

    Args:
        value: The value.
        dtype: The type; that of the value by default.
    """
    if isinstance(value, int | float):
        value = T.const(value, dtype or "float32")
    cell = registers((1,), dtype or str(value.ty))
    T.buffer_store(cell, value, [0])
    return cell


def scalar(value: T.Operand, dtype: str | None = None) -> T.Expr:
    """Emits a register that holds the value and is not changed, and returns its element."""
    return variable(value, dtype)[0]


@dataclass(frozen=True)
class ThreadWorkspace:
    """The memory of a thread, which lasts through the iterations of a parallel loop.

    Attributes:
        buffers: The buffers of the thread.
        number: Key of the current content, in a buffer of one element.
    """

    buffers: tuple[T.Buffer, ...]
    number: T.Buffer

    @contextmanager
    def fill_once(self, number: T.Index) -> Iterator[None]:
        """Emits the code in the context such that a thread skips it while its content has the key `number` (≥ 0)."""
        with T.If(self.number[0] != number), T.Then():
            T.buffer_store(self.number, number, [0])
            yield


@contextmanager
def parallel_with_workspace(tasks: int, dtype: str, *shapes: Sequence[int]) -> Iterator[tuple[T.Var, ThreadWorkspace]]:
    """Emits a parallel loop over tasks, and buffers of each thread that last through its tasks.

    TVM gives a thread consecutive tasks, so that a task finds the content of the one before. Memory is allocated where
    the thread begins, because TVM 0.27 moves other allocations out to where all threads would share them.

    Args:
        tasks: Number of tasks.
        dtype: Type of the buffers' elements.
        shapes: Their shapes.

    Yields:
        The number of the task, and the buffers.
    """
    if tasks == 1:
        # TVM removes a loop of one iteration, and refuses code for threads without a loop.
        number = variable(_EMPTY, "int32")
        with T.serial(0, 1) as task:
            yield task, ThreadWorkspace(tuple(T.alloc_buffer(shape, dtype) for shape in shapes), number)
        return
    element_bytes = int(tvm.DataType(dtype).itemsize)
    in_line = _LINE_BYTES // element_bytes
    sizes = [ceil_div(math.prod(shape), in_line) * in_line for shape in shapes]
    total = element_bytes * sum(sizes)
    with T.attr(T.const(0, "int32"), "pragma_parallel_launch_point", 1):
        memory = T.TVMBackendAllocWorkspace(_CPU, 0, T.const(total + _LINE_BYTES, "uint64"), 2, 32)
        line = T.decl_buffer(((total + _LINE_BYTES) // 4,), "int32", data=memory)
        with T.If(T.isnullptr(line.data)), T.Then():
            T.evaluate(T.tvm_throw_last_error())
        buffers = tuple(
            T.decl_buffer(shape, dtype, data=line.data, elem_offset=sum(sizes[:n])) for n, shape in enumerate(shapes)
        )
        number = T.decl_buffer((1,), "int32", data=line.data, elem_offset=total // 4)
        T.buffer_store(number, T.const(_EMPTY, "int32"), [0])
        with T.parallel(0, tasks) as task:
            yield task, ThreadWorkspace(buffers, number)
        T.evaluate(T.TVMBackendFreeWorkspace(_CPU, 0, line.data))


def view(buffer: T.Buffer, *shape: int) -> T.Buffer:
    """Declares the same contiguous memory under another shape."""
    return T.decl_buffer(shape, buffer.dtype, data=buffer.data)


@overload
def ceil_div(a: int, b: int) -> int: ...


@overload
def ceil_div(a: T.Expr, b: int) -> T.Expr: ...


def ceil_div(a: T.Index, b: int) -> T.Index:
    """Computes ⌈a / b⌉."""
    return -(-a // b)


def parts_of(length: T.Index, part: int) -> T.Index:
    """Emits ⌈length / part⌉ of a length ≥ 0; TVM's code generation fails on `//` of one of unknown sign."""
    return ceil_div(length, part) if isinstance(length, int) else T.Bind(T.truncdiv(length + (part - 1), part))


@contextmanager
def where(*conditions: T.Operand) -> Iterator[None]:
    """Emits the code in the context under all of these conditions, or in any case if there are none."""
    if not conditions:
        yield
        return
    with T.If(conditions[0] if len(conditions) == 1 else T.all(*conditions)), T.Then():
        yield


def tail_extent(count: int, total: int, first: T.Index) -> T.Index:
    """Computes min(count, total - first), a constant if `count` divides `total`."""
    return count if total % count == 0 else T.min(count, total - first)


def fp32(value: float) -> T.Expr:
    """Returns an fp32 constant."""
    return T.const(value, "float32")
