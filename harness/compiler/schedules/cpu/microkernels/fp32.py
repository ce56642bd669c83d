"""Multiplies elements one by one with sums in vector registers, and fp32 numbers in particular."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import fp32, registers
from harness.compiler.schedules.cpu.emit import each_vector
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel, PanelFormat, PanelProduct, Step
from harness.compiler.schedules.cpu.tile import Tile


def multiply(
    step: Step,
    tile: Tile,
    count: T.Index,
    a: Callable[[T.Index, int], Sequence[T.Expr]],
    b: Callable[[T.Index, T.Index], T.TensorLoad],
    fetch: Callable[[T.Index], None] = lambda k: None,
) -> list[T.Buffer]:
    """Emits a part of the product of one register tile and returns its rows.

    Args:
        step: Emits the product of one element of the depth.
        tile: The shape of the tile; all of it stays in registers.
        count: Elements of the depth.
        a: (k, row of the tile) → numbers of an element of A.
        b: (k, column of the tile) → element of B; contiguous in the column.
        fetch: Takes k and emits the prefetches of its step.
    """
    rows = [registers((tile.columns,)) for _ in range(tile.rows)]
    each_vector(tile, lambda i, j, index: T.buffer_store(rows[i], fp32(0.0), [j]))
    with T.serial(0, count) as k:
        step(tile, rows, lambda i: a(k, i), lambda j: b(k, j))
        fetch(k)
    return rows


def in_registers(kernel: MicroKernel, product: PanelProduct) -> None:
    """Emits a product whose sums stay in registers during a chunk of the depth."""
    a, b, sums = product.a, product.b, product.sums
    p, first, count = product.p, product.first, product.count

    def numbers(k: T.Index, i: int) -> Sequence[T.Expr]:
        return [a.number(p, first, k + n * product.chunk, i) for n in range(kernel.a.numbers)]

    def fetch(k: T.Index) -> None:
        a.fetch(p, first, k)
        b.fetch(p, first, k)
        if product.last and isinstance(count, int):
            sums.fetch(p, k, count)

    def add(i: int, j: T.Index, position: T.Index) -> None:
        index = sums.index(p, i, j, position)
        T.buffer_store(sums.buffer, sums.buffer[index] + rows[i][j], index)

    assert kernel.step is not None
    rows = multiply(kernel.step, product.tile, count, numbers, lambda k, j: b.element(first, k, j), fetch)
    each_vector(product.tile, add)


def _multiply_add(
    tile: Tile,
    rows: Sequence[T.Buffer],
    a: Callable[[int], Sequence[T.Expr]],
    b: Callable[[T.Index], T.Expr],
) -> None:
    each_vector(tile, lambda i, j, index: T.buffer_store(rows[i], rows[i][j] + a(i)[0] * b(j), [j]))


_NUMBERS = PanelFormat("float32", 1, lambda terms: terms[0])
FP32 = MicroKernel(
    name="",
    multiplies="float32",
    a=_NUMBERS,
    b=_NUMBERS,
    emit=in_registers,
    step=_multiply_add,
)
"""Products of fp32 numbers, summed in fp32."""
