"""Linear layers in bfloat16 that multiply integers: what they lose, what they cannot overflow, what LLVM emits.

`test_cpu_bf16.py` holds them to NumPy bit for bit.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest

from conformance.schedules.cpu.test_cpu_bf16 import INTEGERS, runs
from conformance.support.assembly import assembly, innermost_loops
from conformance.support.bf16 import Processor, linear, product, rounded
from conformance.support.cpus import target_for
from conformance.support.kernels import call_of, functions_of, lowered, machine_of
from conformance.support.operators import normal, rms
from harness.compiler.schedules.cpu.microkernels.vpmaddwd import LONGEST, largest_integer

AVX2 = "x86-64-v3"
PROCESSOR = Processor(integers=True)
MULTIPLY = ("vpmaddwd", "vpdpwssd")


@cache
def layer(rows: int, columns: int, depth: int) -> Any:
    """The virtual machine of a layer, which several tests run."""
    x, weight = np.zeros((rows, depth), np.float32), rounded(np.zeros((columns, depth), np.float32))
    return machine_of(lowered(linear, [x], [weight], target_for(AVX2)), target_for(AVX2))


def multiplied(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return call_of(layer(len(x), *weight.shape), [rounded(weight)])(x)


def errors(x: np.ndarray, weight: np.ndarray) -> tuple[float, float]:
    """rms errors beside the exact product of fp32 operands: those of the kernel, and of rounding both to bfloat16."""
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    halves = rounded(x).astype(np.float64) @ rounded(weight).astype(np.float64).T
    return rms(multiplied(x, weight) - exact), rms(halves - exact)


@runs(AVX2)
@pytest.mark.parametrize("depth", [256, 1024, 4736])
def test_integers_add_little_to_the_error_of_rounding(depth: int) -> None:
    actual, of_rounding = errors(normal((64, depth)), normal((96, depth), 1))
    assert actual < 1.06 * of_rounding, actual / of_rounding


@runs(AVX2)
@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("size", [30.0, 1000.0])
def test_massive_channels_do_no_more_harm_than_in_bfloat16(channels: int, size: float) -> None:
    """As trained ViTs have them: a few channels of every token are far larger than all others."""
    x, weight = normal((64, 1024)), normal((96, 1024), 1)
    x[:, 7 : 7 + 200 * channels : 200] *= size
    actual, of_rounding = errors(x, weight)
    assert actual < 1.5 * of_rounding, actual / of_rounding


@runs(AVX2)
@pytest.mark.parametrize("pairs", [1, 37, LONGEST, 4 * LONGEST])
def test_no_sum_of_the_largest_terms_overflows(pairs: int) -> None:
    """All terms of the same size: each becomes the largest integer."""
    x, weight = np.full((5, 2 * pairs), 3.0, np.float32), np.full((16, 2 * pairs), -0.5, np.float32)
    np.testing.assert_allclose(multiplied(x, weight), np.full((5, 16), -3.0 * pairs), rtol=1e-4)
    assert 2 * min(pairs, LONGEST) * largest_integer(min(pairs, LONGEST)) ** 2 < 2**31


@runs(AVX2)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_in_its_row_or_column(value: float) -> None:
    x, weight = normal((12, 600)), normal((40, 600), 1)
    expected = multiplied(x, weight)
    x[3, 599] = weight[17, 2] = value
    expected[3], expected[:, 17] = np.nan, np.nan
    np.testing.assert_array_equal(multiplied(x, weight), expected)


@runs(AVX2)
def test_rows_and_columns_of_zeros_are_zero() -> None:
    x, weight = normal((12, 600)), normal((40, 600), 1)
    x[3], weight[17] = 0.0, -0.0
    actual = multiplied(x, weight)
    assert (actual[3] == 0).all() and (actual[:, 17] == 0).all()
    assert (np.delete(np.delete(actual, 3, 0), 17, 1) != 0).all()


@runs(AVX2)
@pytest.mark.parametrize(("of_left", "of_right"), [(-66, -50), (66, -66), (93, 0)])
def test_scales_go_as_far_as_results_do(of_left: int, of_right: int) -> None:
    x, weight = normal((9, 512)), normal((20, 512), 1)
    actual = multiplied(np.ldexp(x, of_left), np.ldexp(weight, of_right))
    np.testing.assert_array_equal(actual, np.ldexp(multiplied(x, weight), of_left + of_right))


@runs(AVX2)
def test_a_layer_of_many_blocks() -> None:
    x, weight = normal((2500, 64)), normal((200, 64), 1)
    np.testing.assert_array_equal(multiplied(x, weight), product(x, rounded(weight), PROCESSOR))


def test_one_row_keeps_its_fp32_products() -> None:
    def name(rows: int) -> str:
        return functions_of(lowered(linear, [normal((rows, 64))], [rounded(normal((16, 64)))], target_for(AVX2)))[0]

    assert [name(rows) for rows in (1, 2)] == ["matmul_bf16", "matmul_bf16_vpmaddwd"]


@pytest.mark.parametrize("cpu", INTEGERS)
@pytest.mark.parametrize("rows", [96, 4, 2])
def test_sums_stay_in_registers(cpu: str, rows: int) -> None:
    """Two vectors in each row of a panel; with VNNI one instruction multiplies and adds."""
    target, fused = target_for(cpu), cpu == "cascadelake"
    text = assembly(lowered(linear, [normal((rows, 1024))], [rounded(normal((512, 1024)))], target), target)
    panel = min(rows, 8 if fused else 4)
    loops = [loop for loop in innermost_loops(text) if any(i.mnemonic in MULTIPLY for i in loop)]
    assert loops
    for loop in loops:
        shown = "\n".join(instruction.text for instruction in loop)
        multiplied, added, in_one = (
            [i for i in loop if i.mnemonic == name] for name in ("vpmaddwd", "vpaddd", "vpdpwssd")
        )
        # LLVM also takes some apart where a sum would wait for itself.
        assert len(multiplied) == len(added) and bool(in_one) == fused, shown
        assert (len(multiplied) + len(in_one)) % (2 * panel) == 0, shown
        register = r"%zmm" if fused else r"%ymm"
        assert all(re.match(register, i.operands[-1]) for i in (*multiplied, *in_one)), shown
        assert not any(instruction.spills for instruction in loop), shown
