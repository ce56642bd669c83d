"""Builds the blocked matrix product that linear layers, batched products and convolutions consist of.

    result[b, i, j] = finish(Σ_k left[b, i, k] · right[b, k, j])

One operand is *resident*: packed once into panels [batch, panel, depth, width] by `pack_function` (for weights that
happens when the model is loaded). The other one *streams*: each task packs a block of it into its own workspace,
through an arbitrary index function, so that transposed operands and convolutions need no copy in memory. A panel is as
wide as the register tile on that side; `multiply_panels` takes one right panel past many left ones.

In the terms of BLIS (Van Zee and van de Geijn, 2015), the left operand is A and the right one B, panels are
micro-panels, and both operands are packed: the resident one ahead of time, the streaming one block by block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import (
    Argument,
    ThreadWorkspace,
    ceil_div,
    parallel_with_workspace,
    prim_func,
    registers,
    tail_extent,
    view,
)
from harness.compiler.schedules.common.kernel_info import PRODUCT, KernelInfo
from harness.compiler.schedules.cpu.blocking import Blocking, Extents, Side, panels
from harness.compiler.schedules.cpu.emit import LINE, for_each_vector, prefetch, spread
from harness.compiler.schedules.cpu.microkernels.fp32 import FP32
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel, PanelOfB, PanelsOfA, Sums
from harness.compiler.schedules.cpu.packing import Pack, PanelRead, Read
from harness.compiler.schedules.cpu.panels import multiply_panels
from harness.compiler.schedules.cpu.tile import Tile

_WORTH_STORING = 16 * 1024
"""Bytes of a packed block that is worth being found again; a smaller one is sooner packed again by each task."""


@dataclass(frozen=True)
class Interleaved:
    """Rows whose columns alternate in the result.

    Attributes:
        rows: So many rows, of a tile whose rows are a multiple of them.
        run: Columns that lie in one run of the result: a divisor of those of a tile, and of all.
        store: (batch, first row, first column, number of the element from there on, value): emits the store of one
            element; may be vectorized over the number.
    """

    rows: int
    run: int
    store: Callable[[T.Index, T.Index, T.Index, T.Index, T.Expr], None]


@dataclass(frozen=True)
class Access:
    """The access of a kernel to its operands and its result.

    Attributes:
        pack: Packs the streaming operand.
        packed: Reads the packed resident operand.
        store: (batch, row, column, value): emits the store of one element; may be vectorized over columns.
        touched: Takes batch, row and column; returns the elements of memory that the store writes (the first) and
            reads, whose neighbours belong to the neighbouring columns.
        rows: Reads the streaming operand in place, if it is the left one and packed along its rows.
        interleaved: Stores rows that alternate in the result; None if each is stored by itself.
    """

    pack: Pack
    packed: PanelRead
    store: Callable[[T.Index, T.Index, T.Index, T.Expr], None]
    touched: Callable[[T.Index, T.Index, T.Index], Sequence[T.Expr]] = lambda b, i, j: ()
    rows: Read | None = None
    interleaved: Interleaved | None = None


@dataclass(frozen=True)
class Block:
    """The work of a task: panels of A times panels of B, of matrix `batch`."""

    batch: T.Index
    first_a: T.Index
    count_a: T.Index
    first_b: T.Index
    count_b: T.Index


Operands = Callable[[T.Index], tuple[PanelsOfA, PanelOfB]]
"""Takes the number of a panel of B, counted from a task's first, and returns the operands of its products."""


