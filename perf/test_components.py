"""Latency of each component, PyTorch eager against TVM untuned, interleaved round by round in one process.

The rounds that pytest-benchmark times are TVM's; before each of them PyTorch runs once, and its times stand in
`extra_info` with the ratio of the medians. Percentiles are left out where the number of rounds does not support them.
"""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path

import pytest
import torch

from harness.case import Case
from harness.frontend import export_program
from harness.machine import describe_machine
from harness.model.upstream import upstream
from harness.outcome import VerdictKind
from harness.parity.verdict import judge
from harness.rope import STRATEGIES
from harness.runtime.executable import Executable
from harness.settings import Settings
from harness.source import Source
from harness.targets import TARGETS
from harness.targets.compiling import LIBRARY_SUFFIX, compile_module
from harness.threads import configure_threads

BUDGET_SECONDS = 30.0
"""How long PyTorch and TVM together may take per component; at least five rounds run in any case."""

ENOUGH_FOR_P95, ENOUGH_FOR_P99 = 20, 100


def percentile(samples: list[float], q: float, enough: int) -> float | str:
    """The q-quantile by rank, or `n/a` with too few samples to have one."""
    return sorted(samples)[math.ceil(q * len(samples)) - 1] if len(samples) >= enough else "n/a"


def test_latency(case: Case, benchmark, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    target = TARGETS[case.target]
    problem = target.compile_problem() or target.run_problem()
    if problem or case.strategy == "none":
        pytest.skip(problem or "the control strategy does not compile")
    threads = configure_threads()
    with upstream():
        source = Source(case, Settings())
        sample, args = next(iter(source.samples.items()))
        inputs = tuple(args.values())
        strategy = STRATEGIES[case.strategy]
        with strategy.apply(source.module):
            program = export_program(source.module, inputs)
        reference, oracle = source.reference()[0], source.oracle()
        module, parameters = strategy.import_program(program)
        library = tmp_path / f"{sample}{LIBRARY_SUFFIX}"
        compile_module(module, target, library)
        executable = Executable(library, target.device(), list(parameters.values()))
        arrays = [tensor.numpy() for tensor in inputs]

        start = time.perf_counter()
        actual = source.named(sample, executable.run(arrays))
        first_call = time.perf_counter() - start
        verdicts = judge(actual, {name: reference[name] for name in actual}, oracle)
        assert all(verdict.kind is VerdictKind.STRICT for verdict in verdicts), verdicts

        torch_seconds: list[float] = []

        def run_torch() -> None:
            begin = time.perf_counter()
            with torch.no_grad():
                source.module(*inputs)
            torch_seconds.append(time.perf_counter() - begin)

        run_torch()
        rounds = max(5, min(200, int(BUDGET_SECONDS / (torch_seconds.pop() + first_call))))
        benchmark.pedantic(executable.run, args=(arrays,), setup=run_torch, rounds=rounds, warmup_rounds=1)
    seconds = list(benchmark.stats.stats.data)
    torch_seconds = torch_seconds[-len(seconds) :]
    benchmark.extra_info |= {
        "threads": threads,
        "machine": describe_machine(),
        "first_call": first_call,
        "p95": percentile(seconds, 0.95, ENOUGH_FOR_P95),
        "p99": percentile(seconds, 0.99, ENOUGH_FOR_P99),
        "torch_median": statistics.median(torch_seconds),
        "torch_seconds": torch_seconds,
        "worst_r_rms": max((v.r_rms for v in verdicts if not math.isnan(v.r_rms)), default=math.nan),
        "torch_over_tvm": statistics.median(torch_seconds) / statistics.median(seconds),
    }
    print(
        f"\n{case.id}: PyTorch {statistics.median(torch_seconds) * 1e3:.1f} ms "
        f"({min(torch_seconds) * 1e3:.1f}–{max(torch_seconds) * 1e3:.1f}), "
        f"TVM {statistics.median(seconds) * 1e3:.1f} ms ({min(seconds) * 1e3:.1f}–{max(seconds) * 1e3:.1f}), "
        f"{benchmark.extra_info['torch_over_tvm']:.2f}×, {len(seconds)} rounds, {threads} threads"
    )
