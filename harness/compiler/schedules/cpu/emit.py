"""Provides building blocks of the CPU's kernels: loops over vectors, and prefetches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import ceil_div, fp32
from harness.compiler.schedules.cpu.tile import Tile


def vectors(count: int, lanes: int) -> list[tuple[int, int]]:
    """Returns pieces (start, width) of 0 … count: pieces of `lanes`, then of falling powers of two."""
    pieces = [(start, lanes) for start in range(0, count - lanes + 1, lanes)]
    start = count // lanes * lanes
    while start < count:
        width = 1 << int(math.log2(count - start))
        pieces.append((start, width))
        start += width
    return pieces


def for_each_vector(count: T.Index, lanes: int, body: Callable[[T.Index], None]) -> None:
    """Emits `body(index)` for 0 … count in vector operations, or one by one if the number is not constant."""
    if not isinstance(count, int):
        with T.serial(0, count) as k:
            body(k)
        return
    whole = count // lanes
    if whole > 1:
        with T.serial(0, whole) as v, T.vectorized(0, lanes) as j:
            body(v * lanes + j)
    for start, width in vectors(count, lanes)[whole if whole > 1 else 0 :]:
        if width == 1:
            body(T.const(start, "int32"))
        else:
            with T.vectorized(0, width) as j:
                body(start + j)


def fill(buffer: T.Buffer, lanes: int, value: float, *row: T.Index) -> None:
    """Emits buffer[row, j] = value for all j; a buffer of one dimension has one row, ()."""
    for_each_vector(int(buffer.shape[-1]), lanes, lambda j: T.buffer_store(buffer, fp32(value), [*row, j]))


def each_vector(tile: Tile, body: Callable[[int, T.Index, T.Index], None]) -> None:
    """Emits `body(row, column, index in [rows · columns])` for a register tile, in vector operations, unrolled."""
    for i in range(tile.rows):
        for start in range(0, tile.columns, tile.lanes):
            with T.vectorized(0, tile.lanes) as j:
                body(i, start + j, i * tile.columns + start + j)


def columns_after(first: T.Index, columns: T.Index) -> T.Index:
    """Returns columns counted from a first one; those of a whole vector stay one that TVM can tell the bounds of."""
    if isinstance(columns, T.Ramp):
        return T.Ramp(first + columns.base, columns.stride, columns.lanes)
    return first + columns


def further(element: T.TensorLoad, rows: T.Index, columns: T.Index = 0) -> T.TensorLoad:
    """Returns the element so many rows and columns after another one, which are the last two dimensions."""
    *outer, row, column = element.indices
    return element.source[(*outer, row + rows, column + columns)]


LINE = 16
"""fp32 numbers in a cache line of x86 and of most AArch64 processors, which fetch 64 bytes."""


def prefetch(element: T.Expr, level: Literal[1, 2] = 1, *, write: bool = False) -> None:
    """Emits that the line of an element, which may lie beyond the end of its buffer, is fetched into a cache.

    Args:
        element: The element that will be read or written.
        level: The cache.
        write: Whether the element will be written, so that no other core may keep it.
    """
    how = (T.const(value, "int32") for value in (int(write), 4 - level, 1))
    T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch", T.address_of(element), *how))


def spread(total: int, count: int, k: T.Index, body: Callable[[T.Index], None]) -> None:
    """Emits step k of `count`, all of which together do `body(n)` for every n below `total`.

    Some n may be repeated, or lie beyond the total, so it is for prefetches alone.
    """
    per_step = ceil_div(total, count)
    for n in range(per_step):
        body(k * total // count if per_step == 1 else k * per_step + n)
