"""Rounds fp32 numbers to bfloat16, joins two to a pair, and marks operators whose operands may be rounded.

Two terms of a sum are a *pair*, 32 bits: term k in the low half, and term k + depth / 2 in the high half. The two come
from different halves of a row, so that neighbours in a row become neighbours in a panel without being shuffled. Weights
are packed in pairs when the model is loaded; activations are fp32 and are rounded, to nearest and ties to even, while
they are packed. A panel of pairs is a panel of 32-bit elements with half the depth: blocking, packing and edges are
those of fp32. Attention, convolutions and products of activations make pairs of channels in the same way, and attention
pairs of keys from rows that follow each other.
"""

from __future__ import annotations

from tvm import ir, relax

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import static_shape

BF16 = "bfloat16"
PAIR = 2
"""Terms of a pair."""


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


def pair_bits(low: T.Expr, high: T.Expr) -> T.Expr:
    """Returns the bits of a pair of terms, each rounded to the nearest bfloat16, the even one of two."""
    return T.bitwise_or(T.shift_right(_rounded_bits(low), _bits(16)), _rounded_bits(high))


def terms_of(pair: T.Expr) -> tuple[T.Expr, T.Expr]:
    """Returns the terms of a pair in fp32, the low one first; those of a vector of pairs are vectors."""
    floats = str(pair.ty.dtype).replace("int", "float")
    low, high = T.shift_left(pair, T.const(16, "int32")), T.bitwise_and(pair, T.const(-65536, "int32"))
    return T.reinterpret(floats, low), T.reinterpret(floats, high)


def to_bf16(value: T.Expr) -> T.Expr:
    """Returns the nearest bfloat16 of an fp32 number, the even one of two; NaN becomes the quiet one."""
    return T.reinterpret(BF16, T.Cast("uint16", T.shift_right(_rounded_bits(value), _bits(16))))


def _rounded_bits(value: T.Expr) -> T.Expr:
    """Returns the bits of the nearest bfloat16, the even one of two, in the upper half; NaN becomes the quiet one."""
    if str(value.ty.dtype) == BF16:
        return T.shift_left(T.Cast("uint32", T.reinterpret("uint16", value)), _bits(16))
    bits = T.reinterpret("uint32", value)
    last = T.bitwise_and(T.shift_right(bits, _bits(16)), _bits(1))
    nearest = T.bitwise_and(bits + _bits(0x7FFF) + last, _bits(0xFFFF0000))
    is_nan = T.bitwise_and(bits, _bits(0x7FFFFFFF)) > _bits(0x7F800000)
    return T.Select(is_nan, _bits(0x7FC00000), nearest)


def _bits(value: int) -> T.Expr:
    return T.const(value, "uint32")
