"""Packs the operands of products into panels, when the model is loaded or as the tasks read them.

A panel of A has as many rows as the register tile, a panel of B as many columns. Operands are read through index
functions, so that transposed operands and convolutions need no copy in memory.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import HELPER, Argument, prim_func, registers
from harness.compiler.schedules.cpu.blocking import Extents, Side, packed_shape
from harness.compiler.schedules.cpu.emit import for_each_vector
from harness.compiler.schedules.cpu.microkernels.fp32 import FP32
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel
from harness.compiler.schedules.cpu.tile import Tile

Read = Callable[[T.Index, T.Index, T.Index], T.Expr]
"""Takes batch, row or column, and k, and returns an element."""
PanelRead = Callable[[T.Index, T.Index, T.Index, T.Index], T.TensorLoad]
"""Takes batch, panel, k, and row or column within the panel, and returns an element of the packed operand."""
Put = Callable[[T.Index, T.Index, T.Expr], None]
"""(element counted from the first one, row or column within the panel, value): emits the store of an element."""
Fill = Callable[[Put, T.Index, T.Index], None]
"""(where to store, first element, number of elements): emits the packing of a part of one panel."""
Pack = Callable[[T.Index, T.Index], Fill]
"""Takes batch and first row or column, emits the common work of a panel's parts, and returns a function that packs a
part."""


def pack_function(
    side: Side,
    source: Argument,
    batch: int,
    width: int,
    depth: int,
    tile: Tile,
    read: Callable[[T.Buffer], Read],
    micro_kernel: MicroKernel = FP32,
    chunk: int | None = None,
) -> T.PrimFunc:
    """Builds the function that packs a resident operand into panels, with zeros beyond its edge.

    Panels of A that lie row by row are [batch, panel, row, depth]. Elements that are scaled are followed by their
    scales, chunk by chunk, and are of B.

    Args:
        side: The operand: `left` (packed A) or `right` (packed B).
        source: The operand.
        batch: Its matrices.
        width: Its rows, of a left one, or its columns.
        depth: Elements of the depth.
        tile: The register tile.
        read: Buffer of the operand → how an element of a panel is read.
        micro_kernel: The micro-kernel of the product.
        chunk: Elements of a chunk, if they are scaled.
    """
    packed_format = micro_kernel.a if side == "left" else micro_kernel.b
    row_major, scale = packed_format.row_major, packed_format.scale
    assert scale is None or (chunk is not None and side == "right")
    split = next(n for n in (8, 4, 2, 1) if depth % n == 0) if scale is None else depth // (chunk or depth)
    part = depth // split
    stored = micro_kernel.b.stored(part, part)
    batch, panels, numbers, panel = packed_shape(side, batch, width, split * stored, tile)
    shape = (batch, panels, panel, numbers) if row_major else (batch, panels, numbers, panel)

    def body(data: T.Buffer, packed: T.Buffer) -> None:
        element = read(data)
        with T.parallel(0, batch * panels * split) as task:
            b = task // (panels * split)
            p = task // split % panels
            first, begin = task % split * part, task % split * stored
            with T.serial(0, part) as step, T.serial(0, panel) as i:
                index = p * panel + i
                value = element(b, index, first + step)
                if width % panel:
                    value = T.if_then_else(index < width, value, T.const(0, micro_kernel.dtype))
                T.buffer_store(packed, value, (b, p, i, begin + step) if row_major else (b, p, begin + step, i))
            if scale is not None:
                scale(packed, lambda k, j: (b, p, begin + k, j), part, panel, tile.lanes)

    return prim_func("pack", [source, Argument("packed", shape, micro_kernel.dtype)], body, HELPER)


def stream(read: Read, width: int, panel: int, lanes: int) -> Pack:
    """Packs a panel element by element; the last one repeats the last row or column instead of leaving the operand."""

    def pack(b: T.Index, first: T.Index) -> Fill:
        def fill(put: Put, start: T.Index, count: T.Index) -> None:
            def copy() -> None:
                with T.serial(0, count) as k:
                    for_each_vector(panel, lanes, lambda i: put(k, i, read(b, first + i, start + k)))

            if width % panel == 0:
                copy()
                return
            with T.If(first + panel <= width):
                with T.Then():
                    copy()
                with T.Else(), T.serial(0, count) as k, T.serial(0, panel) as i:
                    put(k, i, read(b, T.min(first + i, width - 1), start + k))

        return fill

    return pack


def stream_rows(
    element: Callable[[T.Index], T.Expr],
    starts: Callable[[T.Index, T.Index], T.Index],
    extents: Extents,
    tile: Tile,
) -> Pack:
    """Packs rows that are runs of memory, each as it lies; the last one is repeated beyond the edge.

    The innermost loop reads one element of a row at a time, from anywhere, so that nothing has to be transposed.

    Args:
        element: Place in the operand, one contiguous line → element of a panel.
        starts: (batch, row) → where it begins.
        extents: The extents.
        tile: The register tile.
    """

    def pack(b: T.Index, first: T.Index) -> Fill:
        begin = registers((tile.rows,), "int32")
        for i in range(tile.rows):
            row = first + i if extents.rows % tile.rows == 0 else T.min(first + i, extents.rows - 1)
            T.buffer_store(begin, starts(b, row), [i])

        def fill(put: Put, start: T.Index, count: T.Index) -> None:
            for i in range(tile.rows):

                def move(k: T.Index, i: int = i) -> None:
                    put(k, i, element(begin[i] + start + k))

                for_each_vector(count, tile.lanes, move)

        return fill

    return pack
