"""Measures products of the ViT on a CPU's matrix unit, AMX, as shares of the unit's peak, with oneDNN beside them.

    python -m perf.matrix_unit

The peak is that of `tdpbf16ps` on registers alone, by all threads. Each linear layer of the ViT is compiled in bfloat16
as in a model; PyTorch calls oneDNN with bfloat16 weights and inputs. The two take turns, and the peak is measured again
before each layer, because a processor that multiplies on its unit lowers its clock.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import tvm

from harness.compiler import tir as T
from harness.compiler.lowering.route import Route
from harness.compiler.schedules.common.kernel import Argument, prim_func
from harness.compiler.schedules.cpu.microkernels.amx import AMX
from harness.compiler.targets import HOST
from harness.compiler.targets.compiling import LIBRARY_SUFFIX
from harness.core.errors import HarnessError
from harness.core.machine import describe_machine
from harness.core.processes.threads import configure_threads
from harness.core.processors import Processors
from harness.runtime.cpu import MATRIX_UNIT, cpu_features, emulated_features, matrix_unit_problem
from perf.compiling import compiled
from perf.kernels import Group, Kernel, flop, kernels
from perf.measuring import Side
from perf.probe import Rate

CPU = "x86-64-v3+amx"
"""The processor that products are compiled for: the unit, and the vectors of every CPU that has one."""
STEPS = 20_000
"""Steps of one call of the kernel of the peak: some milliseconds."""
SUMS = 4
"""Registers of sums of a step; the other four of the eight are operands."""
PEAK_SECONDS = 0.2
"""Length of a measurement of the peak."""
OPERATIONS = 2 * 16 * 16 * 32
"""Operations of `tdpbf16ps`: 16 × 16 sums of 32 products (Intel's manual, volume 2, TDPBF16PS)."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the peak, and a line for each linear layer of the ViT."""
    parser = argparse.ArgumentParser(description="Products of the ViT on the matrix unit, beside oneDNN.")
    parser.add_argument("--rounds", type=int, default=9, help="calls of each side")
    given: Any = parser.parse_args(arguments)
    try:
        measure(given.rounds)
    except HarnessError as error:
        sys.exit(f"error: {error}")


def measure(rounds: int) -> None:
    """Prints what `main` does.

    Args:
        rounds: Calls of each side for each layer.

    Raises:
        HarnessError: This machine has no unit, the system refuses it, or there are no rounds.
    """
    if rounds < 1:
        raise HarnessError(f"cannot measure {rounds} rounds: give --rounds 1 or more")
    if not set(MATRIX_UNIT) <= (cpu_features() or frozenset()) | emulated_features():
        raise HarnessError(
            "this CPU has no matrix unit (AMX): use one that has, or python -m perf.beside_matrix_unit on this one"
        )
    if problem := matrix_unit_problem():
        raise HarnessError(
            f"the system refuses the matrix unit ({problem}): use a kernel and a container that allow it"
        )
    threads = configure_threads()
    unit = _peak(threads)
    print(f"{threads} threads of {describe_machine()['cpu']}, {rounds} interleaved rounds, medians")
    with tempfile.TemporaryDirectory(prefix="sam3-tvm-") as folder:
        for number, kernel in enumerate(kernel for kernel in kernels() if kernel.group is Group.VIT_LINEAR):
            peak = unit.best(PEAK_SECONDS)
            print(_line(kernel, Path(folder) / f"{number}{LIBRARY_SUFFIX}", peak, rounds), flush=True)


def _line(kernel: Kernel, library: Path, peak: float, rounds: int) -> str:
    """Measures a layer and returns its line."""
    module, inputs = kernel.make(torch.Generator().manual_seed(0))
    work = flop(module, inputs)
    ours = compiled(module, inputs, library, Processors(CPU), Route(precision="bf16"))
    seconds = _interleaved({"ours": ours, "oneDNN": _one_dnn(module, inputs)}, rounds)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    shares = ", ".join(
        f"{name} {time * 1e3:.1f} ms ({min(seconds[name]) * 1e3:.1f}–{max(seconds[name]) * 1e3:.1f}), "
        f"{work / time / peak:.0%} of the peak"
        for name, time in median.items()
    )
    ratio = median["oneDNN"] / median["ours"]
    return f"  {kernel.name} {kernel.shape}: {shares}, oneDNN / ours {ratio:.2f}; peak {peak / 1e9:,.0f} GFLOP/s"


def _one_dnn(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    """Returns what calls the layer with bfloat16 weights and inputs, which PyTorch passes to oneDNN."""
    half, arguments = module.bfloat16(), tuple(tensor.bfloat16() for tensor in inputs)

    def call() -> object:
        with torch.no_grad():
            return half(*arguments)

    return call


def _interleaved(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each side's calls; the sides swap places every round."""
    sides = {name: Side(call) for name, call in calls.items()}
    for side in sides.values():
        side.warm_up()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            seconds[name].append(sides[name].once())
    return seconds


def _peak(threads: int) -> Rate:
    """Compiles the kernel that multiplies registers of the unit in all threads."""
    target = HOST.tvm_target(Processors(CPU))

    def body(_result: T.Buffer) -> None:
        with AMX.imported(), T.parallel(0, threads), AMX.setup():
            for register in range(SUMS):
                T.evaluate(T.call_llvm_intrin("void", "llvm.x86.tilezero", T.const(register, "int8")))
            with T.serial(0, STEPS):
                for register in range(SUMS):
                    operands = (T.const(number, "int8") for number in (register, SUMS, SUMS + 1))
                    T.evaluate(T.call_llvm_intrin("void", "llvm.x86.tdpbf16ps", *operands))

    function = prim_func("multiply", [Argument("result", (1,))], body).with_attr("global_symbol", "multiply")
    kernel = tvm.compile(tvm.IRModule({"multiply": function}), target)["multiply"]
    result = tvm.runtime.empty((1,), "float32")
    return Rate(Side(lambda: kernel(result)), OPERATIONS * SUMS * STEPS * threads)


if __name__ == "__main__":
    main()
