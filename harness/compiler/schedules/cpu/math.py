"""Computes elementary functions in fp32 as plain TIR arithmetic, so that LLVM vectorizes them.

TVM lowers `tirx.exp`, `tirx.erf` and others to calls of the C library, one scalar at a time. The functions here take
and return a float32 expression and use only additions, products, `fma`, selects, shifts, casts and bit casts:
everything that both TVM's `VectorizeLoop` and LLVM's loop vectorizer turn into vector code. The same source serves
loops of any instruction set; `fma` falls back to a product and a sum where the machine has none, and the reductions are
exact either way. `sin` and `cos` compute in fp64, in vectors of half as many elements.

Every polynomial is a weighted minimax fit, made for this file by a Remez exchange in 50 digits and then rounded to the
type that it is evaluated in; the weight is that of the relative error of the final result. Bounds in the docstrings are
in units in the last place (ULP) of the correctly rounded result, measured against float64 over the whole range of fp32
by `conformance/schedules/cpu/test_cpu_math.py`, with and without fma.

Intermediate values are bound with `Let`, since TIR has no shared subexpressions: without it a polynomial in x would
copy x's expression once per coefficient.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import fp32

_LOG2_E = 1.4426950408889634
_SHIFTER = 12582912.0
"""1.5·2²³: adding it rounds a float to the nearest integer and leaves that integer in the low bits."""
_SHIFTER_BITS = 0x4B400000

_EXPONENT_SHIFTER = _SHIFTER + 127.0
"""The same, which leaves the integer as the exponent of fp32 has it, 127 more."""

_EXP_LARGEST = 88.8
"""Above it exp overflows (the largest finite result is at 88.7228)."""
_EXP_NORMAL = -87.33654
"""Below it exp is subnormal."""
_EXP_SMALLEST = -104.0
"""Below it exp rounds to zero (the smallest subnormal result is at -103.9721)."""
_LN2_HIGH = 0.693359375
"""The first 10 bits of ln 2: its product with an exponent is exact even without fma."""
_LN2_LOW = -2.12194442e-4
_EXP = (0.49999994, 0.166665152, 0.041668456, 0.00836941879, 0.00138131483)
"""(eʳ - 1 - r)/r² on |r| ≤ 0.35; relative error 2⁻²⁸ of eʳ."""
_EXP2_SHORT = (0.693284035, 0.242218882, 0.0550069883)
"""(2ᶠ - 1)/f on |f| ≤ 0.501; relative error 2⁻¹³·² of 2ᶠ."""
_EXP2 = (0.693123996, 0.24024111, 0.055908002, 0.00958270114)
"""The same; relative error 2⁻¹⁸·⁴."""

_SMALLEST_NORMAL = 2.0**-126
_LARGEST = (2.0 - 2.0**-23) * 2.0**127
_INFINITY_BITS = 0x7F800000
_NAN_BITS = 0x7FC00000
_SQRT_HALF_BITS = 0x3F3504F3
_FRACTION_MASK = 0x007FFFFF
_LOG = (
    *(0.33333313, -0.2500001, 0.2000212, -0.16667996, 0.1421952),
    *(-0.12405544, 0.11888377, -0.11676052, 0.06746637),
)
"""(ln(1 + f) - f + f²/2)/f³ on √½ ≤ 1 + f ≤ √2; relative error 2⁻²⁸ of the logarithm."""

_F64_SHIFTER = 6755399441055744.0
"""1.5·2⁵²: like `_SHIFTER`, for a double below 2⁵¹."""
_TWO_OVER_PI = (
    (math.inf, ("0x1.abe8fa9p-79", "0x1.4ddc0dbp-108", "0x1.8a5664f10e410p-138")),
    (2.0**103, ("0x1.4a7f09cp-54", "0x1.5f47d4dp-82", "0x1.bb81b6c52b328p-113")),
    (2.0**77, ("0x1.727220ap-27", "0x1.29fc275p-56", "0x1.f47d4d377036ep-86")),
    (2.0**51, ("0x1.45f306dp-1", "0x1.9391054p-30", "0x1.4fe13abe8fa9ap-59")),
)
"""2/π in parts of 29, 29 and 53 bits, for magnitudes below a limit, without the bits that count whole turns.

