"""Provides building blocks of the CPU's kernels: loops over vectors and the register tile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import tvm

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import ceil_div, chunk_length, fp32, registers
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


def for_each_vector(count: int, lanes: int, body: Callable[[Any], None]) -> None:
    """Emits `body(index)` for 0 … count in vector operations."""
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


def each_vector(tile: Tile, body: Callable[[int, Any, Any], None]) -> None:
    """Emits `body(row, column, index in [rows · columns])` for a register tile, in vector operations, unrolled."""
    for i in range(tile.rows):
        for start in range(0, tile.columns, tile.lanes):
            with T.vectorized(0, tile.lanes) as j:
                body(i, start + j, i * tile.columns + start + j)


def columns_after(first: Any, columns: Any) -> Any:
    """Returns columns counted from a first one; those of a whole vector stay one that TVM can tell the bounds of."""
    if isinstance(columns, T.Ramp):
        return T.Ramp(first + columns.base, columns.stride, columns.lanes)
    return first + columns


_ELEMENT_BYTES = 4
"""Bytes of an element of a panel."""
LINE = 16
"""fp32 numbers in a cache line of x86 and of most AArch64 processors, which fetch 64 bytes."""


def prefetch(element: Any, level: Literal[1, 2] = 1, *, write: bool = False) -> None:
    """Emits that the line of an element, which may lie beyond the end of its buffer, is fetched into a cache.

    Args:
        element: The element that will be read or written.
        level: The cache.
        write: Whether the element will be written, so that no other core may keep it.
    """
    how = (T.const(value, "int32") for value in (int(write), 4 - level, 1))
    T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch", T.address_of(element), *how))


def spread(total: int, count: int, k: Any, body: Callable[[Any], None]) -> None:
    """Emits step k of `count`, all of which together do `body(n)` for every n below `total`.

    Some n may be repeated, or lie beyond the total, so it is for prefetches alone.
    """
    per_step = ceil_div(total, count)
    for n in range(per_step):
        body(k * total // count if per_step == 1 else k * per_step + n)


@dataclass(frozen=True)
class BlockScale:
    """The scaling of a chunk of the depth: its elements become numbers with a common scale, stored after them.

    Attributes:
        row: Takes panels, a function from an element of the chunk to its index, the elements of the chunk, and lanes;
            emits the scaling of a row of a left panel.
        columns: Takes panels, a function from (element of the chunk, column) to an index, elements, columns and lanes;
            emits the scaling of the columns of a right panel.
    """

    row: Callable[[T.Buffer, Callable[[Any], Sequence[Any]], int, int], None]
    columns: Callable[[T.Buffer, Callable[[Any, Any], Sequence[Any]], int, int, int], None]


@dataclass(frozen=True)
class Tiles:
    """A micro-kernel of instructions that multiply whole panels in memory, the left one row by row.

    Attributes:
        function: Name of the functions that multiply, before the rows and columns of their panels. Each gets the
            addresses of its sums, of a left and of a right panel, the bytes from one row of the left panel to the next,
            the steps of the depth, and whether there are sums yet: it adds the product to them, or makes them.
        shapes: Rows and columns of the panels, the largest first.
        least_rows: Least number of rows of a product; vectors are as fast for fewer.
        step: Elements of the depth that are multiplied at a time; the depth is a multiple of them.
        longest: Largest number of elements of a chunk of the depth, which all left panels use before the next chunk.
        begin: Name of the function that a task calls before it multiplies; empty if there is none.
        end: Name of the function that a task calls at its end; empty if there is none.
        scaled: Scaling of the elements of packed panels; None if they are not scaled.
        block_bytes: Largest size of a block of the left operand in bytes; None if the memory behind the second cache is
            fast enough.
        fetches_left: Whether the next left panel is prefetched before one is multiplied, for panels so small that the
            first cache holds two. The next chunk of the right operand is always prefetched, into the second cache.
    """

    function: str
    shapes: Sequence[tuple[int, int]]
    least_rows: int
    step: int
    longest: int
    begin: str = ""
    end: str = ""
    scaled: BlockScale | None = None
    block_bytes: int | None = None
    fetches_left: bool = False

    def takes(self, rows: int, depth: int) -> bool:
        """Returns whether the left panel is worth its tiles, and the depth, in elements, fills them."""
        return rows >= self.least_rows and depth % self.step == 0

    def tile(self, rows: int, lanes: int) -> Tile:
        """Returns the smallest panels that have all rows of a product, otherwise the largest.

        Args:
            rows: Rows of the product.
            lanes: Number of fp32 numbers in a vector register, by which results are stored.
        """
        holding = [shape for shape in self.shapes if shape[0] >= rows]
        return Tile(*(holding[-1] if holding else self.shapes[0]), lanes)

    def chunk(self, depth: int, *, even: bool = False) -> int:
        """Returns the elements of a chunk of the depth; the last is shorter, unless they are stored chunk by chunk.

        Args:
            depth: Elements of the depth.
            even: Whether all chunks must be equal in any case.
        """
        steps = depth // self.step
        most_steps = max(1, self.longest // self.step)
        if even or self.scaled is not None:
            return self.step * max(length for length in range(1, most_steps + 1) if steps % length == 0)
        return self.step * ceil_div(steps, ceil_div(steps, most_steps))

    def left_panels(self, tile: Tile, depth: int) -> int | None:
        """Returns the left panels of a block at most, of so many elements of the depth; None if any number will do."""
        if self.block_bytes is None:
            return None
        return max(1, self.block_bytes // (_ELEMENT_BYTES * tile.rows * depth))

    def multiply(self, tile: Tile, panels: Sequence[Any], row_bytes: int, count: Any, added: Any) -> None:
        """Emits a product.

        Args:
            tile: Its shape.
            panels: Addresses of the sums, and of the left and the right panel.
            row_bytes: Bytes from one row of the left panel to the next.
            count: Elements of the depth.
            added: Whether there are sums yet.
        """
        name = f"{self.function}_{tile.rows}x{tile.columns}"
        row = T.const(row_bytes, "int64")
        T.evaluate(T.call_extern("int32", name, *panels, row, count // self.step, T.Cast("int32", added)))

    @contextmanager
    def tile_config(self) -> Iterator[None]:
        """Emits the configuration of the instructions before the code in the context, and its release after it."""
        if self.begin:
            T.evaluate(T.call_extern("int32", self.begin))
        yield
        if self.end:
            T.evaluate(T.call_extern("int32", self.end))


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic of a product: the elements of its panels, and one step of its depth.

    Attributes:
        name: Its part of kernels' names; empty for fp32.
        multiplies: Type of the terms, a part of a workload's key.
        dtype: Type of an element of a panel.
        terms: Terms of the sum in an element.
        pack_terms: Takes a function from k to a term, the number of an element, and the number of elements of the
            depth; returns the element.
        multiply_add: (tile, its rows of sums, row → element of the left operand, columns → elements of the right one):
            emits a step. With `split`, the left element is the sequence of its terms.
        functions: LLVM IR of the functions that a step calls.
        shapes: Rows and vectors of the tiles that stay in registers; those of fp32 if None.
        split: (element) → its terms in fp32, as which packed blocks keep elements of the left operand, for vectors;
            None if they keep them as they are.
        tiles: The micro-kernel that replaces the steps, for left panels that lie row by row; None if there is none.
    """

    name: str
    multiplies: str
    dtype: str
    terms: int
    pack_terms: Callable[[Callable[[Any], Any], Any, int], Any]
    multiply_add: Callable[[Tile, Sequence[T.Buffer], Callable[[int], Any], Callable[[Any], Any]], None]
    functions: str = ""
    shapes: Sequence[tuple[int, int]] | None = None
    split: Callable[[Any], Sequence[Any]] | None = None
    tiles: Tiles | None = None

    def in_panels(self, instruction: str, functions: str, tiles: Tiles) -> Arithmetic:
        """Returns the arithmetic of the same elements that multiplies whole panels.

        Args:
            instruction: Name of the instruction, a part of kernels' names.
            functions: LLVM IR of the functions of the tiles.
            tiles: The micro-kernel.
        """
        name = f"{self.name}_{instruction}"
        return replace(self, name=name, functions=functions, shapes=None, split=None, tiles=tiles)

    @property
    def term_bytes(self) -> int:
        """Returns the size of a term in a panel in bytes."""
        return int(tvm.DataType(self.dtype).itemsize) // self.terms

    @property
    def left_dtype(self) -> str:
        """Returns the type of the numbers in a packed block of the left operand."""
        return self.dtype if self.split is None else "float32"

    @property
    def left_numbers(self) -> int:
        """Returns the number of numbers for an element in such a block."""
        return 1 if self.split is None else self.terms

    def imported(self) -> AbstractContextManager[Any]:
        """Emits the import of the functions for the code in the context."""
        if not self.functions:
            return nullcontext()
        frame: AbstractContextManager[Any] = T.attr(T.const(0, "int32"), "pragma_import_llvm", self.functions)
        return frame

    @property
    def scaled(self) -> BlockScale | None:
        """Returns the scaling of packed panels; None if they are not scaled."""
        return None if self.tiles is None else self.tiles.scaled

    def stored(self, elements: Any, chunk: int) -> Any:
        """Returns the number of stored numbers for elements of the depth in whole chunks.

        Args:
            elements: Elements of the depth.
            chunk: Elements of a chunk, whose scale is stored behind it.
        """
        return elements if self.scaled is None else elements + elements // chunk

    def tile_config(self) -> AbstractContextManager[None]:
        """Emits the configuration of the micro-kernel around the work of a task in the context."""
        return nullcontext() if self.tiles is None else self.tiles.tile_config()


