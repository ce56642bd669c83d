"""What is kept of a side's rounds, as plain data, which pytest-benchmark writes into the file of `--benchmark-json`.

`gzip -9n` makes a file for git of it, with all that it holds; the report and `perf.compare` read it as well.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from harness.core.machine import describe_machine, versions
from harness.core.outcome import Verdict, VerdictKind
from perf.measuring import ENOUGH_FOR_P95, ENOUGH_FOR_P99, percentile
from perf.memory import Memory

TORCH, UNTUNED, TUNED = "torch", "untuned", "tuned"
OURS = (UNTUNED, TUNED)
OURS_IN_FP32 = "tvm fp32"
"""Ours in fp32, beside a case in half precision: what that gains is told by one run."""
NOTHING_FOUND = "tuning found nothing over the defaults"
"""The note of a result without a tuned side, where there is a database: untuned and tuned are one program."""


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """The raw rounds with what describes them; percentiles are `n/a` with too few rounds, throughput is in calls/s."""
    return {
        "seconds": list(seconds),
        "median": statistics.median(seconds),
        "mean": statistics.fmean(seconds),
        "p95": percentile(seconds, 0.95, ENOUGH_FOR_P95),
        "p99": percentile(seconds, 0.99, ENOUGH_FOR_P99),
        "throughput": len(seconds) / sum(seconds),
    }


def ratios(sides: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """PyTorch's median over that of every other side, and every peer's over ours."""
    medians = {name: side["median"] for name, side in sides.items() if "median" in side}
    return {
        f"{other}_over_{ours}": medians[other] / medians[ours]
        for ours in medians
        for other in medians
        if other != ours and ours != TORCH and (other == TORCH or (ours in OURS and other not in OURS))
    }


def memory_bytes(memory: Memory | None) -> dict[str, int] | None:
    """Bytes of the weights, of a run above them, and of both."""
    if memory is None:
        return None
    return {"weights_bytes": memory.weights, "run_bytes": memory.run, "peak_bytes": memory.weights + memory.run}


def judged(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The worst of the verdicts on a side's outputs, with the figures that tell how bad it is."""
    order = list(VerdictKind)
    worst = max(verdicts, key=lambda verdict: order.index(verdict.kind))
    tolerances = [v.required_tolerance for v in verdicts if not math.isnan(v.required_tolerance)]
    r_rms = [v.r_rms for v in verdicts if not math.isnan(v.r_rms)]
    return {
        "verdict": worst.kind.value,
        "reason": f"{worst.name}: {worst.reason}" if worst.reason else "",
        "required_tolerance": max(tolerances, default=None),
        "worst_r_rms": max(r_rms, default=None),
    }


def circumstances(threads: int, peaks: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Where a result is from: threads, machine, versions, and the CPU's peaks in FLOP/s and byte/s.

    Args:
        threads: Of every side that runs on the CPU.
        peaks: `perf.probe.measured_peaks` before and after the rounds; none where ours do not run on the CPU.
    """
    found = {"threads": threads, "machine": describe_machine(), "versions": versions()}
    if not peaks:
        return found
    flops, bandwidths = zip(*peaks, strict=True)
    return found | {
        "peak_flops": statistics.fmean(flops),
        "peak_bandwidth": statistics.fmean(bandwidths),
        "peaks": [list(pair) for pair in peaks],
    }
