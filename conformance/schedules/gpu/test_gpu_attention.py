"""Attention on GPUs: one kernel without a score matrix, emulated for CUDA and Metal, against PyTorch in float64."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from torch.nn.functional import scaled_dot_product_attention
from tvm import relax, tirx

from conformance.support.gpu_programs import (
    KINDS,
    ORDERS,
    Expression,
    emulated,
    hold,
    lowered,
    skip_unless_emulated,
    target_of,
)
from conformance.support.operators import rms
from harness.compiler.lowering.frontends.exporting import export_program
from harness.compiler.lowering.frontends.torch_export.frontend import TORCH
from harness.compiler.lowering.rope import STRATEGIES
from harness.compiler.lowering.rope.operators import rotate_pairs
from harness.compiler.lowering.rope.real import rotate
from harness.compiler.schedules.common.attention import Attention
from harness.compiler.schedules.common.kernel_info import TENSOR_CORES, infos_of
from harness.compiler.schedules.gpu.attention import choose_attention_tile, shared_layout
from harness.compiler.targets import TARGETS
from harness.compiler.targets.compiling import build_library, lower_module
from harness.compiler.targets.cuda import chosen_architectures
from harness.core.processes.call import WorkerEnd, run_isolated
from harness.core.processors import THIS_MACHINE, Processors
from harness.models.sam3.upstream import upstream
from harness.parity.verdict import ORACLE_R_INF, ORACLE_R_RMS

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


def turns(positions: int, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of any angles, [positions, channels / 2]."""
    angles = random(positions, channels // 2, seed=6, scale=3.0)
    return angles.cos(), angles.sin()


def rotated(name: str, batch: int, heads: int, tokens: int, channels: int, repeat: int = 1) -> Expression:
    """An attention as in the trunk: queries, keys and values are slices of one tensor, the first two are rotated.

    With `repeat` as in the tracker: so many times the keys, which use the tables as often.
    """

    def function(x: torch.Tensor, more: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, _, _ = x.permute(2, 0, 3, 1, 4).unbind(0)
        _, k, v = (more if repeat > 1 else x).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin, repeat)
        result: torch.Tensor = scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return result

    x, more = (random(batch, n * tokens, 3, heads, channels, seed=n) for n in (1, repeat))
    return Expression(name, function, (x, more, *turns(tokens, channels)))


EXPRESSIONS = (
    rotated("rotated", 2, 3, 35, 64),
    rotated("rotated, whole tiles", 4, 32, 64, 64),
    rotated("rotated, keys by a pass of their own", 1, 1, 270, 32),
    rotated("rotated, keys of three frames", 1, 2, 21, 20, repeat=3),
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
    attention("wide head, bias", 2, 1, 18, 43, 256, random(1, 1, 18, 43, seed=4)),
    attention("wide head, many keys", 1, 1, 17, 4200, 256),
    attention("large scores", 1, 2, 33, 70, 32, scale=300.0),
)
LARGE = EXPRESSIONS[-1]


@emulation
@pytest.mark.parametrize("kind", KINDS)
def test_attention_of_any_shape_and_mask(kind: str, tmp_path: Path) -> None:
    skip_unless_emulated(kind)
    for results in emulated(EXPRESSIONS, kind, tmp_path, ORDERS[kind]):
        for expression, actual in zip(EXPRESSIONS[:-1], results[:-1], strict=True):
            hold(expression, actual)
        without_keys = results[[e.name for e in EXPRESSIONS].index("bias, masked queries")][:, -2]
        assert (without_keys == 0).all()
        exact = LARGE.function(*(x.double() for x in LARGE.arguments)).numpy()
        # A score of size s is rounded by s·2⁻²⁴, which is the relative error of its weight.
        assert np.isfinite(results[-1]).all() and np.abs(results[-1] - exact).max() < 2e-6 * 300


@pytest.fixture(scope="module")
def trunk():
    """The upstream module of the trunk's attention."""
    with upstream():
        import sam3.model.vitdet

        yield sam3.model.vitdet


FOLDS = ("real", "lowering", "converter", "tensorir")
"""Strategies whose rotation is folded; `llm` keeps its kernel."""


@emulation
@pytest.mark.cuda
@pytest.mark.parametrize("strategy", FOLDS)
def test_the_trunks_attention_rotates_while_it_loads(strategy: str, trunk: ModuleType, tmp_path: Path) -> None:
    """Whatever the strategy leaves, there is no pass between the product of queries, keys and values and attention."""
    skip_unless_emulated("cuda")
    torch.manual_seed(0)
    attention = trunk.Attention(64, 2, use_rope=True, input_size=(5, 7)).eval().requires_grad_(False)
    x = torch.randn(2, 5, 7, 64)
    expected = attention(x)
    chosen = STRATEGIES[strategy]
    with chosen.apply(attention):
        exported = export_program(attention, (x,))
    program, parameters = TORCH.import_exported(exported, chosen)
    target = target_of("cuda")
    module = lower_module(program, TARGETS["cuda"], target)
    kernels = {v.name_hint: f for v, f in module.functions_items()}
    assert infos_of(module)["attention"].reads == ("queries", "keys")
    before = {name for name in kernels if "matmul" not in name} - {"main", "attention"}
    assert all(set(name.removeprefix("fused_").split("_")) <= {*MOVES} for name in before), before
    build_library(module, target, tmp_path / "trunk.so", keep_source=True)
    request = ("cuda", str(tmp_path / "trunk.so"), list(parameters.values()), [x.numpy()])
    ended = run_isolated("conformance.support.emulated:run", request, timeout=600)
    assert ended.kind is WorkerEnd.OK, ended.error
    np.testing.assert_allclose(ended.value[0], expected.numpy(), rtol=1e-5, atol=1e-5)


MOVES = [f"{name}{n}" for name in ("reshape", "transpose") for n in ("", *range(9))]
"""What may be left: the result's way back to tokens."""


def test_what_others_read_as_well_is_rotated_once() -> None:
    """Queries that are returned too; keys, which nobody else reads, are still rotated where they are loaded."""
    if problem := TARGETS["cuda"].compile_problem():
        pytest.skip(problem)

    def function(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = x.unbind(0)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return torch.cat((scaled_dot_product_attention(q, k, v), q))

    module = lowered([Expression("returned", function, (random(3, 1, 2, 33, 32), *turns(33, 32)))], "cuda")
    assert infos_of(module)["attention"].reads == ("keys",)


class Picked(torch.nn.Module):
    """Queries, and keys picked by number from memories [M, L, C], rotated by one operator."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.to_query = torch.nn.Linear(channels, channels)
        self.to_key = torch.nn.Linear(channels, channels)

    def forward(
        self, x: torch.Tensor, memories: torch.Tensor, numbers: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        picked = (memories[numbers] * 2).flatten(0, 1)[None, None]
        q, k = rotate_pairs.rotate(self.to_query(x), self.to_key(picked), (cos, sin), len(numbers))
        return scaled_dot_product_attention(q, k, picked)


@emulation
@pytest.mark.cuda
def test_one_operator_rotates_queries_and_keys_that_integers_pick(tmp_path: Path) -> None:
    """What the keys come from is no part of the queries, although one call returns both."""
    skip_unless_emulated("cuda")
    torch.manual_seed(0)
    module = Picked(32).eval().requires_grad_(False)
    args = (random(1, 1, 9, 32), random(4, 9, 32, seed=1), torch.tensor([3, 0]), *turns(9, 32))
    program, parameters = TORCH.import_exported(export_program(module, args), STRATEGIES["tensorir"])
    target = target_of("cuda")
    lowered_module = lower_module(program, TARGETS["cuda"], target)
    assert infos_of(lowered_module)["attention"].reads == ("queries", "keys")
    build_library(lowered_module, target, tmp_path / "picked.so", keep_source=True)
    inputs = [arg.numpy() for arg in args]
    request = ("cuda", str(tmp_path / "picked.so"), list(parameters.values()), inputs)
    ended = run_isolated("conformance.support.emulated:run", request, timeout=600)
    assert ended.kind is WorkerEnd.OK, ended.error
    np.testing.assert_allclose(ended.value[0], module(*args).numpy(), rtol=1e-5, atol=1e-5)


HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def halved(expression: Expression, dtype: torch.dtype) -> Expression:
    """The same with queries, keys, values and bias in a half type, and the result in float32 again."""

    def function(*arguments: torch.Tensor) -> torch.Tensor:
        rounded = [x.to(dtype) if x.is_floating_point() and x.dim() > 2 else x for x in arguments]
        return expression.function(*rounded).float()

    return Expression(expression.name, function, expression.arguments)


@emulation
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALVES)
def test_half_operands_are_multiplied_on_tensor_cores(dtype: str, tmp_path: Path) -> None:
    """Held to the oracle verdict, with PyTorch in the same half type as the reference; one order of threads each."""
    skip_unless_emulated("cuda")
    chosen = [halved(expression, HALVES[dtype]) for expression in EXPRESSIONS if expression is not LARGE]
    kernels = infos_of(lowered(chosen, "cuda")).values()
    others = {"one query", "few queries", "one key", "wide head, bias", "wide head, many keys"}
    assert [kernel.algorithm for kernel in kernels].count(TENSOR_CORES) == len(chosen) - len(others)
    for results in emulated(chosen, "cuda", tmp_path, ["run" if dtype == "float16" else "run_descending"]):
        for expression, actual in zip(chosen, results, strict=True):
            hold_halved(expression, actual)


def hold_halved(expression: Expression, actual: np.ndarray) -> None:
    expected = expression.function(*expression.arguments).numpy()
    unrounded = next(e for e in EXPRESSIONS if e.name == expression.name)
    wide = [x.double() if x.is_floating_point() else x for x in unrounded.arguments]
    exact = unrounded.function(*wide).numpy()
    assert np.isfinite(actual).all() and np.isfinite(exact).all(), expression.name
    assert rms(actual - exact) <= ORACLE_R_RMS * rms(expected - exact), expression.name
    assert np.abs(actual - exact).max() <= ORACLE_R_INF * np.abs(expected - exact).max(), expression.name


@emulation
def test_an_attention_of_each_kernel(tmp_path: Path) -> None:
    """Small ones, for every day; `-m cuda` has all."""
    skip_unless_emulated("cuda")
    chosen = [expression for expression in EXPRESSIONS if expression.name in ("rotated", "causal, edges")]
    half = halved(chosen[0], torch.float16)
    ((*results, actual),) = emulated([*chosen, half], "cuda", tmp_path, ORDERS["cuda"])
    for expression, result in zip(chosen, results, strict=True):
        hold(expression, result)
    hold_halved(half, actual)


@dataclass(frozen=True)
class AnyKeys:
    """An attention [batch, position, head, channel] to any number of keys.

    Attributes:
        bias: There is one, of [1, 1, queries, keys].
        causal: Query i sees keys up to the one that is as far from the last as query i is from the last one.
        twice: All keys are there twice.
    """

    name: str
    batch: int
    queries: int
    heads: int
    channels: int
    dtype: torch.dtype = torch.float32
    bias: bool = False
    causal: bool = False
    twice: bool = False

    def shapes(self, keys: Any) -> list[tuple[Any, ...]]:
        """Of queries, keys, values and bias."""
        others = (self.batch, keys, self.heads, self.channels)
        bias = [(1, 1, self.queries, keys)] if self.bias else []
        return [(self.batch, self.queries, *others[2:]), others, others, *bias]

    def emit(self, q: relax.Expr, k: relax.Expr, v: relax.Expr, bias: relax.Expr | None = None) -> relax.Expr:
        """On Relax."""
        if self.twice:
            k, v = (relax.op.concat([x, x], 1) for x in (k, v))
        return relax.op.nn.attention(q, k, v, bias, causal_mask="BottomRight" if self.causal else None)

    def reference(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """PyTorch's."""
        if self.twice:
            k, v = torch.cat((k, k), 1), torch.cat((v, v), 1)
        if self.causal:
            mask = torch.ones(self.queries, k.shape[1]).tril(k.shape[1] - self.queries).bool()
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        return scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2)

    def expression(self, keys: int) -> Expression:
        """With so many keys."""
        arguments = [random(*shape, seed=n).to(self.dtype) for n, shape in enumerate(self.shapes(keys))]
        return Expression(f"{self.name}, {keys} keys", self.reference, tuple(arguments))


WIDE = AnyKeys("wide head", 1, 18, 1, 256)
ANY_KEYS = (
    WIDE,
    AnyKeys("several heads", 2, 20, 3, 64),
    AnyKeys("few queries", 1, 3, 2, 32),
    AnyKeys("bias", 1, 20, 2, 32, bias=True),
    AnyKeys("causal", 1, 20, 1, 16, causal=True),
    AnyKeys("twice", 1, 20, 2, 32, twice=True),
    AnyKeys("half", 1, 40, 2, 32, torch.float16),
)
MANY = 8_000
"""Keys whose sums, one term after the other, are outside the gate."""


def program_of_any_keys() -> tvm.IRModule:
    """A function of all of them, whose number of keys is a variable."""
    builder, keys = relax.BlockBuilder(), tirx.Var("keys", "int64")
    parameters = [
        [
            relax.Var(f"x{i}_{n}", relax.TensorType(list(shape), str(each.dtype).removeprefix("torch.")))
            for n, shape in enumerate(each.shapes(keys))
        ]
        for i, each in enumerate(ANY_KEYS)
    ]
    with builder.function("main", [x for own in parameters for x in own]):
        with builder.dataflow():
            results = [builder.emit(each.emit(*own)) for each, own in zip(ANY_KEYS, parameters, strict=True)]
            result = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(result)
    return builder.get()


@emulation
@pytest.mark.parametrize("kind", KINDS)
def test_one_kernel_for_any_number_of_keys(kind: str, tmp_path: Path) -> None:
    """One key; whole steps, one key more and one less; so many that sums need several levels."""
    skip_unless_emulated(kind)
    module = lower_module(program_of_any_keys(), TARGETS[kind], target_of(kind))
    kernels = [info.algorithm for info in infos_of(module).values() if info.operator == "nn.attention"]
    assert len(kernels) == len(ANY_KEYS) and kernels.count(TENSOR_CORES) == (kind == "cuda")
    build_library(module, target_of(kind), tmp_path / "any.so", keep_source=True)
    counts = (1, 63, 64, 65, MANY)
    programs = [[each.expression(count) for each in ANY_KEYS] for count in counts]
    inputs = [[argument.numpy() for e in program for argument in e.arguments] for program in programs]
    ended = run_isolated("conformance.support.emulated:run_each", (kind, str(tmp_path / "any.so"), inputs), timeout=600)
    assert ended.kind is WorkerEnd.OK, ended.error
    for program, results in zip(programs, ended.value, strict=True):
        for expression, actual in zip(program, results, strict=True):
            hold(expression, actual)


def test_many_keys_are_enough_to_tell_sums_apart() -> None:
    """What adds weights, and weighted values, one after the other is outside the gate."""
    expression = WIDE.expression(MANY)
    q, k, v = (argument[0, :, 0].numpy() for argument in expression.arguments)
    scores = q @ k.T / 16
    weights = np.exp(scores - scores.max(1, keepdims=True))
    result = np.stack([np.cumsum(w[:, None] * v, 0)[-1] / np.cumsum(w)[-1] for w in weights])
    with pytest.raises(AssertionError, match="r_rms"):
        hold(expression, result[None, :, None])


def zeros(*shape: int, **_: float) -> torch.Tensor:
    return torch.zeros(shape)


GLOBAL = attention("global block", 1, 16, 5184, 5184, 64, make=zeros)
FULL = (
    GLOBAL,
    attention("windows", 9, 16, 576, 576, 64, make=zeros),
    rotated("rotated windows", 9, 16, 576, 64),
    rotated("rotated global block", 1, 16, 5184, 64),
    attention("queries of the decoder", 1, 8, 201, 5184, 32, zeros(1, 8, 201, 5184), make=zeros),
    attention("memories and pointers", 1, 1, 5184, 36352, 256, make=zeros),
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
def test_kernels_of_full_scale_are_within_the_limits(kind: str, tmp_path: Path) -> None:
    if problem := TARGETS[kind].compile_problem():
        pytest.skip(problem)
    target = target_of(kind, Processors(cuda="sm_90"))
    kernels = build_library(lowered(FULL, kind), target, tmp_path / "full.so", keep_source=True)
    limit = {"cuda": 48, "metal": 32}[kind] * 1024
    attentions = [kernel for kernel in kernels if "attention" in kernel.name]
    assert len(attentions) == len(FULL)
    for kernel in attentions:
        assert kernel.shared_bytes <= limit and not kernel.spill_bytes and not kernel.stack_bytes, kernel


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALVES)
def test_kernels_for_tensor_cores_spill_nothing_on_any_architecture(dtype: str, tmp_path: Path) -> None:
    if problem := TARGETS["cuda"].compile_problem():
        pytest.skip(problem)
    chosen = [halved(expression, HALVES[dtype]) for expression in FULL]
    target = target_of("cuda", THIS_MACHINE)
    kernels = build_library(lowered(chosen, "cuda"), target, tmp_path / "full.so", keep_source=True)
    attentions = [kernel for kernel in kernels if "attention" in kernel.name]
    architectures = chosen_architectures()  # of the GPU that is present, if there is one
    assert {kernel.architecture for kernel in attentions} == set(architectures)
    assert len(attentions) == len(FULL) * len(architectures)
    for kernel in attentions:
        assert kernel.shared_bytes <= 48 * 1024 and not kernel.spill_bytes and not kernel.stack_bytes, kernel


@pytest.mark.parametrize("shared", [32 * 1024, 48 * 1024])
@pytest.mark.parametrize("channels", [1, 32, 64, 72, 128, 256])
def test_a_tiling_fits_the_shared_memory(shared: int, channels: int) -> None:
    for queries, keys in ((1, 5184), (7, 3), (40, 40), (5184, 5184), (5184, tirx.Var("keys", "int64"))):
        problem = Attention(1, queries, keys, 16, channels, channels)
        tile = choose_attention_tile(problem, shared)
        assert tile is not None and tile.threads <= 1024 and 4 * shared_layout(problem, tile).size <= shared
    assert choose_attention_tile(Attention(1, 40, 40, 16, 1024, 1024), shared) is None  # left to TVM
