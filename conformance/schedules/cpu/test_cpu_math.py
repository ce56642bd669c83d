"""Elementary functions of the CPU kernels: error bounds over all of fp32, special values, GELU against PyTorch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
import tvm
from tvm import relax, te

from conformance.support.operators import compiled, module_of, normal, rms
from conformance.support.place import any_cpu_target
from harness.compiler.schedules.cpu import cpu_pipeline
from harness.compiler.schedules.cpu import math as elementary

FUNCTIONS: dict[str, Callable[[relax.Expr], relax.Expr]] = {
    "exp": relax.op.exp,
    "log": relax.op.log,
    "sin": relax.op.sin,
    "cos": relax.op.cos,
    "erf": relax.op.erf,
    "sigmoid": relax.op.sigmoid,
    "silu": relax.op.nn.silu,
    "gelu": relax.op.nn.gelu,
}
ORACLES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "log": torch.log,
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: 0.5 * x * torch.special.erfc(-x / math.sqrt(2)),
}
LARGEST = float(np.finfo(np.float32).max)
BOUNDS = [
    ("exp", -math.inf, math.inf, 1.0),
    ("log", 0.0, math.inf, 0.9),
    ("sin", -LARGEST, LARGEST, 0.51),
    ("cos", -LARGEST, LARGEST, 0.51),
    ("erf", -math.inf, math.inf, 2.0),
    ("sigmoid", -88.0, math.inf, 3.0),
    ("silu", -88.0, math.inf, 3.0),
    ("gelu", -1.0, math.inf, 4.0),
    ("gelu", -12.5, math.inf, 8.0),
]
"""Function, range, bound in ULP: what the docstrings of `harness.compiler.schedules.cpu.math` promise."""
STRIDE = 499
"""Every 499th bit pattern of fp32: 8.6 million values of both signs and every exponent."""


@cache
def every_value() -> np.ndarray:
    patterns = np.arange(0, 2**32, STRIDE, dtype=np.uint64).astype(np.uint32)
    values = patterns.view(np.float32)
    values = values[~np.isnan(values)]
    return np.ascontiguousarray(values[: len(values) // 4096 * 4096])


@lru_cache(maxsize=1)
def exact_results(name: str) -> np.ndarray:
    """fp64 at `every_value`."""
    return ORACLES[name](torch.from_numpy(every_value()).double()).numpy()


@lru_cache(maxsize=2)
def results(name: str, generic: bool) -> np.ndarray:
    """What the compiled function gives at `every_value`."""
    x = every_value()
    target = any_cpu_target() if generic else None
    return compiled(FUNCTIONS[name], [x.shape], target=target)(x)


@cache
def near_multiples_of_half_pi() -> np.ndarray:
    """For every exponent of fp32 the numbers closest to multiples of π/2, closest of all 1.6e-9 of one.

    With m·2ᵉ·2/π near an integer, m is the denominator of a convergent of the continued fraction of 2ᵉ·2/π.
    """
    values = []
    with mpmath.workprec(400):
        for exponent in range(-24, 105):
            rest = mpmath.ldexp(2 / mpmath.pi, exponent)
            previous, denominator = 1, 0
            while True:
                whole = int(mpmath.floor(rest))
                previous, denominator = denominator, whole * denominator + previous
                if denominator >= 2**24:
                    break
                if denominator > 0:
                    values.append(math.ldexp(denominator, exponent))
                rest = 1 / (rest - whole)
    positive = np.unique(np.array(values).astype(np.float32))
    return np.concatenate([positive, -positive])


def ulps(actual: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Distance from the exact value in units of the last place of its fp32 rounding."""
    with np.errstate(over="ignore"):
        rounded = exact.astype(np.float32)
        unit = np.spacing(np.minimum(np.abs(rounded), np.finfo(np.float32).max)).astype(np.float64)
    with np.errstate(invalid="ignore"):
        distance = np.abs(actual.astype(np.float64) - exact) / unit
    return np.where(actual == rounded, np.where(np.isfinite(exact) & np.isfinite(rounded), distance, 0.0), distance)