@dataclass(frozen=True)
class BlockedProduct:
    """Emits the parts of a product's loops.

    Attributes:
        extents: The extents; the depth counts elements of panels.
        blocking: The blocking.
        access: The access to operands and result.
        micro_kernel: The micro-kernel.
    """

    extents: Extents
    blocking: Blocking
    access: Access
    micro_kernel: MicroKernel = FP32

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Returns the shape of a packed block of A: [chunk, panel, number, row], or with rows before their numbers.

        The order is chunk by chunk, the order of reading, so that the processor prefetches past all panels of a chunk.
        """
        rows, numbers = self.blocking.tile.rows, self._numbers
        panel = (numbers, rows) if self.access.rows is None else (rows, numbers)
        return (ceil_div(self.extents.depth, self.blocking.chunk), self.blocking.slots, *panel)

    @property
    def _numbers(self) -> int:
        """Returns the stored numbers of a row of A in a chunk of the depth."""
        return self.micro_kernel.a.stored(self.blocking.chunk, self.blocking.chunk)

    def _place(self, c: T.Index, slot: T.Index, number: T.Index, i: T.Index) -> tuple[T.Index, ...]:
        """Returns the place of a number of row i in a packed block of A."""
        return (c, slot, number, i) if self.access.rows is None else (c, slot, i, number)

    def pack_block(self, block: Block, workspace: T.Buffer) -> None:
        """Emits the packing of a block of A into memory of `block_shape`."""
        a, chunk, tile = self.micro_kernel.a, self.blocking.chunk, self.blocking.tile
        with T.serial(0, block.count_a) as slot:
            fill = self.access.pack(block.batch, (block.first_a + slot) * tile.rows)

            def pack_chunk(c: T.Index, count: T.Index) -> None:
                def put(k: T.Index, i: T.Index, element: T.Expr) -> None:
                    for n, number in enumerate(a.split(element)):
                        T.buffer_store(workspace, number, self._place(c, slot, k + n * chunk, i))

                fill(put, c * chunk, count)
                if a.scale is not None:
                    a.scale(workspace, lambda k, i: self._place(c, slot, k, i), chunk, tile.rows, tile.lanes)

            whole, rest = divmod(self.extents.depth, chunk)
            if rest and not a.row_major:
                # One loop that ends earlier in the last chunk was 4 % faster in fp32.
                with T.serial(0, whole + 1) as c:
                    pack_chunk(c, tail_extent(chunk, self.extents.depth, c * chunk))
                return
            with T.serial(0, whole) as c:
                pack_chunk(c, chunk)
            if rest:
                pack_chunk(whole, rest)

    def packed_block(self, block: Block, workspace: T.Buffer) -> Operands:
        """Returns the operands of a task whose block of A `pack_block` has packed.

        A step fetches as much of the next panel of A as it reads, and its share of the next chunk of B.
        """
        tile, slots, chunk = self.blocking.tile, self.blocking.slots, self.blocking.chunk
        micro_kernel = self.micro_kernel
        step, size = tile.rows * micro_kernel.a.numbers, tile.rows * self._numbers
        share = ceil_div(tile.columns, slots)
        lines = ceil_div(micro_kernel.b.stored(chunk, chunk) * ceil_div(tile.columns, LINE), slots)

        def operands(r: T.Index) -> tuple[PanelsOfA, PanelOfB]:
            line = view(workspace, math.prod(self.block_shape))

            def number(p: T.Index, first: T.Index, k: T.Index, i: int) -> T.Expr:
                return workspace[self._place(first // chunk, p, k, i)]

            def fetch_a(p: T.Index, first: T.Index, k: T.Index | None) -> None:
                start = (first // chunk * slots + p + 1) * size
                if k is not None:
                    prefetch(line[start + k * step], level=1)
                    return
                with T.serial(0, ceil_div(size, LINE)) as n:
                    prefetch(line[start + n * LINE], level=1)

            def fetch_b(p: T.Index, first: T.Index, k: T.Index | None) -> None:
                begin = self.access.packed(block.batch, block.first_b + r, first + chunk, 0)

                def fetch(index: T.Index) -> None:
                    row, column = begin.indices[-2] + index // tile.columns, index % tile.columns
                    prefetch(begin.source[(*begin.indices[:-2], row, column)], level=2)

                if k is not None:
                    fetch((p * chunk + k) * share)
                    return
                with T.serial(0, lines) as n:
                    fetch((p * lines + n) * LINE)

            return PanelsOfA(block.count_a, number, fetch=fetch_a), replace(self._resident_b(block, r), fetch=fetch_b)

        return operands

    def rows_in_place(self, block: Block) -> Operands:
        """Returns the operands of a task that reads A where it lies."""
        read, rows = self.access.rows, self.blocking.tile.rows
        assert read is not None

        def number(p: T.Index, first: T.Index, k: T.Index, i: int) -> T.Expr:
            row = (block.first_a + p) * rows + i
            last = self.extents.rows - 1
            return read(block.batch, row if self.extents.rows % rows == 0 else T.min(row, last), first + k)

        return lambda r: (PanelsOfA(block.count_a, number), self._resident_b(block, r))

    def _resident_b(self, block: Block, r: T.Index) -> PanelOfB:
        return PanelOfB(lambda first, k, j: self.access.packed(block.batch, block.first_b + r, first + k, j))

    def streaming_b(self, block: Block) -> Operands:
        """Emits memory for a chunk of B's panel, and returns operands that pack it just before it is used."""
        packed, tile = self.access.packed, self.blocking.tile
        # It stays in the first-level cache.
        workspace = T.alloc_buffer((self.blocking.chunk, tile.columns), self.micro_kernel.dtype)

        def operands(r: T.Index) -> tuple[PanelsOfA, PanelOfB]:
            fill = self.access.pack(block.batch, (block.first_b + r) * tile.columns)

            def number(p: T.Index, first: T.Index, k: T.Index, i: int) -> T.Expr:
                return packed(block.batch, block.first_a + p, first + k, i)

            def fetch(p: T.Index, first: T.Index, k: T.Index | None) -> None:
                row = first + (0 if k is None else k)
                prefetch(packed(block.batch, block.first_a + p + 1, row, 0), level=1)

            a = PanelsOfA(block.count_a, number, stride=self.extents.depth, fetch=fetch)
            b = PanelOfB(
                lambda first, k, j: workspace[k, j],
                lambda first, count: fill(lambda k, j, value: T.buffer_store(workspace, value, (k, j)), first, count),
            )
            return a, b

        return operands

    def multiply(self, block: Block, most_panels: int, operands: Operands) -> None:
        """Emits the products of a task and their write-back.

        Args:
            block: The work.
            most_panels: Panels of A of a task at most.
            operands: The operands.
        """
        tile = self.blocking.tile
        sums = T.alloc_buffer((most_panels, tile.size), "float32")
        with T.serial(0, block.count_b) as r:
            column = T.Bind((block.first_b + r) * tile.columns)
            a, b = operands(r)
            written = self._written(sums, block, column)
            multiply_panels(self.micro_kernel, tile, self.extents.depth, a, b, written, self.blocking.chunk)

    def _written(self, sums: T.Buffer, block: Block, column: T.Index) -> Sums:
        """Returns the sums of some tiles, all of which but what is beyond the edges is stored when it is complete."""
        tile, columns, interleaved = self.blocking.tile, self.extents.columns, self.access.interleaved
        lines = ceil_div(tile.columns, LINE)
        tail = columns % tile.columns

        def fetch(p: T.Index, k: T.Index, count: int) -> None:
            def line(n: T.Index) -> None:
                row = (block.first_a + p) * tile.rows + n // lines
                for index, element in enumerate(self.access.touched(block.batch, row, column + n % lines * LINE)):
                    prefetch(element, level=1, write=index == 0)

            spread(tile.rows * lines, count, k, line)

        def finish(p: T.Index) -> None:
            row = T.Bind((block.first_a + p) * tile.rows)

            def store(i: T.Index, width: int) -> None:
                def element(j: T.Index) -> None:
                    self.access.store(block.batch, row + i, column + j, sums[p, i * tile.columns + j])

                if interleaved is None:
                    for_each_vector(width, tile.lanes, element)
                else:
                    _interleave(interleaved, tile, sums, p, i, width, (block.batch, row + i, column))

            step = 1 if interleaved is None else interleaved.rows
            with T.serial(0, tail_extent(tile.rows, self.extents.rows, row) // step) as n:
                if tail == 0:
                    store(n * step, tile.columns)
                elif columns < tile.columns:
                    store(n * step, tail)
                else:
                    with T.If(column + tile.columns <= columns):
                        with T.Then():
                            store(n * step, tile.columns)
                        with T.Else():
                            store(n * step, tail)

        return Sums(sums, finish=finish, fetch=fetch)


def _interleave(
    interleaved: Interleaved,
    tile: Tile,
    sums: T.Buffer,
    p: T.Index,
    i: T.Index,
    width: int,
    place: tuple[T.Index, T.Index, T.Index],
) -> None:
    """Emits the store of some rows of a register tile, element by element of the first, the second and so on.

    Args:
        interleaved: Stores them.
        tile: The tile.
        sums: [panel, rows · columns].
        p: The panel.
        i: The first row, counted in the panel.
        width: Columns that are stored.
        place: Batch, row and column of the first element.
    """
    rows, run = interleaved.rows, interleaved.run
    batch, row, column = place
    with T.serial(0, width // run) as v:
        lines = [sums[p, T.Ramp((i + n) * tile.columns + v * run, 1, run)] for n in range(rows)]
        mixed = registers((rows * run,))
        order = [index % rows * run + index // rows for index in range(rows * run)]
        T.buffer_store(mixed, T.Shuffle(lines, order), [T.Ramp(0, 1, rows * run)])
        with T.vectorized(0, rows * run) as index:
            interleaved.store(batch, row, column + v * run, index, mixed[index])


def product_function(
    name: str,
    extents: Extents,
    streaming: Side,
    blocking: Blocking,
    arguments: Sequence[Argument],
    body: Callable[..., Access],
    info: KernelInfo,
    by_row: bool = False,
    micro_kernel: MicroKernel = FP32,
) -> T.PrimFunc:
    """Builds the kernel.

    Args:
        name: Name of the function.
        extents: The extents; the depth counts elements of panels.
        streaming: The operand that streams: `left` or `right`.
        blocking: Its register tile, blocks and chunks.
        arguments: All tensors, the result last.
        body: Gets one buffer per argument.
        info: Facts of the operator and its epilogue.
        by_row: Whether the returned access has `rows`, because packing goes along the rows of the left operand
            (`stream_rows`) and not across them.
        micro_kernel: The micro-kernel.
    """
    count, others = panels(extents, streaming, blocking.tile)
    blocks, per_split = ceil_div(count, blocking.slots), ceil_div(others, blocking.splits)
    # A row that one panel reads is read once, so that packing it would be a pass of its own.
    in_place = by_row and others == 1 and micro_kernel.terms == 1

    def operands_of(product: BlockedProduct, block: Block, b: T.Index, workspace: ThreadWorkspace | None) -> Operands:
        if streaming == "right":
            return product.streaming_b(block)
        if in_place:
            return product.rows_in_place(block)
        shape, dtype = product.block_shape, micro_kernel.a.dtype
        packed = T.alloc_buffer(shape, dtype) if workspace is None else workspace.buffers[0]
        # A task of the same thread may have packed this block for another part of the right operand.
        with nullcontext() if workspace is None else workspace.fill_once(b):
            product.pack_block(block, packed)
        return product.packed_block(block, packed)

    def do(product: BlockedProduct, task: T.Index, workspace: ThreadWorkspace | None) -> None:
        b = T.Bind(task // (blocks * blocking.splits))
        first = T.Bind(task // blocking.splits % blocks * blocking.slots)
        first_other = T.Bind(task % blocking.splits * per_split)
        slots, parts = tail_extent(blocking.slots, count, first), tail_extent(per_split, others, first_other)
        if streaming == "left":
            block, most_panels = Block(b, first, slots, first_other, parts), blocking.slots
        else:
            block, most_panels = Block(b, first_other, parts, first, slots), per_split
        operands = operands_of(product, block, task // blocking.splits, workspace)
        with micro_kernel.setup():
            product.multiply(block, most_panels, operands)

    def emit(*buffers: T.Buffer) -> None:
        product = BlockedProduct(extents, blocking, body(*buffers), micro_kernel)
        tasks = extents.batch * blocks * blocking.splits
        with micro_kernel.imported():
            shape = product.block_shape
            if streaming == "right" or in_place or 4 * math.prod(shape) < _WORTH_STORING:
                with T.parallel(0, tasks) as task:
                    do(product, task, None)
            else:
                with parallel_with_workspace(tasks, micro_kernel.a.dtype, shape) as (task, workspace):
                    do(product, task, workspace)

    tile, depth = blocking.tile, extents.depth * micro_kernel.terms
    sizes = {"batch": extents.batch, "rows": extents.rows, "depth": depth, "columns": extents.columns}
    parts = {"slots": blocking.slots, "splits": blocking.splits}
    info = replace(
        info,
        algorithm=PRODUCT,
        extents=sizes,
        tile={"rows": tile.rows, "columns": tile.columns},
        decisions={"streaming": streaming, "read": "in place" if in_place else "packed", **parts},
        flop=2 * math.prod(sizes.values()),
    )
    return prim_func(name, arguments, emit, info)
