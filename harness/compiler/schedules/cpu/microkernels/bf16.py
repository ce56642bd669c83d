"""Multiplies bfloat16 pairs in vector registers, with the processor's instruction or with shifts.

The multiply-adds of a pair have one of three forms. TVM generates no code for vectors of bfloat16, so that instructions
for pairs are called by functions of LLVM IR:

- AVX512-BF16: the instruction `vdpbf16ps`. It adds the product of the high halves first, rounds after each of the two
  products, to nearest and ties to even, and takes and gives zero for every denormal number, whatever the mode of the
  processor is;
- Arm's FEAT_BF16: the instruction `bfdot`. It adds both products, and that to the sum. Both additions round to odd: an
  inexact result is cut off and gets an odd last bit. Denormal numbers are zero as above (Arm's manual, BFDotAdd);
- any processor: a bfloat16 is the upper half of an fp32 number, so that a shift and a mask make fp32 numbers of a pair.
  Those of the left operand are made while it is packed: each is used with every vector of a row of the right one. It
  adds and rounds as `vdpbf16ps` does and keeps denormal numbers. Where the processor has no fused multiply-add, a
  product beyond fp32's range is infinite or zero before it is added. Other products than linear layers would gain
  nothing there, and stay fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from harness.compiler import tir as T
from harness.compiler.schedules.cpu.bf16 import BF16, PAIR, pair_bits, terms_of
from harness.compiler.schedules.cpu.microkernels.fp32 import in_registers
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel, PanelFormat, Step
from harness.compiler.schedules.cpu.tile import Tile, VectorUnit, choose_tile

_NAME = "multiply_add_bf16_pairs"
MultiplyAdd = Callable[[T.Expr, Sequence[T.Expr], T.TensorLoad], T.Expr]
"""(vector of sums, numbers of an element of A in all lanes, elements of B) → sums with the products."""

_FEW_REGISTERS = ((5, 2), (1, 4), (10, 1))
_SHAPES = {
    VectorUnit(lanes=16, registers=32): ((12, 2), (8, 2), (7, 3), (5, 4), (2, 6), (1, 8), (12, 1)),
    VectorUnit(lanes=4, registers=32): ((10, 2), (8, 2), (6, 3), (4, 4), (2, 6), (1, 8), (12, 1)),
    VectorUnit(lanes=8, registers=16): _FEW_REGISTERS,
    VectorUnit(lanes=4, registers=16): _FEW_REGISTERS,
}
"""Rows and vectors per row of tiles for any processor.

Sums, both halves of a row of the right operand and both terms of the left one must fit; AVX-512 reads the latter from
memory as it multiplies.
"""


PAIRS = PanelFormat("int32", PAIR, lambda terms: T.reinterpret("int32", pair_bits(terms[0], terms[1])))
"""Panels of pairs."""


def dot_products(lanes: int, intrinsic: str) -> MicroKernel:
    """Returns the micro-kernel of a processor with an instruction for pairs.

    Args:
        lanes: fp32 lanes of a vector register.
        intrinsic: LLVM's name of the instruction.
    """
    return MicroKernel(
        name="bf16",
        multiplies=BF16,
        a=PAIRS,
        b=PAIRS,
        emit=in_registers,
        step=in_vectors(lambda sums, numbers, right: T.call_extern(f"float32x{lanes}", _NAME, sums, *numbers, right)),
        source=function_of(_NAME, intrinsic, lanes, f"<{lanes} x i32>"),
    )


def shifts(unit: VectorUnit) -> MicroKernel:
    """Returns the micro-kernel of any processor."""
    return MicroKernel(
        name="bf16",
        multiplies=BF16,
        a=replace(PAIRS, dtype="float32", numbers=PAIR, split=terms_of),
        b=PAIRS,
        emit=in_registers,
        step=in_vectors(lambda sums, numbers, right: multiply_add_pairs(sums, numbers, terms_of(right))),
        layers_only=True,
        widens=True,
        choose_tile=lambda unit, rows, columns: choose_tile(unit, rows, columns, _SHAPES[unit]),
    )


def function_of(name: str, intrinsic: str, lanes: int, operand: str) -> str:
    """Returns the function of LLVM IR that multiplies and adds operands of this type with an instruction for bfloat16.

    Args:
        name: Its name.
        intrinsic: LLVM's name of the instruction.
        lanes: Its fp32 sums.
        operand: LLVM's type of both operands, of twice as many terms.
    """
    floats, halves = f"<{lanes} x float>", f"<{2 * lanes} x bfloat>"
    return f"""
declare {floats} @{intrinsic}({floats}, {halves}, {halves})

define linkonce_odr {floats} @{name}({floats} %sums, {operand} %left, {operand} %right) alwaysinline {{
  %a = bitcast {operand} %left to {halves}
  %b = bitcast {operand} %right to {halves}
  %result = call {floats} @{intrinsic}({floats} %sums, {halves} %a, {halves} %b)
  ret {floats} %result
}}
"""


def multiply_add_pairs(sums: T.Expr, left: Sequence[T.Expr], right: Sequence[T.Expr]) -> T.Expr:
    """Returns sums with the products of both terms of pairs, the low ones first; LLVM fuses them with the additions."""
    (left_low, left_high), (right_low, right_high) = left, right
    return (sums + left_high * right_high) + left_low * right_low


def in_vectors(multiply_add: MultiplyAdd) -> Step:
    """Returns the step that computes vectors of sums one by one, because TVM takes calls in vector loops apart."""

    def step(
        tile: Tile,
        rows: Sequence[T.Buffer],
        a: Callable[[int], Sequence[T.Expr]],
        b: Callable[[T.Index], T.TensorLoad],
    ) -> None:
        for i in range(tile.rows):
            for start in range(0, tile.columns, tile.lanes):
                index = T.Ramp(start, 1, tile.lanes)
                numbers = [T.Broadcast(number, tile.lanes) for number in a(i)]
                T.buffer_store(rows[i], multiply_add(rows[i][index], numbers, b(index)), [index])

    return step
