"""Multiplies panels of A with one panel of B: the loops around the micro-kernel."""

from __future__ import annotations

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import ceil_div, fp32
from harness.compiler.schedules.cpu.emit import each_vector
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel, PanelOfB, PanelProduct, PanelsOfA, Sums
from harness.compiler.schedules.cpu.tile import Tile


def multiply_panels(
    micro_kernel: MicroKernel,
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
        micro_kernel: The micro-kernel.
        tile: Rows and columns of the panels.
        depth: Elements of the depth; where the number is not constant, a multiple of `chunk`.
        a: The panels of A.
        b: The panel of B.
        sums: Get the products.
        chunk: Elements of a chunk, if not those that the micro-kernel chooses.
    """
    if chunk is None:
        assert isinstance(depth, int)
        chunk = micro_kernel.chunk(depth)

    def multiply_chunk(c: T.Index, count: T.Index, *, last: bool = False) -> None:
        added = T.const(c > 0, "bool") if isinstance(c, int) else c > 0
        b.prepare(c * chunk, count)
        with T.serial(0, a.count) as p:
            micro_kernel.emit(micro_kernel, PanelProduct(tile, a, b, sums, p, c * chunk, chunk, count, added, last))
            if last and sums.finish is not None:
                sums.finish(p)

    if micro_kernel.clears:
        with T.serial(0, a.count) as p:
            _clear(tile, sums, p)
    chunks = ceil_div(depth, chunk)
    if sums.finish is None:
        whole = not isinstance(depth, int) or depth % chunk == 0
        with T.serial(0, chunks) as c:
            multiply_chunk(c, chunk if whole else T.min(chunk, depth - c * chunk))
        return
    assert isinstance(depth, int)
    others = ceil_div(depth, chunk) - 1
    if others:
        with T.serial(0, others) as c:
            multiply_chunk(c, chunk)
    multiply_chunk(others, depth - others * chunk, last=True)


def _clear(tile: Tile, sums: Sums, p: T.Index) -> None:
    each_vector(tile, lambda i, j, position: T.buffer_store(sums.buffer, fp32(0.0), sums.index(p, i, j, position)))
