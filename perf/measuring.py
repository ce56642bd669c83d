"""Timing two sides in one run: interleaved round by round, the order rotated, with medians and spread."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

ENOUGH_FOR_P95, ENOUGH_FOR_P99 = 20, 100
"""Samples below which there is no such percentile."""

SETTLE_SECONDS = 0.01
"""Pause before each side's turn, in which the threads of the other side's pool stop spinning.

GNU's OpenMP spins for 8 ms after a parallel loop of torch, TVM's pool for 4 ms under `SPIN_COUNT`; measured.
"""
SPIN_VARIABLE, SPIN_COUNT = "TVM_THREAD_POOL_SPIN_COUNT", "10000"
"""How long TVM's idle threads spin. By default it is 115 ms, in which they would take a CPU from torch."""

WAKE_SECONDS = 0.015
"""Calls that are not timed at the start of a turn: a worker that has slept may wake up on the CPU of its caller, and
runs at half speed until the system moves it, 12 ms later; measured."""
LONG_SECONDS = 1.0
"""A turn that is longer goes without."""


def percentile(samples: Sequence[float], q: float, enough: int) -> float | str:
    """The q-quantile by rank, or `n/a` with too few samples to have one."""
    return sorted(samples)[math.ceil(q * len(samples)) - 1] if len(samples) >= enough else "n/a"


@dataclass(frozen=True)
class Interleaved:
    """Seconds per call of both sides, one number per round; the same index is the same round."""

    tvm: list[float]
    torch: list[float]

    def summary(self) -> dict[str, Any]:
        """The raw rounds, medians, percentiles and the ratio of the medians, JSON-able."""
        return {
            "tvm_seconds": self.tvm,
            "torch_seconds": self.torch,
            "tvm_median": statistics.median(self.tvm),
            "torch_median": statistics.median(self.torch),
            "torch_over_tvm": statistics.median(self.torch) / statistics.median(self.tvm),
            "p95": percentile(self.tvm, 0.95, ENOUGH_FOR_P95),
            "p99": percentile(self.tvm, 0.99, ENOUGH_FOR_P99),
            "torch_p95": percentile(self.torch, 0.95, ENOUGH_FOR_P95),
            "torch_p99": percentile(self.torch, 0.99, ENOUGH_FOR_P99),
        }


def duration(call: Callable[[], object], calls: int = 1) -> float:
    """Seconds per call, of so many in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def interleave(
    benchmark: Any,
    tvm_call: Callable[[], object],
    torch_call: Callable[[], object],
    *,
    budget: float,
    least: int = 5,
    most: int = 200,
    turn: float = 0.0,
) -> Interleaved:
    """Times both sides in turns; TVM's rounds are those of pytest-benchmark.

    The sides swap places every round: torch, TVM, TVM, torch, torch, TVM, ….

    Args:
        benchmark: The fixture. Its rounds last a whole turn; what is returned is per call.
        tvm_call: Runs the compiled side once.
        torch_call: Runs the other side once.
        budget: Seconds that all rounds of both sides take together, about.
        least: Rounds that run in any case.
        most: Rounds that are enough.
        turn: Seconds that a turn lasts at least, by as many calls as it takes.
    """
    calls, wakes, per_round = [], [], 0.0
    for call in (tvm_call, torch_call):
        call()
        seconds = duration(call)
        calls.append(max(1, math.ceil(turn / seconds)))
        wakes.append(0 if seconds > LONG_SECONDS else math.ceil(WAKE_SECONDS / seconds))
        per_round += SETTLE_SECONDS + (calls[-1] + wakes[-1]) * seconds
    rounds = max(least, min(most, int(budget / per_round)))
    torch_seconds: list[float] = []
    torch_comes_first = itertools.cycle((True, False))

    def settle(call: Callable[[], object], wake: int) -> None:
        time.sleep(SETTLE_SECONDS)
        for _ in range(wake):
            call()

    def torch_turn() -> None:
        settle(torch_call, wakes[1])
        torch_seconds.append(duration(torch_call, calls[1]))

    def tvm_turn() -> None:
        for _ in range(calls[0]):
            tvm_call()

    def before() -> None:
        if next(torch_comes_first):
            torch_turn()
        settle(tvm_call, wakes[0])

    def after() -> None:
        if len(torch_seconds) < len(benchmark.stats.stats.data):
            torch_turn()

    benchmark.pedantic(tvm_turn, setup=before, teardown=after, rounds=rounds)
    return Interleaved([seconds / calls[0] for seconds in benchmark.stats.stats.data], torch_seconds)
