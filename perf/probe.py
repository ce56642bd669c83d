"""What this machine can do at most, measured: fp32 multiply-adds in registers, and bandwidth of memory.

Two kernels that are written, compiled and threaded like every other kernel of the project, so that a share of the peak
says how much a kernel loses and not how two compilers differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from harness.compiler.schedules.common.kernel import Argument, fp32, prim_func
from harness.compiler.schedules.cpu.tile import VectorUnit, vector_unit
from harness.compiler.targets import TARGETS
from perf.measuring import Side

STEPS = 200_000
"""Steps of one call of the arithmetic kernel: about a millisecond."""
FIRST_SECONDS = 0.3
"""Length of the first measurement, which nobody sees."""
WINDOWS, WINDOW_SECONDS = 5, 0.1
"""How often, and each time for how long, the peaks beside a component are measured."""
ARRAY_BYTES = 64 << 20
"""Size of each array of the triad at least."""
ARRAY_CACHES = 4
"""Last-level caches that each array is as large as at least; STREAM's rule."""


@dataclass(frozen=True)
class Rate:
    """A kernel that does a known amount of work.

    Attributes:
        side: Runs it once.
        work: Operations or bytes of one run.
    """

    side: Side
    work: int

    def best(self, seconds: float) -> float:
        """Work per second of the fastest of the runs that fit the time, three at least, with all threads running."""
        self.side.warm_up()
        durations: list[float] = []
        until = time.perf_counter() + seconds
        while len(durations) < 3 or time.perf_counter() < until:
            durations.append(self.side.once())
        return self.work / min(durations)


@dataclass(frozen=True)
class Probe:
    """The compiled kernels with their operands.

    Attributes:
        unit: Vector registers of the target.
        threads: Tasks of the parallel loops, one for each of TVM's threads.
    """

    unit: VectorUnit
    threads: int
    _multiply_add: Rate
    _multiply_add_alone: Rate
    _triad: Rate

    def flops(self, seconds: float = 0.05) -> float:
        """fp32 multiply-adds in registers, two operations each, of all threads; FLOP/s."""
        return self._multiply_add.best(seconds)

    def flops_of_one_thread(self, seconds: float = 0.05) -> float:
        """FLOP/s of one thread while the others rest."""
        return self._multiply_add_alone.best(seconds)

    def bandwidth(self, seconds: float = 0.05) -> float:
        """a = b + s·c over arrays far larger than the caches, by all threads; byte/s.

        Counted as STREAM does, two reads and one write per element. Where a write first reads its cache line, 4/3 of
        that moves.
        """
        return self._triad.best(seconds)


@cache
def probe(threads: int) -> Probe:
    """Compiles the kernels for this machine's CPU."""
    target = TARGETS["llvm"].tvm_target()
    unit = vector_unit(target)
    part = max(ARRAY_BYTES, ARRAY_CACHES * last_level_cache()) // 4 // threads // unit.lanes
    length = part * threads * unit.lanes
    functions = {
        "multiply_add": _multiply_add("multiply_add", unit, threads, threads),
        "multiply_add_alone": _multiply_add("multiply_add_alone", unit, threads, 1),
        "triad": _triad(unit, threads, part),
    }
    module = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in functions.items()})
    library = tvm.compile(module, target)
    starts = np.random.default_rng(0).random((threads, _accumulators(unit), unit.lanes), np.float32)
    registers = (tvm.runtime.tensor(np.full(unit.lanes, 0.5, np.float32)), tvm.runtime.tensor(starts))
    arrays = [tvm.runtime.tensor(np.full(length, value, np.float32)) for value in (0.0, 1.0, 2.0)]

    def rate(name: str, operands: Sequence[Any], work: int) -> Rate:
        kernel = library[name]
        return Rate(Side(lambda: kernel(*operands)), work)

    flop = 2 * STEPS * _accumulators(unit) * unit.lanes
    result = Probe(
        unit,
        threads,
        rate("multiply_add", registers, flop * threads),
        rate("multiply_add_alone", registers, flop),
        rate("triad", arrays, 3 * 4 * length),
    )
    for measure in (result.flops, result.bandwidth):
        measure(FIRST_SECONDS)  # so that `Side.warm_up` knows how fast a run is
    return result


def measured_peaks(threads: int) -> tuple[float, float]:
    """This machine's FLOP/s and byte/s as of now: the best of `WINDOWS`, between which the system may move threads.

    One window alone, after gigabytes were freed, gave half of the peak: both threads were on one CPU all along.
    """
    machine = probe(threads)

    def best(rate: Callable[[float], float]) -> float:
        rates = []
        for _ in range(WINDOWS):
            rates.append(rate(WINDOW_SECONDS))
            time.sleep(WINDOW_SECONDS)
        return max(rates)

    return best(machine.flops), best(machine.bandwidth)


def last_level_cache() -> int:
    """Bytes of the largest cache that one CPU sees; 32 MiB where the system does not tell."""
    sizes = [
        int(path.read_text().strip().removesuffix("K")) << 10
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max(sizes, default=32 << 20)


def _accumulators(unit: VectorUnit) -> int:
    """Chains that hide the latency of a multiply-add, with registers left for the two factors."""
    return unit.registers // 2


def _multiply_add(name: str, unit: VectorUnit, threads: int, tasks: int) -> tirx.PrimFunc:
    """x = x·f + f in every accumulator, each with a start of its own, or the compiler would see that all are equal."""
    count, lanes = _accumulators(unit), unit.lanes

    def body(factors: tirx.Buffer, starts: tirx.Buffer) -> None:
        with T.parallel(0, tasks) as task:
            chains = T.alloc_buffer((count * lanes,), "float32", scope="local")
            factor = T.alloc_buffer((lanes,), "float32", scope="local")

            def each(emit: Callable[[int, Any], None]) -> None:
                for n in range(count):
                    with T.vectorized(0, lanes) as j:
                        emit(n, j)

            with T.vectorized(0, lanes) as j:
                T.buffer_store(factor, factors[j], [j])
            each(lambda n, j: T.buffer_store(chains, starts[task, n, j], [n * lanes + j]))
            with T.serial(0, STEPS):
                each(
                    lambda n, j: T.buffer_store(chains, chains[n * lanes + j] * factor[j] + factor[j], [n * lanes + j])
                )
            each(lambda n, j: T.buffer_store(starts, chains[n * lanes + j], [task, n, j]))

    return prim_func(name, [Argument("factors", (lanes,)), Argument("starts", (threads, count, lanes))], body)


def _triad(unit: VectorUnit, threads: int, part: int) -> tirx.PrimFunc:
    """a = b + s·c, each thread `part` vectors of its own."""

    def body(a: tirx.Buffer, b: tirx.Buffer, c: tirx.Buffer) -> None:
        with T.parallel(0, threads) as task, T.serial(0, part) as step, T.vectorized(0, unit.lanes) as j:
            at = (task * part + step) * unit.lanes + j
            T.buffer_store(a, b[at] + fp32(0.5) * c[at], [at])

    return prim_func("triad", [Argument(name, (threads * part * unit.lanes,)) for name in "abc"], body)