An fp32 number of at least 2ᵃ is a multiple of 2ᵃ⁻²³, so bits of 2/π with the weight 2²⁵⁻ᵃ or more contribute multiples
of 4 quarter turns. What is left times a number below 2ᵃ⁺²⁶ stays below 2⁵¹, where `_F64_SHIFTER` works, and its
products with the first two parts are exact in fp64."""
_SIN = (1.5707963267861704, -0.6459640958599194, 0.07969257621859019, -0.0046812198777943246, 0.00015810445682646118)
"""sin(πf/2)/f in f² on |f| ≤ 0.51, in fp64; relative error 2⁻³⁷."""
_COS = (0.9999999999311874, -1.2337005376966796, 0.2536691406141516, -0.020859638720548523, 0.0009027131961893494)
"""cos(πf/2) in f² on |f| ≤ 0.51, in fp64; relative error 2⁻³³·⁷."""

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
_TAIL_END_FOR_BF16 = 13.2
"""exp(-a²/2) is subnormal from 13.216 on."""
_TAIL_FOR_BF16 = (0.188821718, 0.303946137, 0.387044519, 0.373194009, 0.244417086, 0.0553472564, -0.0774157494)
"""The same on 0 ≤ a ≤ 13.22; relative error 2⁻¹⁸·⁷."""


def _f64(value: float) -> T.Expr:
    return T.const(value, "float64")


def _i32(value: int) -> T.Expr:
    return T.const(value, "int32")


class _Bindings:
    """Values bound to names one after the other: `around` wraps an expression that uses them into their `Let`s."""

    def __init__(self) -> None:
        self._bound: list[tuple[T.Var, T.Expr]] = []

    def __call__(self, value: T.Expr, name: str) -> T.Expr:
        if isinstance(value, T.Var):
            return value
        variable = T.Var(name, value.ty)
        self._bound.append((variable, value))
        return variable

    def around(self, body: T.Expr) -> T.Expr:
        for variable, value in reversed(self._bound):
            body = T.Let(variable, value, body)
        return body


def _bits(x: T.Expr) -> T.Expr:
    return T.reinterpret("int32", x)


def _from_bits(x: T.Expr) -> T.Expr:
    return T.reinterpret("float32", x)


def _polynomial(x: T.Expr, coefficients: tuple[float, ...], constant: Callable[[float], T.Expr] = fp32) -> T.Expr:
    """Evaluates a polynomial by Horner's scheme; the first coefficient is the constant one."""
    result = constant(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = T.fma(result, x, constant(coefficient))
    return result


def _clamp(x: T.Expr, low: float, high: float) -> T.Expr:
    """Returns x limited to [low, high]; NaN stays NaN (every comparison with it is false)."""
    return T.Select(x > fp32(high), fp32(high), T.Select(x < fp32(low), fp32(low), x))


def _power_of_two(n: T.Expr) -> T.Expr:
    """Computes 2ⁿ for an int32 n in [-126, 127]."""
    return _from_bits(T.shift_left(n + _i32(127), _i32(23)))


def _exp_reduced(x: T.Expr, low: T.Expr | None = None) -> T.Expr:
    """Computes exp(x + low) for x already within the limits; `low` is a correction of at most 0.04."""
    let = _Bindings()
    x = let(x, "x")
    shifted = let(T.fma(x, fp32(_LOG2_E), fp32(_SHIFTER)), "shifted")
    n = let(shifted - fp32(_SHIFTER), "n")
    # The remainder is exact in its first step: n·_LN2_HIGH has at most 18 bits.
    remainder = T.fma(n, fp32(-_LN2_LOW), T.fma(n, fp32(-_LN2_HIGH), x))
    r = let(remainder if low is None else remainder + low, "r")
    power = T.fma(r * r, _polynomial(r, _EXP), r) + fp32(1.0)
    exponent = let(_bits(shifted) - _i32(_SHIFTER_BITS), "exponent")
    # Two factors, so that both ends work: 2¹²⁸ is no float, and subnormal results round only once.
    half = let(T.shift_right(exponent, _i32(1)), "half")
    return let.around(power * _power_of_two(half) * _power_of_two(exponent - half))


def exp(x: T.Expr) -> T.Expr:
    """Computes eˣ within 1 ULP, subnormal results included.

    exp(-inf) = 0, exp(inf) = inf, exp(NaN) = NaN; overflow gives inf, underflow subnormals and then 0.
    """
    let = _Bindings()
    return let.around(_exp_reduced(_clamp(let(x, "x"), _EXP_SMALLEST, _EXP_LARGEST)))


def _nearest_power(let: _Bindings, x: T.Expr, factor: float) -> tuple[T.Expr, T.Expr]:
    """Returns n, the integer nearest to factor·x, which is in [-126, 127], and 2ⁿ; of NaN, NaN and any number.

    So whoever scales by 2ⁿ has to multiply, because an addition to the exponent of a NaN may make a number of it.
    """
    shifted = let(T.fma(x, fp32(factor), fp32(_EXPONENT_SHIFTER)), "shifted")
    n = let(shifted - fp32(_EXPONENT_SHIFTER), "n")
    return n, let(_from_bits(T.shift_left(_bits(shifted), _i32(23))), "power")


def exp_below_zero(x: T.Expr, *, flush_subnormals: bool = True) -> T.Expr:
    """Computes eˣ for the terms of a softmax, x ≤ 0, of which the largest is 1; exp(NaN) = NaN.

    Within 1 ULP for x > -6, 1.3 ULP for x > -16, where eˣ is 1e-7, and 5 ULP below: the remainder is found in one step,
    and the product n·ln2 in it has an error of n·2e-9.

    Args:
        x: The exponent.
        flush_subnormals: Whether results below 2⁻¹²⁶, and of -inf, are 0; otherwise they are 2⁻¹²⁶.
    """
    let = _Bindings()
    x = let(x, "x")
    limited = let(T.Select(x < fp32(_EXP_NORMAL), fp32(_EXP_NORMAL), x), "limited")
    n, power = _nearest_power(let, limited, _LOG2_E)
    r = let(T.fma(n, fp32(-math.log(2.0)), limited), "r")
    scaled = T.fma(T.fma(r * r, _polynomial(r, _EXP), r), power, power)
    return let.around(T.Select(x < fp32(_EXP_NORMAL), fp32(0.0), scaled) if flush_subnormals else scaled)


def _exp2(let: _Bindings, x: T.Expr, factor: float, coefficients: tuple[float, ...]) -> T.Expr:
    """Computes 2 to the power of factor·x, which is in [-126, 0], to the digits of the polynomial; 1 for x = 0."""
    n, power = _nearest_power(let, x, factor)
    f = let(T.fma(x, fp32(factor), fp32(0.0) - n), "f")
    return T.fma(_polynomial(f, coefficients), f * power, power)


def exp_below_zero_for_bf16(x: T.Expr, *, flush_subnormals: bool = True) -> T.Expr:
    """Computes `exp_below_zero` within 2⁻¹³ of the result for x > -87, enough before a rounding to bfloat16."""
    let = _Bindings()
    x = let(x, "x")
    limited = let(T.Select(x < fp32(_EXP_NORMAL), fp32(_EXP_NORMAL), x), "limited")
    power = _exp2(let, limited, _LOG2_E, _EXP2_SHORT)
    return let.around(T.Select(x < fp32(_EXP_NORMAL), fp32(0.0), power) if flush_subnormals else power)


def log(x: T.Expr) -> T.Expr:
    """Computes the natural logarithm within 0.9 ULP, of subnormal numbers too.

    log(±0) = -inf, log(inf) = inf, log(NaN) = NaN; NaN for negative numbers.
    """
    let = _Bindings()
    x = let(x, "x")
    subnormal = x < fp32(_SMALLEST_NORMAL)
    normal = let(T.Select(subnormal, x * fp32(2.0**23), x), "normal")
    # normal = 2ᵏ·m with m from √½ to √2; the subtraction carries into the exponent where the fraction is above √2.
    offset = let(_bits(normal) - _i32(_SQRT_HALF_BITS), "offset")
    m = _from_bits(T.bitwise_and(offset, _i32(_FRACTION_MASK)) + _i32(_SQRT_HALF_BITS))
    f = let(m - fp32(1.0), "f")
    exponent = T.shift_right(offset, _i32(23)) - T.Select(subnormal, _i32(23), _i32(0))
    k = let(exponent.astype("float32"), "k")
    # high + f is split into its rounding and the error of that, since |high| is 0 or above |f|; high is exact.
    high = let(k * fp32(_LN2_HIGH), "high")
    total = let(high + f, "total")
    rest = (high - total) + f
    tail = f * f * T.fma(f, _polynomial(f, _LOG), fp32(-0.5))
    result = total + (rest + T.fma(k, fp32(_LN2_LOW), tail))
    outside = T.Select(x == fp32(0.0), _from_bits(_i32(_INFINITY_BITS - 2**31)), _from_bits(_i32(_NAN_BITS)))
    finite = T.Select(x > fp32(_LARGEST), x, result)
    return let.around(T.Select(x > fp32(0.0), finite, outside))


def _quarter_turns(let: _Bindings, x: T.Expr) -> tuple[T.Expr, T.Expr]:
    """Returns (f, q) with x = (f + q)·π/2 up to whole turns: f a float64 within ±0.51, NaN for ±inf; q an int32.

    The error of f is below 2⁻⁵⁷ + 2⁻⁵²·|f|, and without the first term while |x| < π/4. From there on no fp32 number is
    closer than 2⁻³⁰ to a multiple of π/2.
    """

    def part(n: int) -> T.Expr:
        result = _f64(float.fromhex(_TWO_OVER_PI[0][1][n]))
        for limit, parts in _TWO_OVER_PI[1:]:
            result = T.Select(T.abs(x) < fp32(limit), _f64(float.fromhex(parts[n])), result)
        return result

    def split(value: T.Expr) -> tuple[T.Expr, T.Expr]:
        """Returns the nearest integer, once in its low bits and once as a number."""
        shifted = let(value + _f64(_F64_SHIFTER), "shifted")
        return T.reinterpret("int64", shifted), let(shifted - _f64(_F64_SHIFTER), "integer")

    wide = let(x.astype("float64"), "wide")
    high, middle = let(wide * part(0), "high"), let(wide * part(1), "middle")
    high_bits, high_integer = split(high)
    middle_bits, middle_integer = split(middle)
    high_rest, middle_rest = let(high - high_integer, "rest"), let(middle - middle_integer, "rest")
    sum_bits, sum_integer = split(high_rest + middle_rest)
    # Exact up to here; the differences are formed first, so that the one rounding is relative to what they leave.
    f = let(T.fma(wide, part(2), (high_rest - sum_integer) + middle_rest), "f")
    return f, let((high_bits + middle_bits + sum_bits).astype("int32"), "quarters")


def _sine(x: T.Expr, quarters: int) -> T.Expr:
    """Computes sin(x + quarters·π/2)."""
    let = _Bindings()
    x = let(x, "x")
    f, q = _quarter_turns(let, x)
    q = let(q + _i32(quarters), "quadrant") if quarters else q
    square = let(f * f, "square")
    sine = let(_bits((f * _polynomial(square, _SIN, _f64)).astype("float32")), "sine")
    cosine = _bits(_polynomial(square, _COS, _f64).astype("float32"))
    # The cosine in odd quadrants, the sign changed in the last two; by masks, since TE widens integers of conditions.
    odd = _i32(0) - T.bitwise_and(q, _i32(1))
    magnitude = T.bitwise_xor(sine, T.bitwise_and(T.bitwise_xor(sine, cosine), odd))
    sign = T.shift_left(T.bitwise_and(q, _i32(2)), _i32(30))
    return let.around(_from_bits(T.bitwise_xor(magnitude, sign)))


def sin(x: T.Expr) -> T.Expr:
    """Computes the sine within 0.51 ULP for all of fp32, huge numbers too; ±0 for ±0, NaN for ±inf and NaN."""
    return _sine(x, 0)


def cos(x: T.Expr) -> T.Expr:
    """Computes the cosine within 0.51 ULP for all of fp32, the largest numbers included; NaN for ±inf and NaN."""
    return _sine(x, 1)


def sigmoid(x: T.Expr) -> T.Expr:
    """Computes 1/(1 + e⁻ˣ) within 3 ULP for x ≥ -88; 0 below (as PyTorch, where the true value is subnormal)."""
    return fp32(1.0) / (fp32(1.0) + exp(fp32(0.0) - x))


def silu(x: T.Expr) -> T.Expr:
    """Computes x·sigmoid(x) within 3 ULP for x ≥ -88; -0 below, NaN at -inf (both as in PyTorch)."""
    let = _Bindings()
    x = let(x, "x")
    return let.around(x / (fp32(1.0) + exp(fp32(0.0) - x)))


def erf(x: T.Expr) -> T.Expr:
    """Computes the error function within 2 ULP; exactly ±1 from |x| = 4 on."""
    let = _Bindings()
    x = let(x, "x")
    square = let(x * x, "square")
    small = T.fma(x, _polynomial(square, _ERF_SMALL), x)
    a = let(_clamp(T.abs(x), 0.0, _ERF_ONE), "a")
    large = let(fp32(1.0) - _exp_reduced(fp32(0.0) - _polynomial(a, _ERF_LARGE)), "large")
    signed = T.Select(x < fp32(0.0), fp32(0.0) - large, large)
    return let.around(T.Select(T.abs(x) < fp32(_ERF_SMALL_LIMIT), small, signed))


def gelu(x: T.Expr) -> T.Expr:
    """Computes x·Φ(x), the erf form of GELU, without cancellation in the negative tail.

    For |x| < 1 it is x·(½ + x·P(x²)), beyond max(x, 0) - |x|·Q(|x|) with Q(a) = ½·erfc(a/√2) = exp(-a²/2)·t·P(t - ½)
    and t = 1/(1 + a/4). Within 4 ULP for x > -1 and 8 ULP below, where ½·x·(1 + erf(x/√2)) loses every digit from x =
    -5 on. gelu(inf) = inf; gelu(-inf) = 0, the limit, where PyTorch computes -inf·0 = NaN.
    """
    let = _Bindings()
    x = let(x, "x")
    a = let(_clamp(T.abs(x), 0.0, _TAIL_END), "a")
    small = x * T.fma(x, _polynomial(let(a * a, "square"), _GELU_SMALL), fp32(0.5))
    # a² = high² + (a - high)·(a + high), both without a rounding error that the exponential would magnify.
    high = let(_from_bits(T.bitwise_and(_bits(a), _i32(-4096))), "high")
    low = (a - high) * (a + high) * fp32(-0.5)
    bell = _exp_reduced(high * high * fp32(-0.5), low)
    t = let(fp32(1.0) / T.fma(a, fp32(_TAIL_SCALE), fp32(1.0)), "t")
    tail = a * t * _polynomial(t - fp32(0.5), _TAIL) * bell
    large = T.Select(x > fp32(0.0), x, fp32(0.0)) - tail
    return let.around(T.Select(a < fp32(_GELU_SMALL_LIMIT), small, large))


def gelu_for_bf16(x: T.Expr) -> T.Expr:
    """Computes `gelu` within 2⁻¹⁶ of the result for x > -13, enough before a rounding to bfloat16.

    Below it is at most 2⁻¹²⁶ in magnitude. One formula serves all numbers, max(x, 0) - |x|·Q(|x|) as in `gelu`.
    """
    let = _Bindings()
    x = let(x, "x")
    a = let(_clamp(T.abs(x), 0.0, _TAIL_END_FOR_BF16), "a")
    bell = _exp2(let, let(a * a, "square"), -0.5 * _LOG2_E, _EXP2)
    t = let(fp32(1.0) / T.fma(a, fp32(_TAIL_SCALE), fp32(1.0)), "t")
    tail = a * t * _polynomial(t - fp32(0.5), _TAIL_FOR_BF16) * bell
    return let.around(T.Select(x > fp32(0.0), x, fp32(0.0)) - tail)
