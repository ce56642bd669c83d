"""Attention that multiplies bfloat16 on CPUs with an instruction for pairs: both products, whatever the lengths."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm
import tvm_ffi
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from tvm import tirx

from conformance.schedules.cpu.test_cpu_attention_streaming import workspace
from conformance.schedules.cpu.test_cpu_bf16 import (
    ARM_PRODUCTS,
    DOT_PRODUCTS,
    WITHOUT_INSTRUCTION,
    runs,
    with_instruction,
)
from conformance.schedules.cpu.test_cpu_threads import hold_module as hold_on_threads
from conformance.support.assembly import assembly, product_loops
from conformance.support.attention import attention, attention_bf16, hold_beyond_the_last_key, hold_padding, operands
from conformance.support.bf16 import hold_to_upstream
from conformance.support.cpus import target_for
from conformance.support.examples import examples
from conformance.support.kernels import call_of, functions_of, lowered, lowered_for, machine_of, run
from conformance.support.operators import normal, rms
from conformance.support.place import computes
from harness.compiler.lowering.precision import lower_precision
from harness.compiler.lowering.route import Route, lower
from harness.compiler.schedules.common.graph import is_call
from harness.compiler.schedules.cpu import cpu_pipeline
from harness.core.precision import PRECISIONS

HALF_STEP = 2.0**-8
"""How far, in relation to itself, a number is from the nearest bfloat16 at most."""


def rounded(array: np.ndarray) -> np.ndarray:
    return array.astype(ml_dtypes.bfloat16).astype(np.float64)


def softmax_of(arrays: list[np.ndarray], bias: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """In float64, of operands that are rounded: exponentials [batch, head, query, key], of which the largest is 1 or
    all are 0, and values [batch, head, key, channel]."""
    scale = np.float32(arrays[0].shape[-1] ** -0.5)
    query, key, value = (rounded(x).transpose(0, 2, 1, 3) for x in (arrays[0] * scale, *arrays[1:3]))
    scores = query @ key.transpose(0, 1, 3, 2) + (0.0 if bias is None else bias)
    highest = scores.max(-1, keepdims=True)
    return np.exp(scores - np.where(np.isfinite(highest), highest, 0.0)), value


def attended(exponentials: np.ndarray, weights: np.ndarray, value: np.ndarray) -> np.ndarray:
    """[batch, query, head, channel]: weights times values over the sum of exponentials; zero where there are none."""
    sums = exponentials.sum(-1, keepdims=True)
    return ((weights @ value) / np.where(sums == 0.0, 1.0, sums)).transpose(0, 2, 1, 3)


def hold_rounded(actual: np.ndarray, arrays: list[np.ndarray], bias: np.ndarray | None = None) -> None:
    """Nothing is rounded but operands and weights: no result is farther off than its weights may be."""
    exponentials, value = softmax_of(arrays, bias)
    exact = attended(exponentials, exponentials, value)
    bound = HALF_STEP * attended(exponentials, exponentials, np.abs(value)) + 1e-5 * np.abs(value).max()
    assert actual.shape == exact.shape
    assert (np.abs(actual - exact) <= bound).all()
    expected = rms(attended(exponentials, rounded(exponentials), value) - exact)
    assert rms(actual - exact) <= 1.5 * expected + 1e-5 * rms(exact)


def masks_of(shape: tuple[int, ...], share: float) -> np.ndarray:
    """A bias that masks this share of the keys, and all of them for the first query."""
    bias = normal(shape, 3)
    bias[np.random.default_rng(0).random(shape) < share] = -np.inf
    bias[..., 0, :] = -np.inf
    return bias


# --- against float64 ---


@with_instruction
@examples(6)
@given(
    batch=st.integers(1, 2),
    queries=st.sampled_from([9, 17, 48, 97]),
    keys=st.sampled_from([1, 2, 12, 37, 201, 577, 1155, 1183]),
    heads=st.integers(1, 2),
    extents=st.sampled_from([(16, 16), (64, 64), (72, 20), (256, 64), (130, 256)]),
    masked=st.sampled_from([None, 0.5]),
)
def test_any_size(
    cpu: str, batch: int, queries: int, keys: int, heads: int, extents: tuple[int, int], masked: float | None
) -> None:
    """Odd numbers of keys in one block, in equal blocks and streamed; the first query has no key."""
    arrays = operands(batch, queries, keys, heads, *extents)
    bias = None if masked is None else masks_of((1, heads, queries, keys), masked)
    actual = run(attention_bf16(), [*arrays, *([] if bias is None else [bias])], target=target_for(cpu))
    hold_rounded(actual, arrays, bias)
    assert bias is None or (actual[:, 0] == 0).all()


@with_instruction
@pytest.mark.parametrize(("keys", "channels"), [(576, 64), (201, 32)])
def test_weights_are_rounded_to_the_nearest(cpu: str, keys: int, channels: int) -> None:
    """Of one block of keys, which has one highest score: but near ties, what float64 gives of rounded weights.

    `exp_below_zero_for_bf16` is within 2⁻¹³ of a weight w in [1, 2), which moves it past a tie with a probability of at
    most w·2⁻¹³/2⁻⁷, 1.44/64 on average, and then changes it by 2⁻⁷, whose square is 12 times that of rounding. To the
    error of rounding itself, 2⁻⁷/√12 at most, the exponential adds (2⁻¹³/(2⁻⁷/√12))²/2 = 0.2 % in quadrature.
    Weights that are cut off instead differ by √12·√½ = 2.4 times rounding, and are twice as far from the exact result.
    """
    arrays = operands(2, 96, keys, 2, channels)
    exponentials, value = softmax_of(arrays)
    exact = attended(exponentials, exponentials, value)
    expected = attended(exponentials, rounded(exponentials), value)
    rounding = rms(expected - exact)
    actual = run(attention_bf16(), arrays, target=target_for(cpu))
    assert rms(actual - expected) < np.sqrt(12 * 1.44 / 64) * rounding
    assert rms(actual - exact) < 1.02 * rounding


@with_instruction
def test_values_are_rounded_to_the_nearest_and_ties_to_even(cpu: str) -> None:
    """One key has the weight one: what is left of a value is what `ml_dtypes` rounds it to."""
    bits = np.arange(0x3F800000, 0x3F830000, 0x0FFF, np.uint32)
    value = np.concatenate([bits, bits | 0x8000, [0x7F7FFFFF, 0xFF800000]]).astype(np.uint32).view(np.float32)
    arrays = [*operands(1, 20, 1, 1, 16)[:2], value.reshape(1, 1, 1, -1)]
    actual = run(attention_bf16(), arrays, target=target_for(cpu))
    with np.errstate(over="ignore"):
        expected = value.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(actual, np.broadcast_to(expected, actual.shape))


@with_instruction
@pytest.mark.parametrize(
    ("corner", "queries", "keys"),
    [("TopLeft", 32, 32), ("TopLeft", 5, 41), ("BottomRight", 41, 17), ("BottomRight", 30, 1183)],
)
def test_causal(cpu: str, corner: str, queries: int, keys: int) -> None:
    arrays = operands(2, queries, keys, 2, 64)
    offset = 0 if corner == "TopLeft" else keys - queries
    seen = np.arange(keys) <= np.arange(queries)[:, None] + offset
    actual = run(attention_bf16(corner), arrays, target=target_for(cpu))
    hold_rounded(actual, arrays, np.where(seen, 0.0, -np.inf))


@with_instruction
@pytest.mark.parametrize("keys", [36, 1183])
def test_boolean_mask(cpu: str, keys: int) -> None:
    seen = np.random.default_rng(0).random((2, 1, 20, keys)) < 0.5
    seen[:, :, 7] = False
    arrays = operands(2, 20, keys, 3, 32)
    actual = run(attention_bf16(), [*arrays, seen], target=target_for(cpu))
    hold_rounded(actual, arrays, np.where(seen, 0.0, -np.inf))
    assert (actual[:, 7] == 0).all()


@with_instruction
@pytest.mark.parametrize("keys", [37, 1183])
def test_nan_stays_in_its_query_and_head(cpu: str, keys: int) -> None:
    arrays = operands(1, 40, keys, 2, 32)
    arrays[0][0, 5, 1, 3] = np.nan
    actual = run(attention_bf16(), arrays, target=target_for(cpu))
    assert np.isnan(actual[0, 5, 1]).all() and np.isnan(actual).sum() == 32


# --- numbers of keys that are not known, and what lies behind the last one ---


@with_instruction
@pytest.mark.parametrize("biased", [False, True])
def test_any_number_of_keys(cpu: str, biased: bool) -> None:
    n = tirx.Var("n", "int64")
    bias = ((1, 1, 1, n),) if biased else ()
    module = lowered_for(attention_bf16(), [(2, 30, 1, 72), (2, n, 1, 72), (2, n, 1, 40), *bias], target_for(cpu))
    assert functions_of(module) == ["attention_bf16"]
    call = call_of(machine_of(module, target_for(cpu)))
    for keys in (1, 63, 65, 601, 1400):
        arrays = operands(2, 30, keys, 1, 72, 40)
        extra = [normal((1, 1, 1, keys), 3)] if biased else []
        hold_rounded(call(*arrays, *extra), arrays, *extra)


@with_instruction
def test_what_lies_behind_the_last_key_changes_nothing(cpu: str) -> None:
    """NaN in the tensors, and in the workspace where the keys of a longer call lay."""
    n = tirx.Var("n", "int64")
    machine = machine_of(
        lowered_for(attention_bf16(), [(1, 30, 1, 72), (1, n, 1, 72), (1, n, 1, 72)], target_for(cpu)), target_for(cpu)
    )
    hold_beyond_the_last_key(machine, (1, 131, 601))


@with_instruction
def test_padding_with_a_mask_changes_nothing(cpu: str) -> None:
    n = tirx.Var("n", "int64")
    shapes = [(1, 30, 2, 64), (1, n, 2, 64), (1, n, 2, 64), (1, 1, 1, n)]
    hold_padding(call_of(machine_of(lowered_for(attention_bf16(), shapes, target_for(cpu)), target_for(cpu))))


@runs("cooperlake")
@pytest.mark.parametrize("keys", [576, 1155, 1183])
def test_threads_do_not_change_a_number(keys: int, tmp_path: Path) -> None:
    arrays, target = operands(1, 200, keys, 2, 72), target_for("cooperlake")
    hold_on_threads(lowered(attention_bf16(), arrays, target=target), target, tmp_path, arrays)


# --- what LLVM makes of it ---


@pytest.mark.parametrize(
    ("cpu", "biased"),
    [
        *(("znver4", False), ("znver4", True), ("neoverse-v1", True)),
        *(pytest.param(cpu, False, marks=pytest.mark.wide) for cpu in ("sapphirerapids", "apple-m2")),
    ],
)
@pytest.mark.parametrize("shape", [(576, 576, 64, 64), (200, 201, 32, 32), (200, 5184, 256, 256), (48, 1183, 256, 64)])
def test_sums_stay_in_registers(cpu: str, shape: tuple[int, int, int, int], biased: bool) -> None:
    """Scores and result: two products of pairs, each with enough sums to hide the latency of an addition."""
    queries, keys, channels, width = shape
    target = target_for(cpu)
    shapes = [(1, queries, 2, channels), (1, keys, 2, channels), (1, keys, 2, width)]
    module = lowered_for(attention_bf16(), [*shapes, *([(1, 1, queries, keys)] if biased else [])], target)
    # Keys and values that are packed a block at a time are multiplied with vectors.
    streams = functions_of(module) == ["attention_bf16"]
    wanted = "vdpbf16ps" if cpu not in ARM_PRODUCTS else "bfdot" if streams else "bfmmla"
    loops = [loop for loop in product_loops(assembly(module, target)) if any(i.operation == wanted for i in loop.fused)]
    assert len(loops) >= 2
    for loop in loops:
        shown = "\n".join(instruction.text for instruction in loop.instructions)
        assert not loop.spills, shown
        assert {i.operation for i in loop.fused} == {wanted}, shown
        assert len(loop.accumulators) >= 8 and len(loop.fused) % len(loop.accumulators) == 0, shown
        assert cpu in ARM_PRODUCTS or all(i.written[0].startswith("%zmm") for i in loop.fused), shown


# --- where fp32 stays ---

FEW, ODD, MANY = (2, 640, 64), (40, 640, 17), (40, 640, 64)
"""Queries, keys, channels."""


def module_of(cpu: str, shape: tuple[int, int, int], half: bool) -> tvm.IRModule:
    queries, keys, channels = shape
    shapes = [(1, queries, 1, channels), (1, keys, 1, channels), (1, keys, 1, channels)]
    return lowered_for(attention_bf16() if half else attention(), shapes, target_for(cpu))


@pytest.mark.parametrize(
    ("cpu", "shape"),
    [*((cpu, MANY) for cpu in WITHOUT_INSTRUCTION), ("znver4", FEW), ("znver4", ODD)],
    ids=[*WITHOUT_INSTRUCTION, "few queries", "an odd number of channels"],
)
def test_the_kernel_is_that_of_fp32(cpu: str, shape: tuple[int, int, int]) -> None:
    """Where shifts would take the place of an instruction, where keys are read as they lie, where nothing is a pair."""
    half, single = (module_of(cpu, shape, half) for half in (True, False))
    assert functions_of(half) == ["attention"]
    assert tvm_ffi.structural_equal(half["attention"], single["attention"], map_free_vars=True)


@pytest.mark.parametrize("cpu", [*DOT_PRODUCTS, *ARM_PRODUCTS])
def test_the_kernel_is_that_of_bf16(cpu: str) -> None:
    wanted = "attention_bf16_bfmmla" if cpu in ARM_PRODUCTS else "attention_bf16"
    assert functions_of(module_of(cpu, MANY, half=True)) == [wanted]


@with_instruction
def test_what_falls_to_tvm_is_as_in_fp32(cpu: str) -> None:
    """An attention whose queries are counted when it runs, for which there is no kernel here."""
    n = tirx.Var("n", "int64")
    shapes = [(1, n, 1, 32), (1, 40, 1, 32), (1, 40, 1, 32)]
    arrays = operands(1, 9, 40, 1, 32)
    half, single = (
        call_of(machine_of(lowered_for(operator, shapes, target_for(cpu)), target_for(cpu)))(*arrays)
        for operator in (attention_bf16(), attention())
    )
    np.testing.assert_array_equal(half, single)


@pytest.mark.parametrize("shape", [(5184, 5184, 256), (5184, 52000, 64)])
def test_workspace_is_smaller_than_that_of_fp32(shape: tuple[int, int, int]) -> None:
    """Of keys that stream, with eight threads."""
    kernels_of = ((True, "attention_bf16"), (False, "attention"))
    half, single = (workspace(module_of("znver4", shape, half)[name]) for half, name in kernels_of)
    assert half[0] + 8 * half[1] < single[0] + 8 * single[1]


# --- from an imported module on ---


class Attention(nn.Module):
    """Attention of heads that a linear layer makes, and one of few queries."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all, self.few = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (part.unflatten(2, (2, 32)).transpose(1, 2) for part in self.all(x).chunk(3, 2))
        first = self.few(x[:, :1]).unflatten(2, (2, 32)).transpose(1, 2)
        attend = functional.scaled_dot_product_attention
        return attend(q, k, v).transpose(1, 2).flatten(2), attend(first, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("cpu", ["cooperlake", "x86-64-v4"])
def test_a_module_in_bf16_is_no_less_accurate_than_upstream(cpu: str) -> None:
    target, block, names = target_for(cpu), Attention().eval(), ("many", "few")
    args = (torch.randn(1, 201, 64, generator=torch.Generator().manual_seed(1)),)
    made = lower(block, args, Route(precision="bf16"))
    module = cpu_pipeline(target)(made.module)
    found = {name for name in functions_of(module) if name.startswith("attention")}
    assert ("attention_bf16" in found) == (cpu == "cooperlake") and len(found) == 2
    if cpu != "cooperlake":
        return
    if not computes(target):
        pytest.skip("this machine cannot run it")
    hold_to_upstream(block, made, module, args, names, target)


class Two(nn.Module):
    """Attention to itself, twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = functional.scaled_dot_product_attention(x, x, x)
        return functional.scaled_dot_product_attention(first, first, first)


def test_attention_that_stays_float32_has_the_fp32_kernel() -> None:
    """One of two, as an error budget chooses: the other one is in bfloat16."""
    imported = lower(Two().eval(), (torch.randn(1, 2, 40, 32),), Route()).module
    bindings = imported["main"].body.blocks[0].bindings
    first = next(binding.var.name for binding in bindings if is_call(binding.value, "relax.nn.attention"))
    made = lower_precision(imported, PRECISIONS["bf16"], (first,))
    names = functions_of(cpu_pipeline(target_for("znver4"))(made))
    assert [name for name in names if name.startswith("attention")] == ["attention", "attention_bf16"]
