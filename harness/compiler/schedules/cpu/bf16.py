"""Defines products of bfloat16 operands with fp32 sums, the arithmetic of `--precision bf16`.

Two terms of a sum are a *pair*, 32 bits: term k in the low half, and term k + depth / 2 in the high half. The two come
from different halves of a row, so that neighbours in a row become neighbours in a panel without being shuffled. Weights
are packed in pairs when the model is loaded; activations are fp32 and are rounded, to nearest and ties to even, while
they are packed. A panel of pairs is a panel of 32-bit elements with half the depth: blocking, packing and edges are
those of fp32. Attention, convolutions and products of activations make pairs of channels in the same way, and attention
pairs of keys from rows that follow each other.

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
from typing import Any

import tvm
from tvm import ir, relax
from tvm.target import codegen

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import static_shape
from harness.compiler.schedules.cpu.emit import Arithmetic
from harness.compiler.schedules.cpu.tile import Tile, VectorUnit, vector_unit

BF16 = "bfloat16"
PAIR = 2
"""Terms of a pair."""

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

_INSTRUCTIONS = {
    16: ("avx512bf16", "llvm.x86.avx512bf16.dpbf16ps.512"),
    4: ("bf16", "llvm.aarch64.neon.bfdot.v4f32.v8bf16"),
}
"""By fp32 lanes of a vector register: LLVM's feature and intrinsic of an instruction for pairs."""


def has_pairs(weight: relax.Expr) -> bool:
    """Returns whether this is a matrix, or several, in bfloat16 and of static shape, whose rows can be packed in pairs.

    Args:
        weight: [..., depth, columns], the right operand of a product.
    """
    shape = static_shape(weight, BF16)
    return shape is not None and len(shape) > 1 and shape[-2] % 2 == 0


def allow_bf16(operator: ir.Call) -> ir.Call:
    """Returns an operator of fp32 operands with the note that kernels may round its operands to bfloat16."""
    return ir.Call(operator.op, operator.args, operator.attrs, [relax.TensorType(dtype=BF16)])


def allows_bf16(value: relax.Expr) -> bool:
    """Returns whether this is an operator that has that note."""
    types = value.ty_args if isinstance(value, ir.Call) else ()
    return any(isinstance(ty, relax.TensorType) and str(ty.dtype) == BF16 for ty in types)


def has_instruction(target: tvm.target.Target) -> bool:
    """Returns whether a CPU has an instruction for pairs: then more than linear layers multiply them."""
    unit = vector_unit(target)
    feature, _ = _INSTRUCTIONS.get(unit.lanes, ("", ""))
    # Registers tell NEON from SSE.
    return unit.registers == 32 and bool(codegen.llvm_cpu_has_features(feature, target))


def arithmetic(target: tvm.target.Target) -> Arithmetic:
    """Returns the arithmetic of bfloat16 products for a CPU, from the features that LLVM knows of it."""
    unit = vector_unit(target)
    if has_instruction(target):
        return _arithmetic(_dot_products(unit.lanes))
    return _arithmetic(_shifts(unit.lanes), _SHAPES[unit], terms_of)


def _arithmetic(
    functions: str,
    shapes: Sequence[tuple[int, int]] | None = None,
    split: Callable[[Any], Sequence[Any]] | None = None,
) -> Arithmetic:
    multiply_add = _multiply_add if split is None else _multiply_add_terms
    return Arithmetic("bf16", BF16, "int32", PAIR, _pack_terms, multiply_add, functions, shapes, split)


def _dot_products(lanes: int) -> str:
    """Returns the function for a processor with an instruction for pairs."""
    _, intrinsic = _INSTRUCTIONS[lanes]
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


def _multiply_add(
    tile: Tile, rows: Sequence[T.Buffer], left: Callable[[int], Any], right: Callable[[Any], Any]
) -> None:
    """Emits a step."""
    _multiply_add_terms(tile, rows, lambda i: (left(i),), right)


def _multiply_add_terms(
    tile: Tile, rows: Sequence[T.Buffer], left: Callable[[int], Sequence[Any]], right: Callable[[Any], Any]
) -> None:
    """Emits a step with whole vectors, because TVM takes calls of functions apart where it vectorizes a loop."""
    lanes = tile.lanes
    for i in range(tile.rows):
        for start in range(0, tile.columns, lanes):
            index = T.Ramp(start, 1, lanes)
            terms = [T.Broadcast(term, lanes) for term in left(i)]
            T.buffer_store(
                rows[i], T.call_extern(f"float32x{lanes}", _NAME, rows[i][index], *terms, right(index)), [index]
            )


def _pack_terms(read: Callable[[Any], Any], k: Any, depth: int) -> Any:
    return T.reinterpret("int32", pair_bits(read(k), read(k + depth)))


def pair_bits(low: Any, high: Any) -> Any:
    """Returns the bits of a pair of terms, each rounded to the nearest bfloat16, the even one of two."""
    return T.bitwise_or(T.shift_right(_rounded_bits(low), _bits(16)), _rounded_bits(high))


def terms_of(pair: Any) -> tuple[Any, Any]:
    """Returns the terms of a pair in fp32, the low one first."""
    sixteen = T.const(16, "int32")
    low, high = T.shift_left(pair, sixteen), T.bitwise_and(pair, T.const(-65536, "int32"))
    return T.reinterpret("float32", low), T.reinterpret("float32", high)


def to_bf16(value: Any) -> Any:
    """Returns the nearest bfloat16 of an fp32 number, the even one of two; NaN becomes the quiet one."""
    return T.reinterpret(BF16, T.Cast("uint16", T.shift_right(_rounded_bits(value), _bits(16))))


def _rounded_bits(value: Any) -> Any:
    """Returns the bits of the nearest bfloat16, the even one of two, in the upper half; NaN becomes the quiet one."""
    if str(value.ty.dtype) == BF16:
        return T.shift_left(T.Cast("uint32", T.reinterpret("uint16", value)), _bits(16))
    bits = T.reinterpret("uint32", value)
    last = T.bitwise_and(T.shift_right(bits, _bits(16)), _bits(1))
    nearest = T.bitwise_and(bits + _bits(0x7FFF) + last, _bits(0xFFFF0000))
    is_nan = T.bitwise_and(bits, _bits(0x7FFFFFFF)) > _bits(0x7F800000)
    return T.Select(is_nan, _bits(0x7FC00000), nearest)


def _bits(value: int) -> Any:
    return T.const(value, "uint32")