@pytest.mark.parametrize("generic", [False, True], ids=["this-cpu", "any-cpu"])
@pytest.mark.parametrize(("name", "low", "high", "bound"), BOUNDS)
def test_error_stays_within_the_stated_bound(name: str, low: float, high: float, bound: float, generic: bool) -> None:
    x = every_value()
    actual, exact = results(name, generic), exact_results(name)
    inside = (x >= low) & (x <= high)
    assert inside.sum() > 1_000_000
    errors = ulps(actual[inside], exact[inside])
    worst = int(np.argmax(errors))
    assert errors[worst] <= bound, (
        f"{name}({x[inside][worst]!r}) = {actual[inside][worst]!r}, {errors[worst]:.2f} ULP off"
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_oracle_agrees_with_fifty_digits(name: str) -> None:
    exact: dict[str, Callable[[mpmath.mpf], mpmath.mpf]] = {
        "exp": mpmath.exp,
        "log": mpmath.log,
        "sin": mpmath.sin,
        "cos": mpmath.cos,
        "erf": mpmath.erf,
        "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
        "silu": lambda x: x / (1 + mpmath.exp(-x)),
        "gelu": lambda x: x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2,
    }
    x = normal((200,), seed=1, scale=5.0)
    if name == "log":
        x = np.abs(x)
    elif name in ("sin", "cos"):
        x = np.concatenate([x * np.float32(10.0**n) for n in (0, 6, 18, 36)])
    with mpmath.workdps(50):
        want = np.array([float(exact[name](mpmath.mpf(float(v)))) for v in x])
    got = ORACLES[name](torch.from_numpy(x).double()).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_special_values() -> None:
    x = np.array([np.inf, -np.inf, np.nan, 0.0, 88.75, -104.5, -103.5, 1e-45], np.float32)

    def run(name: str) -> np.ndarray:
        return compiled(FUNCTIONS[name], [x.shape])(x)

    tiny = np.float32(1e-45)
    np.testing.assert_array_equal(run("exp"), np.array([np.inf, 0, np.nan, 1, np.inf, 0, tiny, 1], np.float32))
    np.testing.assert_array_equal(run("erf")[:4], np.array([1, -1, np.nan, 0], np.float32))
    np.testing.assert_array_equal(run("sigmoid")[:4], np.array([1, 0, np.nan, 0.5], np.float32))
    np.testing.assert_array_equal(run("silu")[:4], np.array([np.inf, np.nan, np.nan, 0], np.float32))
    np.testing.assert_array_equal(run("gelu")[:4], np.array([np.inf, 0, np.nan, 0], np.float32))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("log", [math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, -1.0, -1e-45, -LARGEST]),
        ("sin", [math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-45, -1e-45, 1e-20]),
        ("cos", [math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-45, -1e-20]),
    ],
)
def test_special_values_are_those_of_pytorch(name: str, values: list[float]) -> None:
    x = np.resize(np.array(values, np.float32), 4096)
    got = compiled(FUNCTIONS[name], [x.shape])(x)
    want = ORACLES[name](torch.from_numpy(x)).numpy()
    np.testing.assert_array_equal(got, want)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(want[numbers]))


@pytest.mark.parametrize("generic", [False, True], ids=["this-cpu", "any-cpu"])
@pytest.mark.parametrize("name", ["sin", "cos"])
def test_arguments_next_to_multiples_of_half_pi(name: str, generic: bool) -> None:
    x = near_multiples_of_half_pi()
    target = any_cpu_target() if generic else None
    with mpmath.workprec(300):
        exact = np.array([float(getattr(mpmath, name)(mpmath.mpf(float(v)))) for v in x])
    assert 1e-9 < np.abs(exact).min() < 1e-7
    assert ulps(compiled(FUNCTIONS[name], [x.shape], target=target)(x), exact).max() <= 0.51


