"""Multiplies panels of A with one panel of B: the loops around the micro-kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import ceil_div, fp32
from harness.compiler.schedules.cpu.emit import each_vector
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel, PanelProduct
from harness.compiler.schedules.cpu.tile import Tile


@dataclass(frozen=True)
class PanelsOfA:
    """Panels of A that are multiplied with one panel of B.

    Attributes:
        count: Number of panels.
        number: (panel, first element of the chunk, number of the chunk, row of the tile) → number of a panel.
        stride: Numbers from one row of a panel to the next, where the micro-kernel reads it row by row; those that are
            stored for a chunk if None.
        fetch: (panel, first element of the chunk, element counted from it): emits the prefetches of a step.
        fetch_next: (panel, first element of the chunk): emits the prefetch of the next panel.
    """

    count: T.Index
    number: Callable[[T.Index, T.Index, T.Index, int], T.Expr]
    stride: int | None = None
    fetch: Callable[[T.Index, T.Index, T.Index], None] = lambda p, first, k: None
    fetch_next: Callable[[T.Index, T.Index], None] = lambda p, first: None


@dataclass(frozen=True)
class PanelOfB:
    """The panel of B.

    Attributes:
        element: (first element of the chunk, element counted from it, column of the tile) → element; contiguous in the
            column.
        prepare: (first element, number of elements): emits the preparation of a chunk.
        fetch: (panel of A, first element of the chunk, element counted from it): emits the prefetches of a step.
        fetch_next: (panel of A, first element of the chunk): emits the prefetch of a share of the next chunk.
    """

    element: Callable[[T.Index, T.Index, T.Index], T.Expr]
    prepare: Callable[[T.Index, T.Index], None] = lambda first, count: None
    fetch: Callable[[T.Index, T.Index, T.Index], None] = lambda p, first, k: None
    fetch_next: Callable[[T.Index, T.Index], None] = lambda p, first: None


@dataclass(frozen=True)
class Sums:
    """The memory that gets the products, and the steps after the last chunk of a panel's sums.

    Attributes:
        buffer: [at least panels, rows · columns], or of another shape.
        place: (panel, row, column of the tile) → index into another shape; contiguous in the column, and in rows, too,
            where the micro-kernel multiplies whole panels.
        finish: Takes a panel and emits the use of its sums; None if they are used later.
        fetch: (panel, element of the last chunk, its elements): emits prefetches of the memory that `finish` touches.
    """

    buffer: T.Buffer
    place: Callable[[T.Index, T.Index, T.Index], Sequence[T.Index]] | None = None
    finish: Callable[[T.Index], None] | None = None
    fetch: Callable[[T.Index, T.Index, int], None] = lambda p, k, count: None

    def index(self, p: T.Index, i: T.Index, j: T.Index, position: T.Index) -> Sequence[T.Index]:
        """Returns the index of a sum of panel p: of row i and column j, which have that position in the tile."""
        return (p, position) if self.place is None else self.place(p, i, j)


def multiply_panels(
    kernel: MicroKernel,
    tile: Tile,
    depth: T.Index,
    a: PanelsOfA,
    b: PanelOfB,
    sums: Sums,
    chunk: int | None = None,
) -> None:
    """Emits sums[p] = panel p of A · panel of B for all panels of A.

    The sums are cut into chunks, and a chunk is done for all panels of A before the next: the part of B's panel stays
    in the first-level cache meanwhile, and LLVM cannot promote the sums to registers that it would have to spill.

    Args:
        kernel: The micro-kernel.
        tile: Rows and columns of the panels.
        depth: Elements of the depth; where the number is not constant, a multiple of `chunk`.
        a: The panels of A.
        b: The panel of B.
        sums: Get the products.
        chunk: Elements of a chunk, if not those that the micro-kernel chooses.
    """
    if chunk is None:
        assert isinstance(depth, int)
        chunk = kernel.chunk(depth)
    if kernel.clears:
        with T.serial(0, a.count) as p:
            _clear(tile, sums, p)
    chunks = ceil_div(depth, chunk)
    if sums.finish is None:
        whole = not isinstance(depth, int) or depth % chunk == 0
        with T.serial(0, chunks) as c:
            _multiply_chunk(kernel, tile, a, b, sums, chunk, c, chunk if whole else T.min(chunk, depth - c * chunk))
        return
    assert isinstance(chunks, int)
    if chunks > 1:
        with T.serial(0, chunks - 1) as c:
            _multiply_chunk(kernel, tile, a, b, sums, chunk, c, chunk)
    _multiply_chunk(kernel, tile, a, b, sums, chunk, chunks - 1, depth - (chunks - 1) * chunk, last=True)


def _clear(tile: Tile, sums: Sums, p: T.Index) -> None:
    each_vector(tile, lambda i, j, position: T.buffer_store(sums.buffer, fp32(0.0), sums.index(p, i, j, position)))


def _multiply_chunk(
    kernel: MicroKernel,
    tile: Tile,
    a: PanelsOfA,
    b: PanelOfB,
    sums: Sums,
    chunk: int,
    c: T.Index,
    count: T.Index,
    *,
    last: bool = False,
) -> None:
    """Emits the products of all panels with chunk c of the depth, of so many elements."""
    first = c * chunk
    b.prepare(first, count)
    with T.serial(0, a.count) as p:

        def fetch(k: T.Index) -> None:
            a.fetch(p, first, k)
            b.fetch(p, first, k)
            if last and isinstance(count, int):
                sums.fetch(p, k, count)

        kernel.emit(
            PanelProduct(
                tile,
                chunk,
                count,
                a=lambda k, i: a.number(p, first, k, i),
                b=lambda k, j: b.element(first, k, j),
                sums=sums.buffer,
                place=lambda i, j, position: sums.index(p, i, j, position),
                added=T.const(c > 0, "bool") if isinstance(c, int) else c > 0,
                row_bytes=(a.stride or kernel.a.stored(chunk, chunk)) * kernel.a.number_bytes,
                fetch=fetch,
                fetch_a=lambda: a.fetch_next(p, first),
                fetch_b=lambda: b.fetch_next(p, first),
            )
        )
        if last and sums.finish is not None:
            sums.finish(p)