def _multiply_add(
    tile: Tile, rows: Sequence[T.Buffer], left: Callable[[int], Any], right: Callable[[Any], Any]
) -> None:
    each_vector(tile, lambda i, j, index: T.buffer_store(rows[i], rows[i][j] + left(i) * right(j), [j]))


FP32 = Arithmetic("", "float32", "float32", 1, lambda term, k, _: term(k), _multiply_add)
"""Products of fp32 numbers, summed in fp32."""


def multiply(
    tile: Tile,
    count: Any,
    left: Callable[[Any, int], Any],
    right: Callable[[Any, Any], Any],
    ahead: Callable[[Any], None] | None = None,
    arithmetic: Arithmetic = FP32,
) -> list[T.Buffer]:
    """Emits a part of the product of one register tile and returns its rows.

    Args:
        tile: The shape of the tile; all of it stays in registers.
        count: Number of terms of each sum.
        left: (k, row of the tile) → element of the left operand.
        right: (k, column of the tile) → element of the right operand; contiguous in the column.
        ahead: Takes k and emits the prefetches of its step.
        arithmetic: The arithmetic of a step.
    """
    rows = [registers((tile.columns,)) for _ in range(tile.rows)]
    each_vector(tile, lambda i, j, index: T.buffer_store(rows[i], fp32(0.0), [j]))
    with T.serial(0, count) as k:
        arithmetic.multiply_add(tile, rows, lambda i: left(k, i), lambda j: right(k, j))
        if ahead is not None:
            ahead(k)
    return rows


