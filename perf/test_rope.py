"""Measures each strategy's cost: latency, kernels and memory traffic of the rotation, beside PyTorch's complex form.

Alone: queries and keys [B, 16, L, 64] of the ViT's global blocks (72 x 72 tokens) and of its windows (9 of 24 x 24),
rotated by upstream's own `Attention._apply_rope` and returned. Before attention: the same, read by the attention that
follows, where it can be folded into it. Inside: all of `vision_backbone`. The last two stand beside the same program
whose queries and keys are not rotated at all, held to PyTorch's with the same change. Every result is held to PyTorch's
before it is timed; then the rounds of all sides are interleaved.

    pytest perf/test_rope.py                                 # the shallow backbone
    pytest perf/test_rope.py --scale full --strategy real    # the full one
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from harness.compiler.lowering.rope import STRATEGIES, Strategy
from harness.compiler.lowering.route import Route
from harness.compiler.targets import TARGETS
from harness.core.case import DEFAULT_STRATEGY, Case, Scale
from harness.core.machine import describe_machine
from harness.core.processes.threads import configure_threads
from harness.core.processors import Processors
from harness.core.settings import SEEDED
from harness.models.registry import subjects
from harness.models.sam3.upstream import upstream
from perf.measuring import interleave_sides
from perf.options import Options
from perf.rope import HEAD_SIZE, HEADS, UNROTATED, Compiled, Pool, Rotate, RotateAndAttend, compiled

BUDGET_SECONDS = 12.0
"""How long all sides together may take per test; at least five rounds run in any case."""
BATCH_SECONDS = 0.05
"""A shorter call is repeated within a round."""

PYTORCH = "PyTorch, complex"

grids = pytest.mark.parametrize(
    ("batch", "side", "scale_pos"),
    [pytest.param(1, 72, 24 / 72, id="global-72x72"), pytest.param(9, 24, 1.0, id="windows-24x24")],
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Strategies and scales as on the command line; one test interleaves all strategies."""
    config = metafunc.config
    if "strategies" in metafunc.fixturenames:
        names = config.getoption("strategy") or [*STRATEGIES]
        chosen = [strategy for name, strategy in STRATEGIES.items() if name in names and name != "none"]
        metafunc.parametrize("strategies", [pytest.param(chosen, id="-".join(strategy.name for strategy in chosen))])
    if "scale" in metafunc.fixturenames:
        metafunc.parametrize("scale", config.getoption("scale") or [Scale.SHALLOW.value])


@pytest.fixture
def threads(options: Options) -> int:
    """Returns how many threads TVM and PyTorch use."""
    problem = TARGETS["llvm"].compile_problem() or TARGETS["llvm"].run_problem(options.processors)
    if problem:
        pytest.skip(problem)
    return configure_threads()


