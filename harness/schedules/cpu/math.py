"""Elementary functions in fp32 as plain TIR arithmetic, so that LLVM vectorizes them.

TVM lowers `tirx.exp`, `tirx.erf` and others to calls of the C library, one scalar at a time. The functions here take and return
a float32 `PrimExpr` and use only additions, products, `fma`, selects, shifts and bit casts: everything that both TVM's
`VectorizeLoop` and LLVM's loop vectorizer turn into vector code. The same source serves loops of any instruction set; `fma`
falls back to a product and a sum where the machine has none, and the reductions are exact either way.

Every polynomial is a weighted minimax fit, made for this file by a Remez exchange in 50 digits and then rounded to fp32;
the weight is that of the relative error of the final result. Bounds in the docstrings are in units in the last place (ULP) of
the correctly rounded result, measured against float64 over every 97th bit pattern of fp32 by `conformance/test_cpu_math.py`.

Intermediate values are bound with `Let`, since TIR has no shared subexpressions: without it a polynomial in x would copy x's
expression once per coefficient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from tvm import tirx

if TYPE_CHECKING:
    from tvm.tirx import PrimExpr

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
_ERF_SMALL = (1.12837911, -0.376125515, 0.112824552, -0.0267914627, 0.00503218174, -0.00062032562)
"""erf(x)/x in x² on |x| ≤ 0.875; relative error 2⁻²⁶·⁸."""
_ERF_LARGE = (0.000133577414, 1.12793612, 0.636737227, 0.104327485, -0.0224202089, 0.00309228967, -0.000200995943)
"""-ln(1 - erf(x)) in x on 0.875 ≤ x ≤ 4; relative error of erf 2⁻²⁹."""

_TAIL_SCALE = 0.25
_TAIL = (
    0.0998324081,
    0.0979306847,
    0.107865773,
    0.0170643087,
    0.238476723,
    -0.258237809,
    0.341415852,
    -0.174483106,
    0.0301351696,
)
"""½·erfc(a/√2)·exp(a²/2)/t in t = 1/(1 + a/4) on 0 ≤ a ≤ 14.5; relative error 2⁻²⁵·⁹·(1 + a²/8)."""

_SQRT_HALF_BITS = 0x3F3504F3
_LOG = (0.333333313, -0.250008196, 0.200012282, -0.166233584, 0.142017335, -0.131601423, 0.127617151, -0.0763476267)
"""(ln(1+f) - f + f²/2)/f³ on √½ ≤ 1+f ≤ √2; relative error 2⁻²⁷ of ln(1+f)."""

_SIN = (-0.166666552, 0.00833217334, -0.000195166562)
"""(sin r - r)/r³ in r² on |r| ≤ π/4; relative error 2⁻²⁸."""
_COS = (0.0416666456, -0.00138873619, 2.44377297e-05)
"""(cos r - 1 + r²/2)/r⁴ in r² on |r| ≤ π/4; error 2⁻³³."""
_HALF_PI_PARTS = (1.5703125, 4.837512969970703125e-4, 7.54953362047672271728515625e-8, 2.56334407e-12)
"""π/2 in parts of 11 bits (the last of 24): their products with up to 2¹³ are exact even without fma."""
_TRIGONOMETRIC_LIMIT = 6.0e6


def _f32(value: float) -> PrimExpr:
    return tirx.const(value, "float32")


def _i32(value: int) -> PrimExpr:
    return tirx.const(value, "int32")


def _fma(x: PrimExpr, y: PrimExpr, z: PrimExpr) -> PrimExpr:
    return tirx.op.fma(x, y, z)


def _let(value: PrimExpr, body: Callable[[PrimExpr], PrimExpr], name: str = "t") -> PrimExpr:
    """Binds a value to a name for the expression that `body` makes of it."""
    if isinstance(value, tirx.Var):
        return body(value)
    variable = tirx.Var(name, value.ty if hasattr(value, "ty") else value.dtype)
    return tirx.Let(variable, value, body(variable))


def _bits(x: PrimExpr) -> PrimExpr:
    return tirx.reinterpret("int32", x)


def _from_bits(x: PrimExpr) -> PrimExpr:
    return tirx.reinterpret("float32", x)


def _polynomial(x: PrimExpr, coefficients: tuple[float, ...]) -> PrimExpr:
    """Horner's scheme; the first coefficient is the constant one."""
    result = _f32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = _fma(result, x, _f32(coefficient))
    return result


def _clamp(x: PrimExpr, low: float, high: float) -> PrimExpr:
    """x limited to [low, high]; NaN stays NaN (every comparison with it is false)."""
    return tirx.Select(x > _f32(high), _f32(high), tirx.Select(x < _f32(low), _f32(low), x))


def _power_of_two(n: PrimExpr) -> PrimExpr:
    """2ⁿ for an int32 n in [-126, 127]."""
    return _from_bits(tirx.shift_left(n + _i32(127), _i32(23)))


