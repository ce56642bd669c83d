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

from collections.abc import Sequence

from harness.compiler import tir as T
from harness.compiler.schedules.cpu.bf16 import BF16, pair_bits
from harness.compiler.schedules.cpu.microkernels.functions import call_function, head_of_function, smallest_tile
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel, PanelFormat

TERMS = 4
"""Terms of an element."""
_BYTES = 2 * TERMS
_SHAPES = ((8, 12), (4, 16), (2, 16))
"""Rows and columns of panels: sums, two rows of the left one each and two columns of the right one fit 32 registers."""
LEAST_ROWS = 2
"""A product of one row has half of its sums for nothing."""
_LONGEST = 256
"""Elements of the depth that all left panels share: 24 KB of a right panel, which the first cache holds."""
_MULTIPLY = "multiply_bf16_rows_and_columns"


def _encode(terms: Sequence[T.Expr]) -> T.Expr:
    low, high = (pair_bits(terms[n], terms[n + 1]) for n in (0, 2))
    shifted = T.shift_left(T.Cast("uint64", high), T.const(32, "uint64"))
    return T.reinterpret("int64", T.bitwise_or(T.Cast("uint64", low), shifted))


_INTRINSIC = "llvm.aarch64.neon.bfmmla"
_DECLARED = f"declare <4 x float> @{_INTRINSIC}(<4 x float>, <8 x bfloat>, <8 x bfloat>)"


def _function(rows: int, columns: int) -> str:
    """Returns the function that adds the product of one left and one right panel to sums in memory, or makes them."""
    squares = [(i, j) for i in range(0, rows, 2) for j in range(0, columns, 2)]
    places, loads, stores = _sums(rows, columns)
    sums = "\n".join(
        f"  %sum.{i}.{j} = phi <4 x float> [ %first.{i}.{j}, %load ], [ zeroinitializer, %entry ], "
        f"[ %next.{i}.{j}, %step ]"
        for i, j in squares
    )
    return f"""
{head_of_function(_MULTIPLY, rows, columns)}
entry:
{places}
  %new = icmp eq i32 %added, 0
  br i1 %new, label %step, label %load
load:
{loads}
  br label %step
step:
  %n = phi i32 [ 0, %load ], [ 0, %entry ], [ %n.next, %step ]
  %l = phi ptr [ %left, %load ], [ %left, %entry ], [ %l.next, %step ]
  %r = phi ptr [ %right, %load ], [ %right, %entry ], [ %r.next, %step ]
{sums}
{_step(rows, columns)}
  %l.next = getelementptr i8, ptr %l, i64 {_BYTES}
  %r.next = getelementptr i8, ptr %r, i64 {columns * _BYTES}
  %n.next = add i32 %n, 1
  %more = icmp slt i32 %n.next, %steps
  br i1 %more, label %step, label %end
end:
{stores}
  ret i32 0
}}
"""


def _sums(rows: int, columns: int) -> tuple[str, str, str]:
    """Returns where sums are in memory, how they are loaded, and how they are stored.

    In memory they lie row by row. A register has two columns of a row, and the same two of the next one.
    """

    def moved(sources: tuple[str, str], made: tuple[str, str]) -> list[str]:
        """Returns four columns of two rows as two registers of either kind."""
        halves = zip(made, ("i32 0, i32 1, i32 4, i32 5", "i32 2, i32 3, i32 6, i32 7"), strict=True)
        first, second = (f"<4 x float> %{name}" for name in sources)
        return [f"  %{name} = shufflevector {first}, {second}, <4 x i32> <{lanes}>" for name, lanes in halves]

    places, loads, stores = [], [], []
    for i in range(0, rows, 2):
        for j in range(0, columns, 4):
            lines, wholes = ((f"{name}.{i}.{j}", f"{name}.{i + 1}.{j}") for name in ("line", "whole"))
            firsts, nexts = ((f"{name}.{i}.{j}", f"{name}.{i}.{j + 2}") for name in ("first", "next"))
            stores += moved(nexts, wholes)
            for row, line, whole in zip((i, i + 1), lines, wholes, strict=True):
                place = f"%place.{row}.{j}"
                places.append(f"  {place} = getelementptr i8, ptr %sums, i64 {4 * (row * columns + j)}")
                loads.append(f"  %{line} = load <4 x float>, ptr {place}, align 4")
                stores.append(f"  store <4 x float> %{whole}, ptr {place}, align 4")
            loads += moved(lines, firsts)
    return "\n".join(places), "\n".join(loads), "\n".join(stores)


def _step(rows: int, columns: int) -> str:
    """Returns the products of one element of the depth."""
    lines = []
    for i in range(0, rows, 2):
        for row in (i, i + 1):
            lines += [
                f"  %offset.{row} = mul i64 %row, {row}",
                f"  %left.{row} = getelementptr i8, ptr %l, i64 %offset.{row}",
                f"  %element.{row} = load i64, ptr %left.{row}, align 8",
            ]
        lines += [
            f"  %one.{i} = insertelement <2 x i64> poison, i64 %element.{i}, i32 0",
            f"  %both.{i} = insertelement <2 x i64> %one.{i}, i64 %element.{i + 1}, i32 1",
            f"  %a.{i} = bitcast <2 x i64> %both.{i} to <8 x bfloat>",
        ]
    for j in range(0, columns, 2):
        lines += [
            f"  %right.{j} = getelementptr i8, ptr %r, i64 {j * _BYTES}",
            f"  %b.{j} = load <8 x bfloat>, ptr %right.{j}, align 8",
        ]
        for i in range(0, rows, 2):
            operands = f"<4 x float> %sum.{i}.{j}, <8 x bfloat> %a.{i}, <8 x bfloat> %b.{j}"
            lines.append(f"  %next.{i}.{j} = call <4 x float> @{_INTRINSIC}({operands})")
    return "\n".join(lines)


BFMMLA = MicroKernel(
    name="bf16_bfmmla",
    multiplies=BF16,
    a=PanelFormat("int64", TERMS, _encode, row_major=True),
    b=PanelFormat("int64", TERMS, _encode),
    emit=call_function(_MULTIPLY),
    source="\n".join([_DECLARED, *(_function(*shape) for shape in _SHAPES)]),
    choose_tile=smallest_tile(_SHAPES),
    least_rows=LEAST_ROWS,
    longest=_LONGEST,
)
"""Products with the instruction, which is part of the feature that has `bfdot`."""
