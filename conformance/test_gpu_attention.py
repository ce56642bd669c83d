"""Attention on GPUs: one kernel without a score matrix, emulated for CUDA and Metal, against PyTorch in float64."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from conformance.gpu_programs import (
    KINDS,
    ORDERS,
    Expression,
    emulated,
    hold,
    lowered,
    skip_unless_emulated,
    target_of,
)
from harness.schedules.gpu.attention import Attention, layout_of, tiling_of
from harness.targets import TARGETS
from harness.targets.compiling import build_library

emulation = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64", "arm64"), reason="threads are emulated on x86-64 and on arm64"
)
MASKED = float("-inf")


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def attention(
    name: str,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    channels: int,
    bias: torch.Tensor | None = None,
    *,
    causal: bool = False,
    scale: float = 1.0,
    make: Callable[..., torch.Tensor] = random,
) -> Expression:
    """An attention as SAM 3 has it, heads before positions, and transposed back."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=b, is_causal=causal).transpose(1, 2)

    q = make(batch, heads, queries, channels, seed=1, scale=scale)
    k, v = (make(batch, heads, keys, channels, seed=seed) for seed in (2, 3))
    return Expression(name, function, (q, k, v) if bias is None else (q, k, v, bias))


def masked(*shape: int) -> torch.Tensor:
    """A bias with a third of the keys masked; every key of the query before the last."""
    bias = random(*shape, seed=4).masked_fill(random(*shape, seed=5) < -0.43, MASKED)
    bias[..., -2, :] = MASKED
    return bias


EXPRESSIONS = (
    attention("tiles", 4, 32, 64, 64, 64),
    attention("edges", 2, 64, 70, 67, 64),
    attention("narrow heads, edges", 2, 64, 65, 90, 32),
    attention("bias, masked queries", 1, 8, 50, 90, 32, masked(1, 8, 50, 90)),
    attention("padded keys", 2, 3, 20, 35, 32, torch.where(torch.arange(35) < 30, 0.0, MASKED).expand(1, 1, 1, 35)),
    attention("boolean mask", 1, 2, 20, 36, 32, masked(1, 1, 20, 36) > MASKED),
    attention("causal", 3, 4, 32, 32, 64, causal=True),
    attention("causal, edges", 1, 2, 75, 75, 64, causal=True),
    attention("one query", 1, 2, 1, 300, 32),
    attention("few queries", 2, 1, 6, 201, 64),
    attention("one key", 1, 1, 3, 1, 32),
    attention("odd heads", 1, 2, 20, 50, 21),
    attention("large scores", 1, 2, 33, 70, 32, scale=300.0),
)
LARGE = EXPRESSIONS[-1]


@emulation
@pytest.mark.parametrize("kind", KINDS)
def test_attention_of_any_shape_and_mask(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_emulated(kind)
    monkeypatch.setenv("SAM3_TVM_CUDA_ARCH", "sm_80")
    for results in emulated(EXPRESSIONS, kind, tmp_path, ORDERS[kind]):
        for expression, actual in zip(EXPRESSIONS[:-1], results[:-1], strict=True):
            hold(expression, actual)
        without_keys = results[[e.name for e in EXPRESSIONS].index("bias, masked queries")][:, -2]
        assert (without_keys == 0).all()
        exact = LARGE.function(*(x.double() for x in LARGE.arguments)).numpy()
        # A score of size s is rounded by s·2⁻²⁴, which is the relative error of its weight.
        assert np.isfinite(results[-1]).all() and np.abs(results[-1] - exact).max() < 2e-6 * 300


def zeros(*shape: int, **_: float) -> torch.Tensor:
    return torch.zeros(shape)


GLOBAL = attention("global block", 1, 16, 5184, 5184, 64, make=zeros)
FULL = (
    GLOBAL,
    attention("windows", 9, 16, 576, 576, 64, make=zeros),
    attention("queries of the decoder", 1, 8, 201, 5184, 32, zeros(1, 8, 201, 5184), make=zeros),
)


@pytest.mark.parametrize("kind", KINDS)
def test_the_score_matrix_is_never_stored(kind: str) -> None:
    """One attention at full scale, lowered: its only kernel is ours, and nothing but the result is allocated."""
    if problem := TARGETS[kind].compile_problem():
        pytest.skip(problem)
    module = lowered([GLOBAL], kind)
    sizes = [int(size) for size in re.findall(r"alloc_storage\(R\.shape\(\[(\d+)\]\)", module["main"].script())]
    assert sizes == [4 * 5184 * 16 * 64]
    assert {variable.name_hint for variable in module.get_global_vars()} == {"main", "attention"}


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_of_full_scale_are_within_the_limits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if problem := TARGETS[kind].compile_problem():
        pytest.skip(problem)
    monkeypatch.setenv("SAM3_TVM_CUDA_ARCH", "sm_90")
    kernels = build_library(lowered(FULL, kind), target_of(kind), tmp_path / "full.so", keep_source=True)
    limit = {"cuda": 48, "metal": 32}[kind] * 1024
    attentions = [kernel for kernel in kernels if "attention" in kernel.name]
    assert len(attentions) == len(FULL)
    for kernel in attentions:
        assert kernel.shared_bytes <= limit and not kernel.spill_bytes and not kernel.stack_bytes, kernel


@pytest.mark.parametrize("shared", [32 * 1024, 48 * 1024])
@pytest.mark.parametrize("channels", [1, 32, 64, 72, 128])
def test_a_tiling_fits_the_shared_memory(shared: int, channels: int) -> None:
    for queries, keys in ((1, 5184), (7, 3), (40, 40), (5184, 5184)):
        problem = Attention(1, queries, keys, 16, channels, channels)
        tiling = tiling_of(problem, shared)
        assert tiling is not None and tiling.threads <= 1024 and 4 * layout_of(problem, tiling).size <= shared
    assert tiling_of(Attention(1, 40, 40, 16, 1024, 1024), shared) is None  # left to TVM
