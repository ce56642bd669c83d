"""Building blocks for kernels written as TIR: functions, blocked copies and the register tile.

The kernels are built with TVM's IR builder instead of schedules, because blocking, packing and edges are then ordinary
Python. Every function is marked opaque and scheduled, so that no pass fuses or reschedules it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from harness.schedules.cpu.tile import Tile

OPAQUE = 8
"""`relax::OpPatternKind::kOpaque`."""


def chunk_length(terms: int) -> int:
    """Terms that one register accumulates before their sum is added to a second one, in equal parts.

    The rounding error of a two-level sum is least near √terms: with random signs its variance grows with terms·part
    inside the parts and with terms²/part across them. Measured on SAM 3, longer parts are no faster.
    """
    longest = 8 * math.ceil(math.sqrt(terms) / 8)
    return ceil_div(terms, ceil_div(terms, longest))


@dataclass(frozen=True)
class Argument:
    """A tensor parameter of a kernel."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"


def prim_func(name: str, arguments: Sequence[Argument], body: Callable[..., None]) -> tirx.PrimFunc:
    """A function whose body is emitted by `body`, which gets one buffer per argument."""
    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_name(name)
            T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True, "op_pattern": OPAQUE})
            buffers = [T.arg(a.name, T.buffer(a.shape, a.dtype)) for a in arguments]
            # Relax asks some questions about the root block of every function.
            with T.sblock("root"):
                T.reads()
                T.writes()
                body(*buffers)
        return builder.get()


def view(buffer: tirx.Buffer, *shape: int) -> tirx.Buffer:
    """The same contiguous memory under another shape."""
    return T.decl_buffer(shape, buffer.dtype, data=buffer.data)


def ceil_div(a: int, b: int) -> int:
    """⌈a / b⌉."""
    return -(-a // b)


def fp32(value: float) -> Any:
    """An fp32 constant."""
    return tirx.const(value, "float32")


def vectors(count: int, lanes: int) -> list[tuple[int, int]]:
    """Splits 0 … count into (start, width) pieces of `lanes`, then of falling powers of two."""
    pieces = [(start, lanes) for start in range(0, count - lanes + 1, lanes)]
    start = count // lanes * lanes
    while start < count:
        width = 1 << int(math.log2(count - start))
        pieces.append((start, width))
        start += width
    return pieces


def for_each_vector(count: int, lanes: int, body: Callable[[Any], None]) -> None:
    """Emits `body(index)` for 0 … count in vector operations."""
    whole = count // lanes
    if whole > 1:
        with T.serial(0, whole) as v, T.vectorized(0, lanes) as j:
            body(v * lanes + j)
    for start, width in vectors(count, lanes)[whole if whole > 1 else 0 :]:
        if width == 1:
            body(tirx.const(start, "int32"))
        else:
            with T.vectorized(0, width) as j:
                body(start + j)


def accumulate(
    tile: Tile, depth: int, left: Callable[[Any, int], Any], right: Callable[[Any, Any], Any]
) -> tirx.Buffer:
    """Emits the product of one register tile and returns the buffer [rows · columns] that holds it.

    Args:
        tile: The shape of the tile.
        depth: Number of terms of each sum.
        left: (k, row of the tile) → element of the left operand.
        right: (k, column of the tile) → element of the right operand; contiguous in the column.
    """
    total = T.alloc_buffer((tile.size,), "float32", scope="local")
    partial = T.alloc_buffer((tile.size,), "float32", scope="local")

    def each(body: Callable[[int, Any, Any], None]) -> None:
        for i in range(tile.rows):
            for start in range(0, tile.columns, tile.lanes):
                with T.vectorized(0, tile.lanes) as j:
                    body(i, start + j, i * tile.columns + start + j)

    def clear(buffer: tirx.Buffer) -> None:
        each(lambda i, j, at: T.buffer_store(buffer, fp32(0.0), [at]))

    def steps(first: Any, count: Any) -> None:
        with T.serial(0, count) as k:
            each(lambda i, j, at: T.buffer_store(partial, partial[at] + left(first + k, i) * right(first + k, j), [at]))

    chunk = chunk_length(depth)
    chunks = ceil_div(depth, chunk)
    if chunks == 1:
        clear(partial)
        steps(0, depth)
        each(lambda i, j, at: T.buffer_store(total, partial[at], [at]))
        return total
    clear(total)
    with T.serial(0, chunks) as c:
        clear(partial)
        steps(c * chunk, chunk if depth % chunk == 0 else T.min(chunk, depth - c * chunk))
        each(lambda i, j, at: T.buffer_store(total, total[at] + partial[at], [at]))
    return total
