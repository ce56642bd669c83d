"""Computes complex arithmetic in Relax on pairs: real tensors [..., 2] of real and imaginary parts.

Every function takes `emit`, which binds an expression to a variable (`BlockBuilder.emit`), then pairs, and returns
pairs unless documented otherwise. Operands are broadcast as in Relax, which is right for pairs because the last
dimension is always 2. No intermediate result overflows or underflows where the result does not, in `divide` and
`absolute` too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tvm import relax

if TYPE_CHECKING:
    from tvm.relax import Expr

Emit = Callable[["Expr"], "Expr"]


def dtype_of(x: Expr) -> str:
    """Returns the dtype of an emitted tensor, for instance `float32`."""
    return str(x.ty.dtype.dtype)


def constant(value: complex, dtype: str) -> Expr:
    """Returns a number as pairs of shape [2]."""
    import numpy as np

    return relax.const(np.array([value.real, value.imag], dtype), dtype)


def parts(emit: Emit, x: Expr) -> tuple[Expr, Expr]:
    """Returns the real and imaginary parts, each without the last dimension."""
    re, im = (emit(relax.op.take(x, relax.const(part, "int64"), axis=-1)) for part in (0, 1))
    return re, im


def join(emit: Emit, re: Expr, im: Expr) -> Expr:
    """Returns the pairs of real and imaginary parts of one shape."""
    return emit(relax.op.stack([re, im], axis=-1))


def from_real(emit: Emit, re: Expr) -> Expr:
    """Returns the pairs with imaginary parts of zero."""
    return join(emit, re, relax.op.zeros_like(re))


def polar(emit: Emit, length: Expr, angle: Expr) -> Expr:
    """Computes length·(cos angle + i·sin angle) of real tensors of one shape."""
    cos, sin = emit(relax.op.cos(angle)), emit(relax.op.sin(angle))
    return join(emit, emit(relax.op.multiply(length, cos)), emit(relax.op.multiply(length, sin)))


def negative(emit: Emit, x: Expr) -> Expr:
    """Computes (-re, -im)."""
    return emit(relax.op.negative(x))


def conjugate(emit: Emit, x: Expr) -> Expr:
    """Computes (re, -im)."""
    return emit(relax.op.multiply(x, constant(1 - 1j, dtype_of(x))))


def times_i(emit: Emit, x: Expr) -> Expr:
    """Computes (-im, re)."""
    re, im = parts(emit, x)
    return join(emit, relax.op.negative(im), re)


def scale(emit: Emit, x: Expr, factor: Expr) -> Expr:
    """Returns the product of pairs and a real tensor, of a number's shape or [...]."""
    return emit(relax.op.multiply(x, relax.op.expand_dims(factor, -1)))


def multiply(emit: Emit, x: Expr, y: Expr) -> Expr:
    """Computes (a + ib)(c + id) = (ac - bd) + i(ad + bc)."""
    (a, b), (c, d) = parts(emit, x), parts(emit, y)
    ac, bd, ad, bc = (emit(relax.op.multiply(*factors)) for factors in ((a, c), (b, d), (a, d), (b, c)))
    return join(emit, emit(relax.op.subtract(ac, bd)), emit(relax.op.add(ad, bc)))


def divide(emit: Emit, x: Expr, y: Expr) -> Expr:
    """Computes (a + ib)/(c + id) by R. L. Smith (CACM 5(8), 1962), which divides both by the larger part first.

    A division by 0 gives a/0 and b/0.
    """
    (a, b), (c, d) = parts(emit, x), parts(emit, y)
    zero = relax.const(0.0, dtype_of(y))
    swap = emit(relax.op.less(relax.op.abs(c), relax.op.abs(d)))
    large, small = emit(relax.op.where(swap, d, c)), emit(relax.op.where(swap, c, d))
    is_zero = emit(relax.op.equal(large, zero))
    ratio = emit(relax.op.where(is_zero, zero, relax.op.divide(small, large)))
    denominator = emit(relax.op.add(large, relax.op.multiply(small, ratio)))

    def quotient(plain: Expr, scaled: Expr) -> Expr:
        return emit(relax.op.divide(relax.op.add(plain, relax.op.multiply(scaled, ratio)), denominator))

    minus_a = emit(relax.op.negative(a))
    re = quotient(emit(relax.op.where(swap, b, a)), emit(relax.op.where(swap, a, b)))
    im = quotient(emit(relax.op.where(swap, minus_a, b)), emit(relax.op.where(swap, b, minus_a)))
    return join(emit, re, im)


def exponential(emit: Emit, x: Expr) -> Expr:
    """Computes e^re·(cos im + i·sin im); on the real axis the imaginary part is 0 even where e^re overflows."""
    re, im = parts(emit, x)
    length = emit(relax.op.exp(re))
    zero = relax.const(0.0, dtype_of(x))
    sine = emit(relax.op.multiply(length, emit(relax.op.sin(im))))
    on_axis = emit(relax.op.equal(im, zero))
    return join(emit, emit(relax.op.multiply(length, emit(relax.op.cos(im)))), emit(relax.op.where(on_axis, im, sine)))


def absolute(emit: Emit, x: Expr) -> Expr:
    """Computes |z| = large·√(1 + (small/large)²), a real tensor [...]."""
    re, im = (emit(relax.op.abs(part)) for part in parts(emit, x))
    swap = emit(relax.op.less(re, im))
    large, small = emit(relax.op.where(swap, im, re)), emit(relax.op.where(swap, re, im))
    unit = relax.const(1.0, dtype_of(x))
    # includes 0/0 and ∞/∞, where any finite ratio is right
    is_equal = emit(relax.op.equal(large, small))
    ratio = emit(relax.op.where(is_equal, unit, relax.op.divide(small, large)))
    return emit(relax.op.multiply(large, relax.op.sqrt(relax.op.add(unit, relax.op.multiply(ratio, ratio)))))


def angle(emit: Emit, x: Expr) -> Expr:
    """Returns the angle to the positive real axis, in radians from -π to π, a real tensor [...]."""
    re, im = parts(emit, x)
    return emit(relax.op.atan2(im, re))


def matmul(emit: Emit, x: Expr, y: Expr) -> Expr:
    """Returns the product of [..., m, k] and [..., k, n] as one real product [..., m, 2k] × [..., 2k, 2n].

    A row of x is (a₁, b₁, a₂, b₂, …) in memory; row 2j of the right factor is row j of y, row 2j + 1 is i times row j.
    """
    *batch, m, k, _ = list(x.ty.shape)
    *batch_of_y, _, n, _ = list(y.ty.shape)
    rows = emit(relax.op.stack([y, times_i(emit, y)], axis=len(batch) + 1))
    left = emit(relax.op.reshape(x, [*batch, m, 2 * k]))
    right = emit(relax.op.reshape(rows, [*batch_of_y, 2 * k, 2 * n]))
    return emit(relax.op.reshape(relax.op.matmul(left, right), [*batch, m, n, 2]))
