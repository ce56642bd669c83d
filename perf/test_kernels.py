"""Measures every distinct kernel of SAM 3 beside PyTorch's same operator, and as a share of this machine's peak.

A kernel is a module of one recorded call (`perf/kernels.py`), exported, imported and compiled like a component; its
result is held to PyTorch's before it is timed. Rates are shares of the peak that `perf/probe.py` measures right before
and right after. Both sides get their inputs as tensors and allocate their results, each as in a model: PyTorch from
the system, TVM from the pool of its virtual machine.
"""

from __future__ import annotations

import copy
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.compiler.targets import TARGETS
from harness.compiler.targets.compiling import LIBRARY_SUFFIX
from harness.core.machine import describe_machine
from harness.core.outcome import VerdictKind
from harness.core.processes.threads import configure_threads
from harness.parity.references import Reference
from harness.parity.verdict import judge
from perf.compiling import compiled
from perf.kernels import Kernel, flop, kernels
from perf.measuring import interleave
from perf.options import Options
from perf.probe import probe

BUDGET_SECONDS = 0.5
"""How long PyTorch and TVM together may take per kernel; at least five rounds run in any case."""
BATCH_SECONDS = 0.003
"""A shorter kernel is called several times within a round."""
PROBE_SECONDS = 0.05
"""Length of the probe before and after each kernel."""

_TARGET = TARGETS["llvm"]


@pytest.mark.parametrize("kernel", [pytest.param(kernel, id=kernel.id) for kernel in kernels()])
def test_kernel(
    kernel: Kernel, benchmark: Any, kernel_results: list[dict[str, Any]], options: Options, tmp_path: Path
) -> None:
    problem = _TARGET.compile_problem() or _TARGET.run_problem(options.processors)
    if problem:
        pytest.skip(problem)
    threads = configure_threads()
    module, inputs = kernel.make(torch.Generator().manual_seed(0))
    work = flop(module, inputs) if kernel.bound == "compute" else kernel.moved
    run_tvm = compiled(module, inputs, tmp_path / f"kernel{LIBRARY_SUFFIX}", options.processors)

    def run_torch() -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = module(*inputs)
        return result

    expected = run_torch().numpy()
    wide = copy.deepcopy(module).double()
    with torch.no_grad():
        oracle = wide(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs)).numpy()
    (verdict,) = judge({"result": run_tvm()[0].numpy()}, Reference.from_run({"result": expected}, {"result": oracle}))
    assert verdict.kind is VerdictKind.STRICT, verdict
    del expected, oracle, wide

    benchmark.group = kernel.group.value
    machine_peak = probe(threads)
    measure = machine_peak.flops if kernel.bound == "compute" else machine_peak.bandwidth
    peaks = [measure(PROBE_SECONDS)]
    timed = interleave(benchmark, run_tvm, run_torch, budget=BUDGET_SECONDS, batch=BATCH_SECONDS)
    peaks.append(measure(PROBE_SECONDS))
    peak = statistics.median(peaks)
    result = timed.summary() | {
        "group": kernel.group.value,
        "kernel": kernel.name,
        "shape": kernel.shape,
        "bound": kernel.bound,
        "work": work,
        "moved": kernel.moved,
        "peaks": peaks,
        "peak": peak,
        "rate": work / statistics.median(timed.tvm),
        "torch_rate": work / statistics.median(timed.torch),
        "threads": threads,
        "max_abs": verdict.max_abs,
        "r_rms": verdict.r_rms,
    }
    benchmark.extra_info |= result | {"machine": describe_machine()}
    kernel_results.append(result)