@dataclass(frozen=True)
class TileSink:
    """The steps after the last chunk of a panel's sums.

    Attributes:
        fetch: Takes panel, k and the number of steps; emits, in step k of that chunk, prefetches of the memory that
            `write` touches.
        write: Takes a panel and emits the use of its totals.
    """

    fetch: Callable[[Any, Any, int], None]
    write: Callable[[Any], None]


def multiply_panels(
    tile: Tile,
    depth: Any,
    panels: Any,
    left: Callable[[Any, Any, Any, int], Any],
    right: Callable[[Any, Any, Any], Any],
    totals: T.Buffer,
    before: Callable[[Any, Any], None] | None = None,
    place: Callable[[Any, int, Any], Sequence[Any]] | None = None,
    longest: int | None = None,
    ahead: Callable[[Any, Any, Any], None] | None = None,
    after: TileSink | None = None,
    arithmetic: Arithmetic = FP32,
    stride: int | None = None,
    fetch: Callable[[Any, Any], None] | None = None,
) -> None:
    """Emits totals[p] = left panel p · one right panel, for every p below `panels`.

    The sums are cut into chunks, and a chunk is done for all left panels before the next: the right panel's part stays
    in the first-level cache meanwhile, and LLVM cannot promote the totals to registers that it would have to spill.

    Args:
        tile: The register tile.
        depth: Number of terms of each sum; where it is not constant, a multiple of `longest`.
        panels: Number of left panels.
        left: (panel, first term of the chunk, k counted from it, row of the tile) → element.
        right: (first term of the chunk, k counted from it, column of the tile) → element; contiguous in the column.
        totals: Gets the products, [at least panels, rows · columns].
        before: Takes the first term and the number of terms; emits the preparation of a chunk of the right panel.
        place: (panel, row, column of the tile) → index into totals of another shape; contiguous in the column, and in
            rows, too, where the arithmetic has tiles.
        longest: Terms of a chunk at most, if not `chunk_length`.
        ahead: Takes panel, first term of the chunk, and k counted from it; emits the prefetches of a step of the depth.
        after: The steps with the totals of a panel as soon as they are complete.
        arithmetic: The arithmetic of a step.
        stride: Elements from one row of a left panel to the next, where the arithmetic has tiles; those that are stored
            for a chunk if None.
        fetch: Takes panel and first term of the chunk; emits, if the arithmetic has tiles, the prefetches before a
            panel is multiplied.
    """

    def total(p: Any, i: int, j: Any, position: Any) -> tuple[Any, ...]:
        return (p, position) if place is None else tuple(place(p, i, j))

    assert isinstance(depth, int) or after is None
    if isinstance(depth, int) and arithmetic.tiles is None:
        chunk = chunk_length(depth) if longest is None else ceil_div(depth, ceil_div(depth, longest))
    else:
        assert longest is not None
        chunk = longest
    whole = not isinstance(depth, int) or depth % chunk == 0
    if arithmetic.tiles is None:
        with T.serial(0, panels) as p:
            each_vector(tile, lambda i, j, position: T.buffer_store(totals, fp32(0.0), total(p, i, j, position)))

    def emit_chunk(c: Any, count: Any, last: TileSink | None) -> None:
        if before is not None:
            before(c * chunk, count)
        if arithmetic.tiles is not None:
            with T.serial(0, panels) as p:
                if fetch is not None:
                    fetch(p, c * chunk)
                operands = totals[total(p, 0, 0, 0)], left(p, c * chunk, 0, 0), right(c * chunk, 0, 0)
                # TVM would make the buffer smaller if it saw less of it being used.
                prefetch(totals[total(p, tile.rows - 1, tile.columns - 1, tile.size - 1)], write=True)
                addresses = [T.address_of(element) for element in operands]
                row_bytes = (stride or arithmetic.stored(chunk, chunk)) * int(tvm.DataType(arithmetic.dtype).itemsize)
                added = T.const(c > 0, "bool") if isinstance(c, int) else c > 0
                arithmetic.tiles.multiply(tile, addresses, row_bytes, count, added)
                if last is not None:
                    last.write(p)
            return
        with T.serial(0, panels) as p:

            def emit_prefetch(k: Any, p: Any = p) -> None:
                if ahead is not None:
                    ahead(p, c * chunk, k)
                if last is not None:
                    last.fetch(p, k, count)

            partial = multiply(
                tile,
                count,
                lambda k, i: left(p, c * chunk, k, i),
                lambda k, j: right(c * chunk, k, j),
                emit_prefetch,
                arithmetic,
            )

            def add(i: int, j: Any, position: Any, p: Any = p, partial: list[T.Buffer] = partial) -> None:
                index = total(p, i, j, position)
                T.buffer_store(totals, totals[index] + partial[i][j], index)

            each_vector(tile, add)
            if last is not None:
                last.write(p)

    if after is None:
        with T.serial(0, ceil_div(depth, chunk)) as c:
            emit_chunk(c, chunk if whole else T.min(chunk, depth - c * chunk), None)
        return
    others = ceil_div(depth, chunk) - 1
    if others:
        with T.serial(0, others) as c:
            emit_chunk(c, chunk, None)
    emit_chunk(others, depth - others * chunk, after)