def run_torch(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Runs PyTorch and returns its results as a list."""
    with torch.no_grad():
        results = module(*inputs)
    return list(results) if isinstance(results, tuple | list) else [results]


def sides(
    module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], strategies: Sequence[Strategy], processors: Processors
) -> dict[str, Compiled]:
    """Compiles the module with each strategy and checks the results against PyTorch's."""
    upstreams = run_torch(module, inputs)
    pool = Pool()
    found = {}
    for strategy in strategies:
        expected = upstreams
        if strategy is UNROTATED:
            with Route(strategy=strategy).apply_strategy(module):
                expected = run_torch(module, inputs)
        found[strategy.name] = compiled(strategy, module, inputs, pool, processors)
        for actual, wanted in zip(found[strategy.name].call(), expected, strict=True):
            np.testing.assert_allclose(actual.numpy(), wanted.numpy(), rtol=1e-5, atol=1e-5, err_msg=strategy.name)
    return found


def measure(
    benchmark: Any,
    workload: str,
    module: torch.nn.Module,
    inputs: tuple[torch.Tensor, ...],
    strategies: Sequence[Strategy],
    processors: Processors,
) -> list[dict[str, Any]]:
    """Compiles and times a workload; returns PyTorch's numbers, then each strategy's."""
    found = sides(module, inputs, strategies, processors)
    calls: Mapping[str, Callable[[], Any]] = {
        PYTORCH: lambda: run_torch(module, inputs),
        **{name: side.call for name, side in found.items()},
    }
    seconds = interleave_sides(benchmark, calls, budget=BUDGET_SECONDS, batch=BATCH_SECONDS)
    return [
        {
            "workload": workload,
            "side": name,
            "seconds": rounds,
            "median": statistics.median(rounds),
            "torch_over_side": statistics.median(seconds[PYTORCH]) / statistics.median(rounds),
            "over_unrotated": over(rounds, seconds.get(UNROTATED.name)),
            "kernels": found[name].kernels if name in found else None,
            "moved": found[name].moved if name in found else None,
        }
        for name, rounds in seconds.items()
    ]


def over(rounds: Sequence[float], base: Sequence[float] | None) -> dict[str, float] | None:
    """Returns the time that a side takes more than the base, as a share of it: of the medians, and the range."""
    if base is None:
        return None
    ratios = [mine / theirs - 1.0 for mine, theirs in zip(rounds, base, strict=True)]
    medians = statistics.median(rounds) / statistics.median(base) - 1.0
    return {"medians": medians, "least": min(ratios), "most": max(ratios)}


def tokens(count: int, batch: int, length: int) -> tuple[torch.Tensor, ...]:
    """Makes queries, keys and perhaps values, [batch, 16, length, 64]."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn((batch, HEADS, length, HEAD_SIZE), generator=generator) for _ in range(count))


def keep(benchmark: Any, rope_results: list[dict[str, Any]], threads: int, results: list[dict[str, Any]]) -> None:
    """Keeps the results for the table and for pytest-benchmark's file."""
    results = [result | {"threads": threads} for result in results]
    benchmark.extra_info |= {"sides": results, "machine": describe_machine()}
    rope_results.extend(results)


@grids
def test_rotation_alone(
    batch: int,
    side: int,
    scale_pos: float,
    strategies: list[Strategy],
    threads: int,
    options: Options,
    benchmark: Any,
    rope_results: list[dict[str, Any]],
) -> None:
    with upstream():
        module, inputs = Rotate(side, side, scale_pos).eval(), tokens(2, batch, side * side)
        workload = f"rotation alone, {batch} x {HEADS} heads of {HEAD_SIZE}, {side}x{side} tokens"
        results = measure(benchmark, workload, module, inputs, strategies, options.processors)
        keep(benchmark, rope_results, threads, results)


@grids
def test_rotation_before_attention(
    batch: int,
    side: int,
    scale_pos: float,
    strategies: list[Strategy],
    threads: int,
    options: Options,
    benchmark: Any,
    rope_results: list[dict[str, Any]],
) -> None:
    with upstream():
        module, inputs = RotateAndAttend(side, side, scale_pos).eval(), tokens(3, batch, side * side)
        workload = f"rotation and attention, {batch} x {HEADS} heads of {HEAD_SIZE}, {side}x{side} tokens"
        results = measure(benchmark, workload, module, inputs, [UNROTATED, *strategies], options.processors)
        keep(benchmark, rope_results, threads, results)


def test_rotation_inside_the_backbone(
    scale: str,
    strategies: list[Strategy],
    threads: int,
    options: Options,
    benchmark: Any,
    rope_results: list[dict[str, Any]],
) -> None:
    case = Case("vision_backbone", DEFAULT_STRATEGY, "llvm", Scale(scale))
    with upstream():
        program = next(iter(subjects()[case.component].open(case, SEEDED).programs.values()))
        module, inputs = program.module, tuple(program.example.values())
        del program
        workload = f"vision_backbone, {scale}"
        results = measure(benchmark, workload, module, inputs, [UNROTATED, *strategies], options.processors)
        keep(benchmark, rope_results, threads, results)
