"""Multiplies whole panels in memory by functions of LLVM IR."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.compiler import tir as T
from harness.compiler.schedules.cpu.emit import prefetch
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel, PanelProduct
from harness.compiler.schedules.cpu.tile import Tile, VectorUnit


def smallest_tile(shapes: Sequence[tuple[int, int]]) -> Callable[[VectorUnit, int, int], Tile]:
    """Returns the choice of the smallest panels that have all rows of a product, otherwise of the largest.

    Args:
        shapes: Rows of A's panels and columns of B's, the largest first.
    """

    def choose(unit: VectorUnit, rows: int, columns: int) -> Tile:
        fitting = [shape for shape in shapes if shape[0] >= rows]
        return Tile(*(fitting[-1] if fitting else shapes[0]), unit.lanes)

    return choose


def head_of_function(function: str, rows: int, columns: int) -> str:
    """Returns the first line of the LLVM IR of a function that `call_function` calls for such panels."""
    arguments = "ptr %sums, ptr %left, ptr %right, i64 %row, i32 %steps, i32 %added"
    return f"define linkonce_odr i32 @{function}_{rows}x{columns}({arguments}) {{"


def call_function(function: str, *, fetches_a: bool = False) -> Callable[[MicroKernel, PanelProduct], None]:
    """Returns the emission of calls of functions that multiply whole panels in memory, the one of A row by row.

    A function gets the addresses of its sums and of both panels, the bytes from one row of A to the next, the steps of
    the depth, of `multiple` elements each, and whether there are sums yet: it adds the product to them, or makes them.
    The next chunk of B is always prefetched, into the second cache.

    Args:
        function: Name of the functions (`head_of_function`).
        fetches_a: Whether the next panel of A is prefetched, for panels so small that the first cache holds two.
    """

    def emit(kernel: MicroKernel, product: PanelProduct) -> None:
        tile, a, b, sums = product.tile, product.a, product.b, product.sums
        p, first = product.p, product.first
        if fetches_a:
            a.fetch(p, first, None)
        b.fetch(p, first, None)
        operands = sums.buffer[sums.index(p, 0, 0, 0)], a.number(p, first, 0, 0), b.element(first, 0, 0)
        # TVM would make the buffer smaller if it saw less of it being used.
        last = sums.index(p, tile.rows - 1, tile.columns - 1, tile.size - 1)
        prefetch(sums.buffer[last], write=True)
        addresses = [T.address_of(element) for element in operands]
        stride = a.stride or kernel.a.stored(product.chunk, product.chunk)
        row, added = T.const(stride * kernel.a.number_bytes, "int64"), T.Cast("int32", product.added)
        name = f"{function}_{tile.rows}x{tile.columns}"
        T.evaluate(T.call_extern("int32", name, *addresses, row, product.count // kernel.multiple, added))

    return emit
