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
from collections.abc import Callable
from dataclasses import dataclass, replace

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import ceil_div, registers, tail_extent, view
from harness.compiler.schedules.cpu.blocking import Blocking, Extents
from harness.compiler.schedules.cpu.emit import LINE, for_each_vector, further, prefetch, spread
from harness.compiler.schedules.cpu.epilogue import Store, Touched
from harness.compiler.schedules.cpu.microkernels.fp32 import FP32
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel, PanelOfB, PanelsOfA, Sums
from harness.compiler.schedules.cpu.packing import Pack, PanelRead, Read


@dataclass(frozen=True)
class Interleaved:
    """Rows whose columns alternate in the result.

    Attributes:
        rows: So many rows, of a tile whose rows are a multiple of them.
        run: Columns that lie in one run of the result: a divisor of those of a tile, and of all.
    """

    rows: int
    run: int


@dataclass(frozen=True)
class Access:
    """The access of a kernel to its operands and its result.

    Attributes:
        pack: Packs the streaming operand.
        packed: Reads the packed resident operand.
        store: Emits the store of one element; may be vectorized over columns. Where rows are interleaved, a column is a
            pair: the first column, and the number of the element counted from there.
        touched: Returns the elements of memory that the store writes (the first) and reads, whose neighbours belong to
            the neighbouring columns.
        interleaved: The rows that alternate in the result; None if each is stored by itself.
    """

    pack: Pack
    packed: PanelRead
    store: Store
    touched: Touched = lambda b, i, j: []
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
        by_row: Whether the streaming operand is A and packed along its rows (`stream_rows`), not across them.
    """

    extents: Extents
    blocking: Blocking
    access: Access
    micro_kernel: MicroKernel = FP32
    by_row: bool = False

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Returns the shape of a packed block of A: [chunk, panel, number, row], or with rows before their numbers.

        The order is chunk by chunk, the order of reading, so that the processor prefetches past all panels of a chunk.
        """
        rows, numbers = self.blocking.tile.rows, self._numbers
        panel = (rows, numbers) if self.by_row else (numbers, rows)
        return (ceil_div(self.extents.depth, self.blocking.chunk), self.blocking.slots, *panel)

    @property
    def _numbers(self) -> int:
        """Returns the stored numbers of a row of A in a chunk of the depth."""
        return self.micro_kernel.a.stored(self.blocking.chunk, self.blocking.chunk)

    def _place(self, c: T.Index, slot: T.Index, number: T.Index, i: T.Index) -> tuple[T.Index, ...]:
        """Returns the place of a number of row i in a packed block of A."""
        return (c, slot, i, number) if self.by_row else (c, slot, number, i)

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
                    prefetch(further(begin, index // tile.columns, index % tile.columns), level=2)

                if k is not None:
                    fetch((p * chunk + k) * share)
                    return
                with T.serial(0, lines) as n:
                    fetch((p * lines + n) * LINE)

            return PanelsOfA(block.count_a, number, fetch=fetch_a), replace(self._resident_b(block, r), fetch=fetch_b)

        return operands

    def rows_in_place(self, block: Block, read: Read) -> Operands:
        """Returns the operands of a task that reads the terms of A where they lie."""
        rows = self.blocking.tile.rows

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
            self.micro_kernel.multiply_panels(tile, self.extents.depth, a, b, written, self.blocking.chunk)

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
                    self._interleave(interleaved, sums, p, i, width, (block.batch, row + i, column))

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
        self,
        interleaved: Interleaved,
        sums: T.Buffer,
        p: T.Index,
        i: T.Index,
        width: int,
        place: tuple[T.Index, T.Index, T.Index],
    ) -> None:
        """Emits the store of some rows of a register tile, element by element of the first, the second and so on.

        Args:
            interleaved: The rows.
            sums: [panel, rows · columns].
            p: The panel.
            i: The first row, counted in the panel.
            width: Columns that are stored.
            place: Batch, row and column of the first element.
        """
        rows, run = interleaved.rows, interleaved.run
        batch, row, column = place
        with T.serial(0, width // run) as v:
            begins = [(i + n) * self.blocking.tile.columns + v * run for n in range(rows)]
            lines = [sums[p, T.Ramp(begin, 1, run)] for begin in begins]
            mixed = registers((rows * run,))
            order = [index % rows * run + index // rows for index in range(rows * run)]
            T.buffer_store(mixed, T.Shuffle(lines, order), [T.Ramp(0, 1, rows * run)])
            with T.vectorized(0, rows * run) as index:
                first = column + v * run
                self.access.store(batch, row, (first, index), mixed[index])  # type: ignore[arg-type]
