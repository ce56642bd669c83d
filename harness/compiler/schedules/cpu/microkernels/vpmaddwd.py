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
from harness.compiler.schedules.common.kernel import registers
from harness.compiler.schedules.cpu.bf16 import BF16, terms_of
from harness.compiler.schedules.cpu.emit import for_each_vector
from harness.compiler.schedules.cpu.microkernels.bf16 import PAIRS
from harness.compiler.schedules.cpu.microkernels.functions import call_function, head_of_function, smallest_tile
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel

_SHAPES = {
    8: ((4, 2), (3, 2), (2, 2)),
    16: ((8, 2), (4, 2), (2, 2)),
}
"""By fp32 lanes of a register: rows and vectors of panels whose sums, operands and products fit the registers."""
LEAST_ROWS = 2
"""A product of one row is bound by memory, and fp32 keeps more of it."""
LONGEST = 64
"""Pairs of a chunk, which the first cache holds: its end costs as much as some four pairs."""
_BYTES = 4
LEAST = 2.0**-100
"""The largest term of a row in a chunk counts as so much at least: its inverse is a normal number."""
_EXPONENT = 0x7F800000
"""Bits of infinity in fp32: those of the absolute value of NaN are larger, of every other number smaller."""
_EXACT = -0x100
"""Mask of 16 bits of a significand: the product of such a number and a bfloat16 is exact in fp32."""
_TO_INTEGER = 1.5 * 2.0**23
"""An fp32 number of small absolute value that this was added to has the nearest integer, even of two, in its last bits.
"""
_MULTIPLY = "multiply_scaled_integers"
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
        emit=call_function(_MULTIPLY, fetches_a=True),
        source="\n".join([_declared(lanes), *(_function(*shape, lanes) for shape in _SHAPES[lanes])]),
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
        factor = registers((1,))
        highest_term = T.Bind(reduce(T.max, of_lanes))
        T.buffer_store(factor, _factor(highest_term, count), [0])
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


def _declared(lanes: int) -> str:
    integers, pairs, floats = f"<{lanes} x i32>", f"<{2 * lanes} x i16>", f"<{lanes} x float>"
    return (
        f"declare {integers} @{_INTRINSICS[lanes]}({pairs}, {pairs})\n"
        f"declare {floats} @{_fused(lanes)}({floats}, {floats}, {floats})"
    )


def _fused(lanes: int) -> str:
    return f"llvm.fma.v{lanes}f32"


def _function(rows: int, vectors: int, lanes: int) -> str:
    """Returns the function that adds the product of one left and one right panel to sums in memory, or makes them."""
    integers, floats, pairs = f"<{lanes} x i32>", f"<{lanes} x float>", f"<{2 * lanes} x i16>"
    width = vectors * lanes * _BYTES
    sums = [(i, j) for i in range(rows) for j in range(vectors)]

    def row(i: int, name: str, base: str, ty: str, wide: str) -> list[str]:
        """Loads one number of a row into all lanes."""
        return [
            f"  %at.{name}.{i} = getelementptr i8, ptr {base}, i64 %offset.{i}",
            f"  %one.{name}.{i} = load {ty}, ptr %at.{name}.{i}, align 4",
            f"  %first.{name}.{i} = insertelement {wide} poison, {ty} %one.{name}.{i}, i32 0",
            f"  %{name}.{i} = shufflevector {wide} %first.{name}.{i}, {wide} poison, {integers} zeroinitializer",
        ]

    def columns(name: str, base: str, ty: str) -> list[str]:
        """Loads the vectors of a row of columns."""
        lines = []
        for j in range(vectors):
            lines += [
                f"  %at.{name}.{j} = getelementptr i8, ptr {base}, i64 {j * lanes * _BYTES}",
                f"  %{name}.{j} = load {ty}, ptr %at.{name}.{j}, align 4",
            ]
        return lines

    offsets = "\n".join(f"  %offset.{i} = mul i64 %row, {i}" for i in range(rows))
    totals = "\n".join(
        f"  %sum.{i}.{j} = phi {integers} [ zeroinitializer, %entry ], [ %next.{i}.{j}, %step ]" for i, j in sums
    )
    step, scaled = columns("b", "%r", pairs), columns("column", "%r.next", floats)
    for i in range(rows):
        step += [*row(i, "both", "%l", "i32", integers), f"  %a.{i} = bitcast {integers} %both.{i} to {pairs}"]
        scaled += row(i, "row", "%l.next", "float", floats)
        for j in range(vectors):
            step += [
                f"  %product.{i}.{j} = call {integers} @{_INTRINSICS[lanes]}({pairs} %a.{i}, {pairs} %b.{j})",
                f"  %next.{i}.{j} = add {integers} %sum.{i}.{j}, %product.{i}.{j}",
            ]
            scaled += [
                f"  %number.{i}.{j} = sitofp {integers} %next.{i}.{j} to {floats}",
                f"  %by.column.{i}.{j} = fmul {floats} %number.{i}.{j}, %column.{j}",
                f"  %place.{i}.{j} = getelementptr i8, ptr %sums, i64 {i * width + j * lanes * _BYTES}",
            ]
    stored = "\n".join(
        f"  %result.{i}.{j} = fmul {floats} %by.column.{i}.{j}, %row.{i}\n"
        f"  store {floats} %result.{i}.{j}, ptr %place.{i}.{j}, align 4"
        for i, j in sums
    )
    added = "\n".join(
        f"  %before.{i}.{j} = load {floats}, ptr %place.{i}.{j}, align 4\n"
        f"  %after.{i}.{j} = call {floats} @{_fused(lanes)}({floats} %by.column.{i}.{j}, {floats} %row.{i}, "
        f"{floats} %before.{i}.{j})\n"
        f"  store {floats} %after.{i}.{j}, ptr %place.{i}.{j}, align 4"
        for i, j in sums
    )
    return f"""
{head_of_function(_MULTIPLY, rows, vectors * lanes)}
entry:
{offsets}
  br label %step
step:
  %n = phi i32 [ 0, %entry ], [ %n.next, %step ]
  %l = phi ptr [ %left, %entry ], [ %l.next, %step ]
  %r = phi ptr [ %right, %entry ], [ %r.next, %step ]
{totals}
{chr(10).join(step)}
  %l.next = getelementptr i8, ptr %l, i64 {_BYTES}
  %r.next = getelementptr i8, ptr %r, i64 {width}
  %n.next = add i32 %n, 1
  %more = icmp slt i32 %n.next, %steps
  br i1 %more, label %step, label %end
end:
{chr(10).join(scaled)}
  %new = icmp eq i32 %added, 0
  br i1 %new, label %make, label %add
make:
{stored}
  ret i32 0
add:
{added}
  ret i32 0
}}
"""
