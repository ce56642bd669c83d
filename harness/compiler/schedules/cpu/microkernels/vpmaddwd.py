"""Multiplies bfloat16 pairs as integers, on x86 processors without an instruction for bfloat16.

A pair of 16-bit integers takes the place of a pair of fp32 numbers: `vpmaddwd` multiplies and adds twice as many terms
as an fp32 multiply-add, and processors with AVX-512 VNNI or AVX-VNNI add that to the sum in the same instruction
(`vpdpwssd`, which LLVM puts in the place of both).

This is block floating point. Operands are rounded to bfloat16 and packed in pairs, as
`harness.compiler.schedules.cpu.bf16` says. Then the terms of a row of the left operand, or of a column of the right
one, in a chunk of the depth become integers that share one scale in fp32: the largest becomes the largest integer for
which no sum of the chunk can leave 32 bits. For 128 terms that is 4095. So the sums of a chunk are exact. They are
multiplied by the scales of their column and their row, and added to those of the chunks before, in fp32.

A term that is small compared with the largest of its 128 loses bits that bfloat16 keeps, and others lose little or
nothing: the error of an integer is at most 1/8190 of the largest term, that of bfloat16 1/256 of the term itself. The
largest term counts as 2⁻¹⁰⁰ at least. A number that is not finite makes the sums of its row or column NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import registers, variable
from harness.compiler.schedules.cpu.bf16 import BF16, terms_of
from harness.compiler.schedules.cpu.emit import for_each_vector, further
from harness.compiler.schedules.cpu.microkernels.bf16 import PAIRS
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel, PanelProduct
from harness.compiler.schedules.cpu.tile import smallest_tile

_SHAPES = {
    8: ((4, 2), (3, 2), (2, 2)),
    16: ((8, 2), (4, 2), (2, 2)),
}
"""By fp32 lanes of a register: rows and vectors of panels whose sums, operands and products fit the registers."""
LEAST_ROWS = 2
"""A product of one row is bound by memory, and fp32 keeps more of it."""
LONGEST = 64
"""Pairs of a chunk, which the first cache holds: its end costs as much as some four pairs."""
LEAST = 2.0**-100
"""The largest term of a row in a chunk counts as so much at least: its inverse is a normal number."""
_EXPONENT = 0x7F800000
"""Bits of infinity in fp32: those of the absolute value of NaN are larger, of every other number smaller."""
_EXACT = -0x100
"""Mask of 16 bits of a significand: the product of such a number and a bfloat16 is exact in fp32."""
_TO_INTEGER = 1.5 * 2.0**23
"""An fp32 number of small absolute value that this was added to has the nearest integer, even of two, in its last bits.
"""
_INTRINSICS = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}


def scaled_integers(lanes: int) -> MicroKernel:
    """Returns the micro-kernel of linear layers.

    Args:
        lanes: fp32 lanes of a vector register.
    """
    return MicroKernel(
        name="bf16_vpmaddwd",
        multiplies=BF16,
        a=replace(PAIRS, row_major=True, scale=_scale_rows),
        b=replace(PAIRS, scale=_scale_columns),
        emit=_multiply,
        layers_only=True,
        choose_tile=smallest_tile([(rows, vectors * lanes) for rows, vectors in _SHAPES[lanes]]),
        least_rows=LEAST_ROWS,
        longest=LONGEST,
    )


def largest_integer(pairs: int) -> int:
    """Returns the largest integer whose square, times the terms of so many pairs, fits a signed number of 32 bits."""
    return math.isqrt((2**31 - 1) // (2 * pairs))


def _scale_rows(
    panel: T.Buffer, index: Callable[[T.Index, T.Index], Sequence[T.Index]], count: int, rows: int, lanes: int
) -> None:
    """Emits that the rows of a panel of A are scaled; elements of a row are contiguous."""
    with T.serial(0, rows) as i:
        highest = registers((lanes,), "int32")
        for lane in range(lanes):
            T.buffer_store(highest, T.const(0, "int32"), [lane])

        def find(k: T.Index) -> None:
            # Tails are shorter vectors, which begin at the first lane.
            lane = k % lanes
            T.buffer_store(highest, T.max(highest[lane], _magnitude(panel[index(k, i)])), [lane])

        def convert(k: T.Index) -> None:
            T.buffer_store(panel, _integers(panel[index(k, i)], factor[0]), index(k, i))

        for_each_vector(count, lanes, find)
        of_lanes: list[T.Expr] = [highest[lane] for lane in range(lanes)]
        highest_term = T.Bind(reduce(T.max, of_lanes))
        factor = variable(_factor(highest_term, count))
        for_each_vector(count, lanes, convert)
        T.buffer_store(panel, _scale(highest_term, factor[0]), index(count, i))


def _scale_columns(
    panel: T.Buffer, index: Callable[[T.Index, T.Index], Sequence[T.Index]], count: int, columns: int, lanes: int
) -> None:
    """Emits that the columns of a panel of B are scaled; columns of an element are contiguous."""
    highest, factor = registers((columns,), "int32"), registers((columns,))

    def find(k: T.Index, j: T.Index) -> None:
        T.buffer_store(highest, T.max(highest[j], _magnitude(panel[index(k, j)])), [j])

    def convert(k: T.Index, j: T.Index) -> None:
        T.buffer_store(panel, _integers(panel[index(k, j)], factor[j]), index(k, j))

    for_each_vector(columns, lanes, lambda j: T.buffer_store(highest, T.const(0, "int32"), [j]))
    with T.serial(0, count) as k:
        for_each_vector(columns, lanes, lambda j: find(k, j))
    for_each_vector(columns, lanes, lambda j: T.buffer_store(factor, _factor(highest[j], count), [j]))
    with T.serial(0, count) as k:
        for_each_vector(columns, lanes, lambda j: convert(k, j))
    for_each_vector(columns, lanes, lambda j: T.buffer_store(panel, _scale(highest[j], factor[j]), index(count, j)))


def _magnitude(pair: T.Expr) -> T.Expr:
    """Returns the bits of the larger absolute value of both terms."""
    high, low = (T.bitwise_and(bits, _int(0x7FFFFFFF)) for bits in (pair, T.shift_left(pair, _int(16))))
    return T.max(T.bitwise_and(high, _int(-0x10000)), low)


def _factor(highest_term: T.Expr, pairs: int) -> T.Expr:
    """Returns the factor of terms, from the bits of their largest absolute value; 0 if one is not finite."""
    highest_term = T.max(T.reinterpret("float32", highest_term), T.const(LEAST, "float32"))
    quotient = T.reinterpret("int32", T.const(largest_integer(pairs), "float32") / highest_term)
    factor = T.reinterpret("float32", T.bitwise_and(quotient, _int(_EXACT)))
    return T.Select(highest_term < T.const(math.inf, "float32"), factor, T.const(0.0, "float32"))


def _scale(highest_term: T.Expr, factor: T.Expr) -> T.Expr:
    """Returns the bits of the factor of sums of integers; NaN if a term is not finite."""
    inverse = T.reinterpret("int32", T.const(1.0, "float32") / factor)
    return T.Select(highest_term < _int(_EXPONENT), inverse, _int(0x7FC00000))


def _integers(pair: T.Expr, factor: T.Expr) -> T.Expr:
    """Returns a pair of integers from one of bfloat16."""
    low, high = (T.reinterpret("int32", term * factor + T.const(_TO_INTEGER, "float32")) for term in terms_of(pair))
    return T.bitwise_or(T.bitwise_and(low, _int(0xFFFF)), T.shift_left(high, _int(16)))


def _int(value: int) -> T.Expr:
    return T.const(value, "int32")


def _multiply(kernel: MicroKernel, product: PanelProduct) -> None:
    """Emits a product whose sums of integers stay in registers during a chunk, after which they are scaled."""
    tile, a, b, sums = product.tile, product.a, product.b, product.sums
    p, first, chunk, lanes = product.p, product.first, product.chunk, product.tile.lanes
    totals = [registers((tile.columns,), "int32") for _ in range(tile.rows)]
    vectors = [(i, j) for i in range(tile.rows) for j in range(0, tile.columns, lanes)]

    def column(k: T.Index, j: int) -> T.Expr:
        return further(b.element(first, 0, T.Ramp(j, 1, lanes)), k)

    def pairs(numbers: T.Expr) -> T.Expr:
        return T.reinterpret(f"int16x{2 * lanes}", numbers)

    a.fetch(p, first, None)
    b.fetch(p, first, None)
    for i, j in vectors:
        T.buffer_store(totals[i], T.Broadcast(_int(0), lanes), [T.Ramp(j, 1, lanes)])
    with T.serial(0, chunk) as k:
        for i, j in vectors:
            row, index = T.Broadcast(a.number(p, first, k, i), lanes), T.Ramp(j, 1, lanes)
            terms = T.call_llvm_intrin(f"int32x{lanes}", _INTRINSICS[lanes], pairs(row), pairs(column(k, j)))
            T.buffer_store(totals[i], totals[i][index] + terms, [index])
    for i, j in vectors:
        floats = f"float32x{lanes}"
        row_scale = T.reinterpret(floats, T.Broadcast(a.number(p, first, chunk, i), lanes))
        by_column = T.Cast(floats, totals[i][T.Ramp(j, 1, lanes)]) * T.reinterpret(floats, column(chunk, j))
        place = sums.vector(p, i, j, tile, lanes)
        with T.If(product.added):
            with T.Then():
                T.buffer_store(sums.buffer, T.fma(by_column, row_scale, sums.buffer[place]), place)
            with T.Else():
                T.buffer_store(sums.buffer, by_column * row_scale, place)
