"""Provides building blocks for GPU kernels written as TIR: the launch, barriers, sums over threads.

The kernels are written with TVM's IR builder, threads bound, and marked as scheduled, so that no rule touches them. All
of them are one-dimensional grids of one-dimensional blocks, so that a thread's lane in its warp is its index modulo 32
on CUDA and on Metal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from harness.compiler import tir as T

WARP = 32
"""Threads that exchange registers, on NVIDIA GPUs and on Apple's."""

MULTIPROCESSORS = 128
"""Blocks that keep a GPU busy: about as many as a large one has multiprocessors (A100: 108, H100: 132)."""

FLOATS = ("float32", "float16", "bfloat16")
"""Element types of the kernels; all of them compute in float32."""


@contextmanager
def launch(blocks: int, threads: int) -> Iterator[tuple[T.Expr, T.Expr]]:
    """Emits a kernel's body; yields the index of the block, and of the thread in it."""
    with T.launch_thread("blockIdx.x", blocks) as block, T.launch_thread("threadIdx.x", threads) as thread:
        yield block, thread


def barrier() -> None:
    """Emits a barrier: all threads of the block wait, and see each other's writes to shared memory."""
    T.evaluate(T.tvm_storage_sync("shared"))


def shared(size: int) -> T.Buffer:
    """Declares fp32 shared memory of a block."""
    return T.alloc_buffer((size,), "float32", scope="shared")


def local(size: int, dtype: str = "float32") -> T.Buffer:
    """Declares registers of a thread, if every index into them is a constant."""
    return T.alloc_buffer((size,), dtype, scope="local")


def scalar(value: T.Expr) -> T.Expr:
    """Emits a register with an fp32 value, and returns it."""
    cell = local(1)
    T.buffer_store(cell, value, [0])
    return cell[0]


def fp32(value: T.Operand) -> T.Expr:
    """Converts a number to a constant, and an expression of another float type to fp32."""
    if isinstance(value, int | float):
        return T.const(float(value), "float32")
    return converted(value, "float32")


def converted(value: T.Expr, dtype: str) -> T.Expr:
    """Converts a value to a type, which it may have."""
    return value if str(value.ty) == dtype else T.Cast(dtype, value)


def power_of_two(count: int) -> int:
    """Returns the smallest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()


Merge = Callable[[T.Expr, T.Expr], T.Expr]
"""Merges two partial results; the order must not matter except for rounding."""


def merge_lanes(values: Sequence[T.Expr], merges: Sequence[Merge], lanes: int, thread: T.Index) -> list[T.Expr]:
    """Emits the merge of each value over groups of `lanes` neighbours of a warp, a power of two; all get the result.

    Neighbours exchange across a growing distance, so that merged partial results have equally many terms. TVM cannot
    generate Metal's `simd_shuffle_xor`, hence the lane to read from.
    """
    cells = [local(1) for _ in values]
    for cell, value in zip(cells, values, strict=True):
        T.buffer_store(cell, value, [0])
    distance = 1
    while distance < lanes:
        for cell, merge in zip(cells, merges, strict=True):
            source = T.bitwise_xor(thread % WARP, distance)
            neighbour = T.tvm_warp_shuffle(T.const(0xFFFFFFFF, "uint32"), cell[0], source, WARP, WARP)  # a whole warp
            T.buffer_store(cell, merge(cell[0], neighbour), [0])
        distance *= 2
    return [cell[0] for cell in cells]


def merge_threads(values: Sequence[T.Expr], merges: Sequence[Merge], threads: int, thread: T.Index) -> list[T.Expr]:
    """Emits the merge of each value over `threads` neighbours of a block, a power of two; all get the result.

    Every thread of the block must reach it.
    """
    results = merge_lanes(values, merges, min(threads, WARP), thread)
    warps = threads // WARP
    if warps <= 1:
        return results
    exchange = shared(len(values) * 1024 // WARP)
    warp = thread // WARP
    first = warp // warps * warps
    with T.If(T.EQ(thread % WARP, 0)), T.Then():
        for n, value in enumerate(results):
            T.buffer_store(exchange, value, [n * (1024 // WARP) + warp])
    barrier()
    merged: list[T.Expr] = []
    for n, merge in enumerate(merges):
        partial: list[T.Expr] = [exchange[n * (1024 // WARP) + first + w] for w in range(warps)]
        while len(partial) > 1:
            partial = [merge(a, b) for a, b in zip(partial[::2], partial[1::2], strict=True)]
        merged.append(scalar(partial[0]))
    return merged
