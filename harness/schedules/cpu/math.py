"""Elementary functions in fp32 as plain TIR arithmetic, so that LLVM vectorizes them.

TVM lowers `tirx.exp`, `tirx.erf` and others to calls of the C library, one scalar at a time. The functions here take
and return a float32 expression and use only additions, products, `fma`, selects, shifts and bit casts: everything
that both TVM's `VectorizeLoop` and LLVM's loop vectorizer turn into vector code. The same source serves loops of any
instruction set; `fma` falls back to a product and a sum where the machine has none, and the reductions are exact
either way.

Every polynomial is a weighted minimax fit, made for this file by a Remez exchange in 50 digits and then rounded to
fp32; the weight is that of the relative error of the final result. Bounds in the docstrings are in units in the last
place (ULP) of the correctly rounded result, measured against float64 over the whole range of fp32 by
`conformance/test_cpu_math.py`, with and without fma.

Intermediate values are bound with `Let`, since TIR has no shared subexpressions: without it a polynomial in x would
copy x's expression once per coefficient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tvm import tirx

if TYPE_CHECKING:
    from tvm.ir import Expr

_LOG2_E = 1.4426950408889634
_SHIFTER = 12582912.0
"""1.5·2²³: adding it rounds a float to the nearest integer and leaves that integer in the low bits."""
_SHIFTER_BITS = 0x4B400000

_EXP_LARGEST = 88.8
"""Above it exp overflows (the largest finite result is at 88.7228)."""
_EXP_SMALLEST = -104.0
"""Below it exp rounds to zero (the smallest subnormal result is at -103.9721)."""
_LN2_HIGH = 0.693359375
"""The first 10 bits of ln 2: its product with an exponent is exact even without fma."""
_LN2_LOW = -2.12194442e-4
_EXP = (0.49999994, 0.166665152, 0.041668456, 0.00836941879, 0.00138131483)
"""(eʳ - 1 - r)/r² on |r| ≤ 0.35; relative error 2⁻²⁸ of eʳ."""

_ERF_SMALL_LIMIT = 0.875
_ERF_ONE = 4.0
"""From 3.92 on erf rounds to 1."""
_ERF_SMALL = (0.128379166, -0.376126349, 0.11283733, -0.0268615838, 0.00520674745, -0.000821110443, 8.67539493e-05)
"""erf(x)/x - 1 in x² on |x| ≤ 0.875; relative error 2⁻³² of erf."""
_ERF_LARGE = (0.000133577414, 1.12793612, 0.636737227, 0.104327485, -0.0224202089, 0.00309228967, -0.000200995943)
"""-ln(1 - erf(x)) in x on 0.875 ≤ x ≤ 4; relative error of erf 2⁻²⁹."""

_GELU_SMALL_LIMIT = 1.0
_GELU_SMALL = (0.398942262, -0.0664902776, 0.00997286104, -0.00118529494, 0.00011246535, -7.28642681e-06)
"""(Φ(x) - ½)/x in x² on |x| ≤ 1; relative error 2⁻²⁹ of Φ."""
_TAIL_END = 14.4
"""From here on the tail of GELU rounds to zero."""
_TAIL_SCALE = 0.25
_TAIL = (0.188821286, 0.303948194, 0.387137413, 0.373063385, 0.241559058, 0.059634313, -0.0546808951, -0.0440475382)
"""½·erfc(a/√2)·exp(a²/2)/t in t - ½ with t = 1/(1 + a/4) on 1 ≤ a ≤ 14.5; relative error 2⁻²⁶·⁹·(1 + a²/8)."""


def _f32(value: float) -> Expr:
    return tirx.const(value, "float32")


def _i32(value: int) -> Expr:
    return tirx.const(value, "int32")


def _fma(x: Expr, y: Expr, z: Expr) -> Expr:
    return tirx.op.fma(x, y, z)


def _let(value: Expr, body: Callable[[Expr], Expr], name: str = "t") -> Expr:
    """Binds a value to a name for the expression that `body` makes of it."""
    if isinstance(value, tirx.Var):
        return body(value)
    variable = tirx.Var(name, value.ty if hasattr(value, "ty") else value.dtype)
    return tirx.Let(variable, value, body(variable))


def _bits(x: Expr) -> Expr:
    return tirx.reinterpret("int32", x)


def _from_bits(x: Expr) -> Expr:
    return tirx.reinterpret("float32", x)


def _polynomial(x: Expr, coefficients: tuple[float, ...]) -> Expr:
    """Horner's scheme; the first coefficient is the constant one."""
    result = _f32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = _fma(result, x, _f32(coefficient))
    return result


def _clamp(x: Expr, low: float, high: float) -> Expr:
    """Limits x to [low, high]; NaN stays NaN (every comparison with it is false)."""
    return tirx.Select(x > _f32(high), _f32(high), tirx.Select(x < _f32(low), _f32(low), x))


def _power_of_two(n: Expr) -> Expr:
    """2ⁿ for an int32 n in [-126, 127]."""
    return _from_bits(tirx.shift_left(n + _i32(127), _i32(23)))


