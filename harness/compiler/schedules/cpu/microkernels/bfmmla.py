"""Multiplies four bfloat16 terms at a time with Arm's `bfmmla`, which multiplies two rows by two columns.

A register holds four terms of two rows of the left operand, or of two columns of the right one; the instruction adds
the four products of rows and columns to four sums, two of each row. That is four times the work of an fp32
multiply-add, and twice that of `bfdot`, on processors that start as many of them.

An element of a panel is four terms, 64 bits: term k in the lowest bits, then those of the second, third and last
quarter of the depth. So two neighbours in a row of a right panel are a register, and so are elements of two
neighbouring rows of a left one, which lie along its depth (`stream_rows`).

Terms are added in two pairs, the first two of an element and the last two, each as `bfdot` adds a pair: both products,
then the sum, each rounded to odd, with zero for denormal numbers (Arm's manual, BFMatMulAdd).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import fp32, registers
from harness.compiler.schedules.cpu.bf16 import BF16, pair_bits
from harness.compiler.schedules.cpu.microkernels.bf16 import function_of
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel, PanelFormat, PanelProduct
from harness.compiler.schedules.cpu.tile import smallest_tile

TERMS = 4
"""Terms of an element."""
_SHAPES = ((8, 12), (4, 16), (2, 16))
"""Rows and columns of panels: sums, two rows of the left one each and two columns of the right one fit 32 registers."""
LEAST_ROWS = 2
"""A product of one row has half of its sums for nothing."""
_LONGEST = 256
"""Elements of the depth that all left panels share: 24 KB of a right panel, which the first cache holds."""
_MULTIPLY_ADD = "multiply_add_bf16_rows_and_columns"
_SWAPPED = [0, 1, 4, 5], [2, 3, 6, 7]
"""Lanes of two registers: four columns of two rows become two columns of both rows, twice, and the other way round."""


def _encode(terms: Sequence[T.Expr]) -> T.Expr:
    low, high = (pair_bits(terms[n], terms[n + 1]) for n in (0, 2))
    shifted = T.shift_left(T.Cast("uint64", high), T.const(32, "uint64"))
    return T.reinterpret("int64", T.bitwise_or(T.Cast("uint64", low), shifted))


def _multiply(kernel: MicroKernel, product: PanelProduct) -> None:
    """Emits a product whose sums stay in registers during a chunk of the depth, each two columns of two rows."""
    tile, sums, p, first = product.tile, product.sums, product.p, product.first
    whole, squares = T.Ramp(0, 1, 4), dict[tuple[int, int], T.Buffer]()
    product.b.fetch(p, first, None)
    for i, j in itertools.product(range(0, tile.rows, 2), range(0, tile.columns, 2)):
        squares[i, j] = registers((4,))
        T.buffer_store(squares[i, j], T.Broadcast(fp32(0.0), 4), [whole])
    pairs = [(i, j) for i, j in squares if j % 4 == 0]
    with T.If(product.added), T.Then():
        for i, j in pairs:
            lines = [sums.buffer[sums.vector(p, i + n, j, tile, 4)] for n in range(2)]
            for n, lanes in enumerate(_SWAPPED):
                T.buffer_store(squares[i, j + 2 * n], T.Shuffle(lines, lanes), [whole])
    with T.serial(0, product.count) as k:
        for (i, j), square in squares.items():
            left = T.Shuffle([product.a.number(p, first, k, i + n) for n in range(2)], [0, 1])
            right = product.b.element(first, k, T.Ramp(j, 1, 2))
            T.buffer_store(square, T.call_extern("float32x4", _MULTIPLY_ADD, square[whole], left, right), [whole])
    for i, j in pairs:
        both = [squares[i, j + 2 * n][whole] for n in range(2)]
        for n, lanes in enumerate(_SWAPPED):
            T.buffer_store(sums.buffer, T.Shuffle(both, lanes), sums.vector(p, i + n, j, tile, 4))


BFMMLA = MicroKernel(
    name="bf16_bfmmla",
    multiplies=BF16,
    a=PanelFormat("int64", TERMS, _encode, row_major=True),
    b=PanelFormat("int64", TERMS, _encode),
    emit=_multiply,
    source=function_of(_MULTIPLY_ADD, "llvm.aarch64.neon.bfmmla", 4, "<2 x i64>"),
    choose_tile=smallest_tile(_SHAPES),
    least_rows=LEAST_ROWS,
    longest=_LONGEST,
)
"""Products with the instruction, which is part of the feature that has `bfdot`."""