def _exp_reduced(x: PrimExpr, low: PrimExpr | None = None) -> PrimExpr:
    """exp(x + low) for x already within the limits; `low` is a correction far below x's last place."""

    def scaled(shifted: PrimExpr) -> PrimExpr:
        def with_integer(n: PrimExpr) -> PrimExpr:
            # The remainder is exact in its first step: n·_LN2_HIGH has at most 18 bits.
            r = _fma(n, _f32(-_LN2_LOW), _fma(n, _f32(-_LN2_HIGH), x))
            if low is not None:
                r = r + low

            def with_remainder(r: PrimExpr) -> PrimExpr:
                e = _fma(r * r, _polynomial(r, _EXP), r) + _f32(1.0)
                exponent = _bits(shifted) - _i32(_SHIFTER_BITS)

                def with_exponent(k: PrimExpr) -> PrimExpr:
                    # Two factors, so that both ends work: 2¹²⁸ is no float, and subnormal results round only once.
                    half = tirx.shift_right(k, _i32(1))
                    return _let(half, lambda h: e * _power_of_two(h) * _power_of_two(k - h), "half")

                return _let(exponent, with_exponent, "exponent")

            return _let(r, with_remainder, "r")

        return _let(shifted - _f32(_SHIFTER), with_integer, "n")

    return _let(_fma(x, _f32(_LOG2_E), _f32(_SHIFTER)), scaled, "shifted")


def exp(x: PrimExpr) -> PrimExpr:
    """eˣ within 1 ULP, subnormal results included.

    exp(-inf) = 0, exp(inf) = inf, exp(NaN) = NaN; overflow gives inf, underflow subnormals and then 0.
    """
    return _let(x, lambda x: _let(_clamp(x, _EXP_SMALLEST, _EXP_LARGEST), _exp_reduced, "clamped"), "x")


def sigmoid(x: PrimExpr) -> PrimExpr:
    """1/(1 + e⁻ˣ) within 3 ULP for x ≥ -88; 0 below (as in PyTorch, where the true value is subnormal)."""
    return _f32(1.0) / (_f32(1.0) + exp(_f32(0.0) - x))


def silu(x: PrimExpr) -> PrimExpr:
    """x·sigmoid(x) within 3 ULP for x ≥ -88; -0 below, NaN at -inf (both as in PyTorch)."""
    return _let(x, lambda x: x / (_f32(1.0) + exp(_f32(0.0) - x)), "x")


def erf(x: PrimExpr) -> PrimExpr:
    """The error function within 2 ULP; exactly ±1 from |x| = 4 on."""

    def with_x(x: PrimExpr) -> PrimExpr:
        def with_square(s: PrimExpr) -> PrimExpr:
            small = x * _polynomial(s, _ERF_SMALL)

            def with_magnitude(a: PrimExpr) -> PrimExpr:
                exponent = _f32(0.0) - _polynomial(a, _ERF_LARGE)
                large = _f32(1.0) - _let(exponent, _exp_reduced, "exponent")
                signed = tirx.Select(x < _f32(0.0), _f32(0.0) - large, large)
                return tirx.Select(tirx.abs(x) < _f32(_ERF_SMALL_LIMIT), small, signed)

            return _let(_clamp(tirx.abs(x), 0.0, _ERF_ONE), with_magnitude, "a")

        return _let(x * x, with_square, "s")

    return _let(x, with_x, "x")


def gelu(x: PrimExpr) -> PrimExpr:
    """x·Φ(x), the erf form of GELU, without cancellation in the negative tail.

    gelu(x) = max(x, 0) - |x|·Q(|x|) with Q(a) = ½·erfc(a/√2) = exp(-a²/2)·P(1/(1 + a/4)), so that the relative error stays within
    2 ULP for x > -1 and grows only with the conditioning of the tail (at most 1 + x²/2 ULP), where ½·x·(1 + erf(x/√2)) loses
    every digit below x = -5.
    """

    def with_x(x: PrimExpr) -> PrimExpr:
        def with_magnitude(a: PrimExpr) -> PrimExpr:
            def with_square(s: PrimExpr) -> PrimExpr:
                # What a·a lost in rounding, put back into the exponent.
                lost = _fma(a, a, _f32(0.0) - s)
                bell = _let(s * _f32(-0.5), lambda e: _exp_reduced(e, lost * _f32(-0.5)), "e")
                t = _f32(1.0) / _fma(a, _f32(_TAIL_SCALE), _f32(1.0))
                tail = _let(t, lambda t: a * bell * t * _polynomial(t, _TAIL), "q")
                # Where x is +inf the clamp keeps the tail finite; at -inf PyTorch's own -inf·0 is NaN, the limit is -0.
                return tirx.Select(x > _f32(0.0), x, _f32(0.0)) - tail

            return _let(a * a, with_square, "s")

        return _let(_clamp(tirx.abs(x), 0.0, 14.4), with_magnitude, "a")

    return _let(x, with_x, "x")