def _exp_reduced(x: Expr, low: Expr | None = None) -> Expr:
    """exp(x + low) for x already within the limits; `low` is a correction of at most 0.04."""

    def scaled(shifted: Expr) -> Expr:
        def with_integer(n: Expr) -> Expr:
            # The remainder is exact in its first step: n·_LN2_HIGH has at most 18 bits.
            r = _fma(n, _f32(-_LN2_LOW), _fma(n, _f32(-_LN2_HIGH), x))
            if low is not None:
                r = r + low

            def with_remainder(r: Expr) -> Expr:
                e = _fma(r * r, _polynomial(r, _EXP), r) + _f32(1.0)
                exponent = _bits(shifted) - _i32(_SHIFTER_BITS)

                def with_exponent(k: Expr) -> Expr:
                    # Two factors, so that both ends work: 2¹²⁸ is no float, and subnormal results round only once.
                    half = tirx.shift_right(k, _i32(1))
                    return _let(half, lambda h: e * _power_of_two(h) * _power_of_two(k - h), "half")

                return _let(exponent, with_exponent, "exponent")

            return _let(r, with_remainder, "r")

        return _let(shifted - _f32(_SHIFTER), with_integer, "n")

    return _let(_fma(x, _f32(_LOG2_E), _f32(_SHIFTER)), scaled, "shifted")


def exp(x: Expr) -> Expr:
    """eˣ within 1 ULP, subnormal results included.

    exp(-inf) = 0, exp(inf) = inf, exp(NaN) = NaN; overflow gives inf, underflow subnormals and then 0.
    """
    return _let(x, lambda x: _let(_clamp(x, _EXP_SMALLEST, _EXP_LARGEST), _exp_reduced, "clamped"), "x")


def sigmoid(x: Expr) -> Expr:
    """1/(1 + e⁻ˣ) within 3 ULP for x ≥ -88; 0 below (as in PyTorch, where the true value is subnormal)."""
    return _f32(1.0) / (_f32(1.0) + exp(_f32(0.0) - x))


def silu(x: Expr) -> Expr:
    """x·sigmoid(x) within 3 ULP for x ≥ -88; -0 below, NaN at -inf (both as in PyTorch)."""
    return _let(x, lambda x: x / (_f32(1.0) + exp(_f32(0.0) - x)), "x")


def erf(x: Expr) -> Expr:
    """The error function within 2 ULP; exactly ±1 from |x| = 4 on."""

    def with_x(x: Expr) -> Expr:
        def with_square(s: Expr) -> Expr:
            small = _fma(x, _polynomial(s, _ERF_SMALL), x)

            def with_magnitude(a: Expr) -> Expr:
                exponent = _f32(0.0) - _polynomial(a, _ERF_LARGE)
                large = _f32(1.0) - _let(exponent, _exp_reduced, "exponent")
                signed = _let(large, lambda v: tirx.Select(x < _f32(0.0), _f32(0.0) - v, v), "large")
                return tirx.Select(tirx.abs(x) < _f32(_ERF_SMALL_LIMIT), small, signed)

            return _let(_clamp(tirx.abs(x), 0.0, _ERF_ONE), with_magnitude, "a")

        return _let(x * x, with_square, "s")

    return _let(x, with_x, "x")


def gelu(x: Expr) -> Expr:
    """x·Φ(x), the erf form of GELU, without cancellation in the negative tail.

    For |x| < 1 it is x·(½ + x·P(x²)), beyond max(x, 0) - |x|·Q(|x|) with Q(a) = ½·erfc(a/√2) = exp(-a²/2)·t·P(t - ½)
    and t = 1/(1 + a/4). Within 4 ULP for x > -1 and 8 ULP below, where ½·x·(1 + erf(x/√2)) loses every digit from x =
    -5 on. gelu(inf) = inf; gelu(-inf) = 0, the limit, where PyTorch computes -inf·0 = NaN.
    """

    def with_x(x: Expr) -> Expr:
        def with_magnitude(a: Expr) -> Expr:
            def with_high(high: Expr) -> Expr:
                # a² = high² + (a - high)·(a + high), both without a rounding error that the exponential would magnify.
                low = (a - high) * (a + high) * _f32(-0.5)
                bell = _let(high * high * _f32(-0.5), lambda e: _exp_reduced(e, low), "e")
                t = _f32(1.0) / _fma(a, _f32(_TAIL_SCALE), _f32(1.0))
                tail = _let(t, lambda t: a * t * _polynomial(t - _f32(0.5), _TAIL) * bell, "t")
                large = tirx.Select(x > _f32(0.0), x, _f32(0.0)) - tail
                small = _let(a * a, lambda s: x * _fma(x, _polynomial(s, _GELU_SMALL), _f32(0.5)), "s")
                return tirx.Select(a < _f32(_GELU_SMALL_LIMIT), small, large)

            return _let(_from_bits(tirx.bitwise_and(_bits(a), _i32(-4096))), with_high, "high")

        return _let(_clamp(tirx.abs(x), 0.0, _TAIL_END), with_magnitude, "a")

    return _let(x, with_x, "x")
