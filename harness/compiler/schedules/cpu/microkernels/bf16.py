"""Multiplies bfloat16 pairs in vector registers, with the processor's instruction or with shifts.

TVM generates no code for vectors of bfloat16. The multiply-adds of a pair are a function of LLVM IR instead, in one of
three forms:

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
        step=calls(_NAME),
        source=_dot_product(lanes, intrinsic),
    )


def shifts(unit: VectorUnit) -> MicroKernel:
    """Returns the micro-kernel of any processor."""
    return MicroKernel(
        name="bf16",
        multiplies=BF16,
        a=replace(PAIRS, dtype="float32", numbers=PAIR, split=terms_of),
        b=PAIRS,
        emit=in_registers,
        step=calls(_NAME),
        source=_shifts(unit.lanes),
        layers_only=True,
        widens=True,
        choose_tile=lambda unit, rows, columns: choose_tile(unit, rows, columns, _SHAPES[unit]),
    )


def _dot_product(lanes: int, intrinsic: str) -> str:
    """Returns the function for a processor with an instruction for pairs."""
    floats, pairs, halves = f"<{lanes} x float>", f"<{lanes} x i32>", f"<{2 * lanes} x bfloat>"
    return f"""
declare {floats} @{intrinsic}({floats}, {halves}, {halves})

define linkonce_odr {floats} @{_NAME}({floats} %sums, {pairs} %left, {pairs} %right) alwaysinline {{
  %a = bitcast {pairs} %left to {halves}
  %b = bitcast {pairs} %right to {halves}
  %result = call {floats} @{intrinsic}({floats} %sums, {halves} %a, {halves} %b)
  ret {floats} %result
}}
"""


def _shifts(lanes: int) -> str:
    """Returns the function for any processor; products are exact, so that LLVM may fuse them with the additions."""
    floats, pairs = f"<{lanes} x float>", f"<{lanes} x i32>"
    sixteen, high = (f"<{', '.join([f'i32 {value}'] * lanes)}>" for value in (16, -65536))
    arguments = f"{floats} %sums, {floats} %left.low, {floats} %left.high, {pairs} %right"
    return f"""
define linkonce_odr {floats} @{_NAME}({arguments}) alwaysinline {{
  %right.high = and {pairs} %right, {high}
  %right.low = shl {pairs} %right, {sixteen}
  %high = bitcast {pairs} %right.high to {floats}
  %low = bitcast {pairs} %right.low to {floats}
  %first = fmul contract {floats} %left.high, %high
  %sum = fadd contract {floats} %sums, %first
  %second = fmul contract {floats} %left.low, %low
  %result = fadd contract {floats} %sum, %second
  ret {floats} %result
}}
"""


def calls(function: str, *, by_address: bool = False) -> Step:
    """Returns the step that calls a function with each vector of sums, because TVM takes calls in vector loops apart.

    Args:
        function: Takes sums, the numbers of an element of A in all lanes, and elements of B.
        by_address: Whether it takes the address of the elements of B.
    """

    def step(
        tile: Tile,
        rows: Sequence[T.Buffer],
        a: Callable[[int], Sequence[T.Expr]],
        b: Callable[[T.Index], T.Expr],
    ) -> None:
        lanes = tile.lanes
        for i in range(tile.rows):
            for start in range(0, tile.columns, lanes):
                index = T.Ramp(start, 1, lanes)
                numbers = [T.Broadcast(number, lanes) for number in a(i)]
                right = T.address_of(b(start)) if by_address else b(index)
                result = T.call_extern(f"float32x{lanes}", function, rows[i][index], *numbers, right)
                T.buffer_store(rows[i], result, [index])

    return step