def _log_parts(x: PrimExpr, body: Callable[[PrimExpr, PrimExpr, PrimExpr], PrimExpr]) -> PrimExpr:
    """Splits x = 2ᵉ·(1 + f) with √½ ≤ 1 + f < √2 and passes e, f and ln(1 + f) - f to `body`; then the special values."""

    def with_x(x: PrimExpr) -> PrimExpr:
        subnormal = x < _f32(1.17549435e-38)

        def with_bits(b: PrimExpr) -> PrimExpr:
            # Shifted so that the exponent field changes at √½ instead of at 1.
            shifted = b - _i32(_SQRT_HALF_BITS)

            def with_shifted(k: PrimExpr) -> PrimExpr:
                e = tirx.Cast("float32", tirx.shift_right(k, _i32(23)))
                e = e - tirx.Select(subnormal, _f32(23.0), _f32(0.0))
                mantissa = tirx.bitwise_and(k, _i32(0x007FFFFF)) + _i32(_SQRT_HALF_BITS)

                def with_e(e: PrimExpr) -> PrimExpr:
                    def with_f(f: PrimExpr) -> PrimExpr:
                        def with_square(s: PrimExpr) -> PrimExpr:
                            y = _fma(s, _f32(-0.5), s * f * _polynomial(f, _LOG))
                            return _let(y, lambda y: body(e, f, y), "y")

                        return _let(f * f, with_square, "s")

                    return _let(_from_bits(mantissa) - _f32(1.0), with_f, "f")

                return _let(e, with_e, "e")

            return _let(shifted, with_shifted, "k")

        result = _let(_bits(tirx.Select(subnormal, x * _f32(8388608.0), x)), with_bits, "b")
        infinite = tirx.Select(x < _f32(math.inf), result, x)  # inf and NaN map to themselves
        negative = tirx.Select(x < _f32(0.0), _f32(math.nan), infinite)
        return tirx.Select(tirx.EQ(x, _f32(0.0)), _f32(-math.inf), negative)

    return _let(x, with_x, "x")


def log(x: PrimExpr) -> PrimExpr:
    """The natural logarithm within 1 ULP; log(0) = -inf, NaN for negative x, subnormal x included."""
    return _log_parts(
        x, lambda e, f, y: _fma(e, _f32(_LN2_HIGH), f + _fma(e, _f32(_LN2_LOW), y))
    )


def log2(x: PrimExpr) -> PrimExpr:
    """The logarithm to base 2 within 2 ULP, exact at powers of two; special values as in `log`."""
    # log2(e) = 1 + 0.4427 keeps the leading term f free of a rounding.
    extra = _f32(_LOG2_E - 1.0)
    return _log_parts(x, lambda e, f, y: e + (f + (y + _fma(f, extra, y * extra))))


def _sine(x: PrimExpr, quarter: int) -> PrimExpr:
    """sin(x + quarter·π/2)."""

    def with_x(x: PrimExpr) -> PrimExpr:
        def with_shifted(shifted: PrimExpr) -> PrimExpr:
            def with_integer(n: PrimExpr) -> PrimExpr:
                r = x
                for part in _HALF_PI_PARTS:
                    r = _fma(n, _f32(-part), r)

                def with_remainder(r: PrimExpr) -> PrimExpr:
                    def with_square(s: PrimExpr) -> PrimExpr:
                        sine = _fma(r * s, _polynomial(s, _SIN), r)
                        cosine = _fma(s * s, _polynomial(s, _COS), _fma(s, _f32(-0.5), _f32(1.0)))

                        def with_quadrant(q: PrimExpr) -> PrimExpr:
                            odd = tirx.NE(tirx.bitwise_and(q, _i32(1)), _i32(0))
                            chosen = tirx.Select(odd, cosine, sine)
                            sign = tirx.shift_left(tirx.bitwise_and(q, _i32(2)), _i32(30))
                            return _from_bits(tirx.bitwise_xor(_bits(chosen), sign))

                        return _let(_bits(shifted) + _i32(quarter), with_quadrant, "q")

                    return _let(r * r, with_square, "s")

                return _let(r, with_remainder, "r")

            return _let(shifted - _f32(_SHIFTER), with_integer, "n")

        value = _let(_fma(x, _f32(2.0 / math.pi), _f32(_SHIFTER)), with_shifted, "shifted")
        return tirx.Select(tirx.abs(x) <= _f32(_TRIGONOMETRIC_LIMIT), value, _f32(math.nan))

    return _let(x, with_x, "x")


def sin(x: PrimExpr) -> PrimExpr:
    """The sine: error at most 1e-7 for |x| ≤ 1e4 (2 ULP for |x| ≤ 100); NaN beyond 6e6, where the reduction has no digits left."""
    return _sine(x, 0)


def cos(x: PrimExpr) -> PrimExpr:
    """The cosine; the same bounds as `sin`."""
    return _sine(x, 1)