@pytest.mark.parametrize(
    ("target", "call", "vector"),
    [
        ({"mcpu": "x86-64-v3"}, r"call\w*\s+(\w+)", r"vfn?m(add|sub)\w+p[sd]\s.*%ymm"),
        (
            {"mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72"},
            r"\bbl\s+(\w+)",
            r"fml[as](\.2d|\.4s|\s+v\d+\.(2d|4s))",
        ),
    ],
    ids=["x86-64-v3", "aarch64"],
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiles_to_vector_instructions_without_calls(
    name: str, target: dict[str, str], call: str, vector: str
) -> None:
    machine = tvm.target.Target({"kind": "llvm", **target})
    library = {"expf", "logf", "sinf", "cosf", "erff"}

    def assembly(pipeline: tvm.transform.Pass | str) -> str:
        executable = relax.build(module_of(FUNCTIONS[name], [(4096,)]), machine, relax_pipeline=pipeline)
        return executable.mod.imports[0].inspect_source("asm")

    ours = assembly(cpu_pipeline(machine))
    assert not library & set(re.findall(call, ours))
    assert re.search(vector, ours)
    assert library & set(re.findall(call, assembly("default"))), "TVM's own lowering needs no replacement any more"


def test_exp_keeps_subnormal_results() -> None:
    x = np.linspace(-103.9, -87.4, 4096, dtype=np.float32)
    exact = np.exp(x.astype(np.float64))
    assert ulps(compiled(relax.op.exp, [x.shape])(x), exact).max() <= 1.0


NANS = np.array([0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC12345, 0xFFC00001], np.uint32).view(np.float32)
"""With what processors write, and with bits of other programs: memory that nobody set, a tag."""


def inside(function: Callable[[Any], Any]) -> Callable[[relax.Expr], relax.Expr]:
    """An operator of a function that kernels have inside, and no Relax operator leads to by itself."""

    def operator(x: relax.Expr) -> relax.Expr:
        def compute(values: te.Tensor) -> te.Tensor:
            return te.compute(values.shape, lambda i: function(values(i)), name="inside")

        return relax.BlockBuilder.current().call_te(compute, x)

    return operator


@pytest.mark.parametrize("vanishes", [True, False])
def test_exp_below_zero_is_exact_to_one_ulp_where_it_matters(vanishes: bool) -> None:
    operator = inside(partial(elementary.exp_below_zero, vanishes=vanishes))
    x = every_value()
    x = np.concatenate([x[(x <= 0) & (x > -110)], np.float32([-np.inf, -0.0, -3e38]), NANS])
    actual = compiled(operator, [x.shape])(x)
    with np.errstate(over="ignore", under="ignore"):
        exact = np.exp(x.astype(np.float64))
    for least, bound in ((-6, 1.0), (-16, 1.3), (-87.336, 5.0)):
        assert ulps(actual[x >= least], exact[x >= least]).max() <= bound
    below = actual[x < -87.337]
    assert (below == 0).all() if vanishes else (below > 0).all() and below.max() < 2**-125
    assert np.isnan(actual[np.isnan(x)]).all()


@pytest.mark.parametrize("scale", [0.1, 0.3, 1.0, 3.0, 10.0])
def test_gelu_is_at_least_as_accurate_as_pytorch(scale: float) -> None:
    x = normal((1 << 18,), seed=2, scale=scale)
    exact = ORACLES["gelu"](torch.from_numpy(x).double()).numpy()
    theirs = torch.nn.functional.gelu(torch.from_numpy(x)).numpy()
    assert rms(compiled(relax.op.nn.gelu, [x.shape])(x) - exact) <= 1.05 * rms(theirs - exact)


def test_gelu_keeps_its_digits_in_the_negative_tail() -> None:
    x = np.linspace(-12, -5, 2048, dtype=np.float32)
    exact = ORACLES["gelu"](torch.from_numpy(x).double()).numpy()
    theirs = torch.nn.functional.gelu(torch.from_numpy(x)).numpy()
    ours = compiled(relax.op.nn.gelu, [x.shape])(x)
    assert np.max(np.abs(ours / exact - 1)) < 1e-6
    assert np.max(np.abs(theirs / exact - 1)) > 1e-2


@pytest.mark.parametrize("generic", [False, True], ids=["this-cpu", "any-cpu"])
@pytest.mark.parametrize("vanishes", [True, False])
def test_exponentials_for_bf16_have_its_digits(vanishes: bool, generic: bool) -> None:
    x = every_value()
    x = np.concatenate([x[(x <= 0) & (x > -110)], np.float32([-np.inf, 0.0, -3e38]), NANS])
    operator = inside(partial(elementary.exp_below_zero_for_bf16, vanishes=vanishes))
    actual = compiled(operator, [x.shape], target=any_cpu_target() if generic else None)(x)
    exact = np.exp(x.astype(np.float64))
    normal_range = x > -87.33
    assert np.abs(actual[normal_range] / exact[normal_range] - 1).max() <= 2**-13
    below = actual[x < -87.337]
    assert (below == 0).all() if vanishes else (below > 0).all() and below.max() < 2**-125
    assert np.isnan(actual[np.isnan(x)]).all()
    assert (actual[x == 0] == 1).all()


@pytest.mark.parametrize("generic", [False, True], ids=["this-cpu", "any-cpu"])
def test_gelu_for_bf16_has_its_digits(generic: bool) -> None:
    x = np.concatenate([every_value(), np.float32([np.inf, -np.inf, 0.0]), NANS])
    actual = compiled(inside(elementary.gelu_for_bf16), [x.shape], target=any_cpu_target() if generic else None)(x)
    exact = np.concatenate([exact_results("gelu"), [np.inf, 0.0, 0.0], NANS])
    # Above, x itself is the result; denormal numbers have fewer digits.
    numbers = (x > -13) & np.isfinite(x) & (np.abs(exact) > 2**-120)
    assert np.abs(actual[numbers] / exact[numbers] - 1).max() <= 2**-16
    assert np.abs(actual[x <= -13] - exact[x <= -13]).max() <= 2**-126
    assert (actual[x == np.inf] == np.inf).all() and (actual[x == 0] == 0).all()
    assert np.isnan(actual[np.isnan(x)]).all()


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0, 3.0, -1.0, -0.5, 1.7])
def test_power_with_a_constant_exponent(exponent: float) -> None:
    x = np.abs(normal((1000,), seed=3)) + np.float32(0.01)
    got = compiled(lambda a: relax.op.power(a, relax.const(exponent, "float32")), [x.shape])(x)
    np.testing.assert_allclose(got, x.astype(np.float64) ** float(np.float32(exponent)), rtol=4e-7)
