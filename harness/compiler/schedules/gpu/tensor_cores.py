"""Multiplies half-precision operands on NVIDIA's tensor cores: fragments of 16 × 16 per warp, sums in fp32.

Tiles of the operands have the layout of memory in shared memory, [row, term] or [term, row], because a warp can load
its fragments from either. Each warp computes a few fragments of the block's tile; when all terms are done, it writes
one fragment after the other to shared memory, where its threads apply the epilogue and store the results. Beyond the
edges, a tile reads zeros and is not stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import ceil_div
from harness.compiler.schedules.gpu.capabilities import TENSOR_CORES, has
from harness.compiler.schedules.gpu.contraction import Contraction, Group, stored
from harness.compiler.schedules.gpu.staging import Result, Stage, launch_tiles, operand
from harness.compiler.schedules.gpu.threads import MULTIPROCESSORS, WARP, barrier

_SIDE = 16
"""Rows, columns and terms of a fragment (CUDA Programming Guide, element types and matrix sizes of warp matrices)."""

_HALVES = {"float16", "bfloat16"}

_PADDING = 8
"""Elements between two lines of a shared tile, which put eight lines that are read at once into different banks."""


@dataclass(frozen=True)
class WarpTile:
    """The tile of a block, in fragments.

    Attributes:
        rows, columns: Fragments of a warp.
        down, across: Warps.
        rate: Share of the peak, relative to the largest tile: a warp loads rows + columns fragments for each
            rows · columns products.
    """

    rows: int
    columns: int
    down: int
    across: int
    rate: float

    slab = 2 * _SIDE

    @property
    def height(self) -> int:
        """Returns the number of rows of the tile."""
        return self.rows * self.down * _SIDE

    @property
    def width(self) -> int:
        """Returns the number of columns of the tile."""
        return self.columns * self.across * _SIDE

    @property
    def threads(self) -> int:
        """Returns the number of threads of a block."""
        return self.down * self.across * WARP


TILES = (WarpTile(4, 2, 2, 4, rate=1.0), WarpTile(2, 2, 2, 2, rate=0.6))
"""128 × 128 with 8 warps; 64 × 64 with 4, for small products."""


def fits(contraction: Contraction, target: tvm.target.Target) -> bool:
    """Returns whether tensor cores exist and pay: operands of one half type, at least two fragments in each extent."""
    types = {str(stored(side).ty) for side in (contraction.left, contraction.right)}
    extents = (contraction.rows.size, contraction.columns.size, contraction.terms.size)
    return has(target, TENSOR_CORES) and len(types) == 1 and types <= _HALVES and min(extents) >= 2 * _SIDE


def choose_warp_tile(batch: int, rows: int, columns: int) -> WarpTile:
    """Chooses the tile with the least work for the busiest multiprocessor."""

    def cost(tile: WarpTile) -> float:
        blocks = batch * ceil_div(rows, tile.height) * ceil_div(columns, tile.width)
        return max(1.0, blocks / MULTIPROCESSORS) * tile.height * tile.width / tile.rate

    return min(TILES, key=cost)


def emit(contraction: Contraction, tile: WarpTile) -> None:
    """Emits the body of a kernel."""
    rows, columns, terms = contraction.rows, contraction.columns, contraction.terms
    left, right = (
        _stage(side, along, span, contraction, tile)
        for side, along, span in (
            (contraction.left, rows, tile.height),
            (contraction.right, columns, tile.width),
        )
    )
    half = left.dtype
    with launch_tiles(contraction, tile.height, tile.width, tile.threads) as (b, first, thread):
        warp, lane = thread // WARP, thread % WARP
        down, across = warp // tile.across * tile.rows * _SIDE, warp % tile.across * tile.columns * _SIDE
        shared = [T.alloc_buffer((stage.size,), half, scope="shared") for stage in (left, right)]
        written = T.alloc_buffer((tile.down * tile.across * _SIDE * _SIDE,), "float32", scope="shared")
        loaded = [T.alloc_buffer((s.registers,), s.operand.dtype, scope="local") for s in (left, right)]
        a = T.alloc_buffer((tile.rows * _SIDE * _SIDE,), half, scope="wmma.matrix_a")
        c = T.alloc_buffer((tile.columns * _SIDE * _SIDE,), half, scope="wmma.matrix_b")
        sums = T.alloc_buffer((tile.rows * tile.columns * _SIDE * _SIDE,), "float32", scope="wmma.accumulator")
        size = (_SIDE, _SIDE, _SIDE)

        def fetch(start: T.Index) -> None:
            for stage, begin, registers in zip((left, right), first, loaded, strict=True):
                stage.fetch(b, begin, start, thread, registers)

        # TVM would put what is used only at the end in place of the tiles, which are of another type.
        T.buffer_store(written, T.const(0.0, "float32"), [thread])
        with T.unroll(tile.rows * tile.columns) as n:
            T.evaluate(T.tvm_fill_fragment(sums.data, *size, n, T.const(0.0, "float32")))
        fetch(T.const(0, "int32"))
        with T.serial(ceil_div(terms.size, tile.slab)) as slab:
            barrier()
            for stage, registers, buffer in zip((left, right), loaded, shared, strict=True):
                stage.put(thread, registers, buffer)
            barrier()
            fetch((slab + 1) * tile.slab)
            with T.unroll(tile.slab // _SIDE) as step:
                for fragments, count, stage, buffer, origin, layouts in (
                    (a, tile.rows, left, shared[0], down, ("row_major", "col_major")),
                    (c, tile.columns, right, shared[1], across, ("col_major", "row_major")),
                ):
                    with T.unroll(count) as n:
                        place = stage.place(origin + n * _SIDE, step * _SIDE)
                        pointer = buffer.access_ptr("r", ptr_type=half, offset=place)
                        layout = layouts[stage.by_term]
                        T.evaluate(T.tvm_load_matrix_sync(fragments.data, *size, n, pointer, stage.pitch, layout))
                with T.unroll(tile.rows) as i, T.unroll(tile.columns) as j:
                    place = i * tile.columns + j
                    T.evaluate(T.tvm_mma_sync(sums.data, place, a.data, i, c.data, j, sums.data, place))
        result = Result(contraction)
        lanes = 4
        registers = result.registers(lanes)
        lines = WARP * lanes // _SIDE  # of a fragment, stored at once
        with T.unroll(tile.rows) as i, T.unroll(tile.columns) as j:
            pointer = written.access_ptr("w", ptr_type="float32", offset=warp * _SIDE * _SIDE)
            T.evaluate(T.tvm_store_matrix_sync(sums.data, *size, i * tile.columns + j, pointer, _SIDE, "row_major"))
            barrier()
            with T.serial(_SIDE // lines) as part:
                row, column = part * lines + lane // (_SIDE // lanes), lane % (_SIDE // lanes) * lanes
                origin = warp * _SIDE * _SIDE + row * _SIDE + column
                result.store(
                    b,
                    first[0] + down + i * _SIDE + row,
                    first[1] + across + j * _SIDE + column,
                    lanes,
                    lambda k: written[origin + k],
                    registers,
                )
            barrier()


def _stage(side: T.Expr, along: Group, span: int, contraction: Contraction, tile: WarpTile) -> Stage:
    loaded = operand(side, contraction.batch, along, contraction.terms)
    by_term = not loaded.along_terms
    pitch = (span if by_term else tile.slab) + _PADDING
    return Stage(loaded, span, tile.slab, tile.threads, by_term, pitch, loaded.dtype)
