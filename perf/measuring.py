"""Times two or more sides in one run: rounds are interleaved, the order of the sides rotates."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ENOUGH_FOR_P95, ENOUGH_FOR_P99 = 20, 100
"""Samples below which there is no such percentile."""

SETTLE_SECONDS = 0.01
"""Pause before each side's calls, in which the threads of the other side's pool stop spinning.

GNU's OpenMP spins for 8 ms after a parallel loop of torch, TVM's pool for 4 ms under `SPIN_COUNT`; measured.
"""
SPIN_COUNT = "10000"
"""How long TVM's idle threads spin. By default it is 115 ms, in which they would take a CPU from torch."""

WARM_UP_SECONDS, LONGEST_WARM_UP_SECONDS = 0.015, 0.3
"""How long calls are repeated before the timed one, and how long at most.

A worker thread that has slept may wake up on the CPU of its caller, where both run at half speed until the system moves
one of them; measured: mostly within 20 ms, at times after 100.
"""
WARM = 1.2
"""A call that takes less than this many times the fastest one so far has all its threads on CPUs of their own."""
LONG_SECONDS = 1.0
"""A call that takes longer needs no warm-up."""


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


@dataclass
class Side:
    """A function that is called again and again, and whose threads sleep in between.

    Attributes:
        call: Runs the side once.
        fastest: Seconds of the fastest call so far.
    """

    call: Callable[[], object]
    fastest: float = math.inf

    def once(self) -> float:
        """Returns the seconds of one call."""
        start = time.perf_counter()
        self.call()
        seconds = time.perf_counter() - start
        self.fastest = min(self.fastest, seconds)
        return seconds

    def warm_up(self) -> None:
        """Calls the side until all its threads run."""
        start = time.perf_counter()
        while self.fastest < LONG_SECONDS:
            warm = self.once() < WARM * self.fastest
            passed = time.perf_counter() - start
            if passed > LONGEST_WARM_UP_SECONDS or (warm and passed > WARM_UP_SECONDS):
                break


def interleave(
    benchmark: Any,
    tvm_call: Callable[[], object],
    torch_call: Callable[[], object],
    *,
    budget: float,
    least: int = 5,
    most: int = 200,
    batch: float = 0.0,
) -> Interleaved:
    """Times two sides in interleaved rounds; pytest-benchmark's rounds are those of TVM.

    The sides swap places every round: torch, TVM, TVM, torch, torch, TVM, ….

    Args:
        benchmark: The fixture. It times all calls of a round together; what is returned is per call.
        tvm_call: Runs the compiled side once.
        torch_call: Runs the other side once.
        budget: Seconds that all rounds of both sides take together, about.
        least: Rounds that run in any case.
        most: Rounds that are enough.
        batch: Seconds that a side's calls of one round last together at least; short calls are repeated until they do.
    """
    tvm, torch = Side(tvm_call), Side(torch_call)
    calls, per_round = [], 0.0
    for side in (tvm, torch):
        side.once()
        side.warm_up()
        calls.append(max(1, math.ceil(batch / side.fastest)))
        per_round += expected_seconds(side.fastest, calls[-1])
    rounds = max(least, min(most, int(budget / per_round)))
    torch_seconds: list[float] = []
    torch_comes_first = itertools.cycle((True, False))

    def settle(side: Side) -> None:
        time.sleep(SETTLE_SECONDS)
        side.warm_up()

    def tvm_calls() -> None:
        for _ in range(calls[0]):
            tvm_call()

    def torch_calls() -> None:
        settle(torch)
        start = time.perf_counter()
        for _ in range(calls[1]):
            torch_call()
        torch_seconds.append((time.perf_counter() - start) / calls[1])

    def before() -> None:
        if next(torch_comes_first):
            torch_calls()
        settle(tvm)

    def after() -> None:
        if len(torch_seconds) < len(benchmark.stats.stats.data):
            torch_calls()

    benchmark.pedantic(tvm_calls, setup=before, teardown=after, rounds=rounds)
    return Interleaved([seconds / calls[0] for seconds in benchmark.stats.stats.data], torch_seconds)


def interleave_sides(
    benchmark: Any,
    calls: Mapping[str, Callable[[], object]],
    *,
    budget: float,
    least: int = 5,
    most: int = 40,
    batch: float = 0.0,
) -> dict[str, list[float]]:
    """Times any number of sides in interleaved rounds; the first side of a round is the last of the next.

    Args:
        benchmark: The fixture; it times whole rounds.
        calls: Runs each side once.
        budget: Seconds that all rounds of all sides take together, about.
        least: Rounds that run in any case.
        most: Rounds that are enough.
        batch: Seconds that a side's calls of one round last together at least; short calls are repeated until they do.
    """
    sides = {name: Side(call) for name, call in calls.items()}
    repeats, seconds = {}, []
    for name, side in sides.items():
        side.once()
        side.warm_up()
        repeats[name] = max(1, math.ceil(batch / side.fastest))
        seconds.append(expected_seconds(side.fastest, repeats[name]))

    def timed(name: str) -> Callable[[], float]:
        def run() -> float:
            sides[name].warm_up()
            start = time.perf_counter()
            for _ in range(repeats[name]):
                calls[name]()
            return (time.perf_counter() - start) / repeats[name]

        return run

    rounds = max(least, min(most, int(budget / sum(seconds))))
    return run_rounds(benchmark, {name: timed(name) for name in sides}, rounds)


def run_rounds(benchmark: Any, calls: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Calls every side once in each round; the first side of a round is the last of the next.

    Args:
        benchmark: The fixture; it times whole rounds.
        calls: Each measures one side once and returns the seconds of one call.
        rounds: How many.

    Returns:
        The seconds by side; the same index is the same round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)

    def one_round() -> None:
        for name in order:
            time.sleep(SETTLE_SECONDS)
            seconds[name].append(calls[name]())
        order.append(order.pop(0))

    benchmark.pedantic(one_round, rounds=rounds)
    return seconds


def expected_seconds(fastest: float, repeats: int = 1) -> float:
    """Returns how long one side takes in a round, about: the pause, the warm-up and the calls."""
    warm_up = 0.0 if fastest > LONG_SECONDS else max(fastest, WARM_UP_SECONDS)
    return SETTLE_SECONDS + warm_up + repeats * fastest
