"""Latency and peak memory of each component, PyTorch eager against TVM untuned.

Latency: both in one process, interleaved round by round. The rounds that pytest-benchmark times are TVM's; PyTorch's
stand in `extra_info` with the ratio of the medians. Memory: each in a process of its own (`perf/memory.py`).
"""

from __future__ import annotations

import gc
import math
import tempfile
import time
from pathlib import Path
from typing import Any

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
from harness.worker import WorkerEnd, run_isolated
from perf.measuring import interleave
from perf.memory import Request, save

BUDGET_SECONDS = 30.0
"""How long PyTorch and TVM together may take per component; at least five rounds run in any case."""


def test_component(case: Case, benchmark: Any, component_results: list[dict[str, Any]]) -> None:
    target = TARGETS[case.target]
    problem = target.compile_problem() or target.run_problem()
    if problem or case.strategy == "none":
        pytest.skip(problem or "the control strategy does not compile")
    threads = configure_threads()
    # Not pytest's folder, which stays: at full scale there are gigabytes of weights in it.
    with tempfile.TemporaryDirectory(prefix="sam3-tvm-") as name:
        request = Request(Path(name), Path(name) / f"library{LIBRARY_SUFFIX}", case.target, threads)
        result = {"case": case.id, "threads": threads, **latency(case, benchmark, request)}
        gc.collect()
        result |= {f"{side}_memory": peak_memory(side, request) for side in ("tvm", "torch")}
    benchmark.extra_info |= result | {"machine": describe_machine()}
    component_results.append(result)


def latency(case: Case, benchmark: Any, request: Request) -> dict[str, Any]:
    """Times the main sample in this process, once its outputs are strict; saves what the memory measurements need."""
    target, strategy = TARGETS[case.target], STRATEGIES[case.strategy]
    with upstream():
        source = Source(case, Settings())
        sample, args = next(iter(source.samples.items()))
        inputs = tuple(args.values())
        with strategy.apply(source.module):
            program = export_program(source.module, inputs)
        reference, oracle = source.reference()[0], source.oracle()
        module, parameters = strategy.import_program(program)
        compile_module(module, target, request.library)
        save(source.module, inputs, list(parameters.values()), request.folder)
        executable = Executable(request.library, target.device(), list(parameters.values()))
        arrays = [tensor.numpy() for tensor in inputs]

        start = time.perf_counter()
        actual = source.named(sample, executable.run(arrays))
        first_call = time.perf_counter() - start
        verdicts = judge(actual, {name: reference[name] for name in actual}, oracle)
        assert all(verdict.kind is VerdictKind.STRICT for verdict in verdicts), verdicts

        def run_torch() -> None:
            with torch.no_grad():
                source.module(*inputs)

        timed = interleave(benchmark, lambda: executable.run(arrays), run_torch, budget=BUDGET_SECONDS)
    worst = max((v.r_rms for v in verdicts if not math.isnan(v.r_rms)), default=math.nan)
    return timed.summary() | {"first_call": first_call, "worst_r_rms": worst}


def peak_memory(side: str, request: Request) -> dict[str, int] | None:
    """Bytes of the weights, of a run above them and of both, None where the system does not tell."""
    ended = run_isolated(f"perf.memory:{side}_memory", request)
    assert ended.kind is WorkerEnd.OK, ended.error
    if ended.value is None:
        return None
    weights, run = ended.value.weights, ended.value.run
    return {"weights_bytes": weights, "run_bytes": run, "peak_bytes": weights + run}
