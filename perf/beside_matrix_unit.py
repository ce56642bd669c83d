"""How long bf16 takes beside the instructions of the matrix unit, AMX, on a CPU without one, and fp32 in the same run.

    python -m perf.beside_matrix_unit --component vision_backbone --scale full

A component is compiled for the unit, and each of the unit's instructions is overwritten by one that does nothing
(`harness.compiler.execution.emulation.matrix_unit.leave_out`). What is left is everything else that such code does, at
full speed: rounding and packing operands, softmax, epilogues, what is not multiplied on the unit. The quotient of both
times is what no unit can exceed beside these vectors. A unit adds what its products take, which is told in cycles.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tvm

from harness.compiler.execution.emulation.matrix_unit import leave_out
from harness.compiler.lowering.route import Route
from harness.compiler.schedules import UNTUNED
from harness.compiler.targets import HOST
from harness.compiler.targets.compiling import LIBRARY_SUFFIX, build_library, lower_module
from harness.compiler.targets.llvm import lacks_matrix_unit_alone
from harness.core.budget import NO_GROUPS
from harness.core.case import DEFAULT_STRATEGY, Case, Scale
from harness.core.errors import HarnessError
from harness.core.machine import describe_machine
from harness.core.processes.threads import configure_threads
from harness.core.processors import Processors
from harness.core.settings import SEEDED
from harness.models.registry import models, subjects
from harness.models.traced import TracedWorkload
from harness.runtime.cpu import MATRIX_UNIT, add_emulated_features
from harness.runtime.executable import Executable
from perf.components import call_of, inputs_of
from perf.launching import launched_by, one_by_one
from perf.measuring import Side
from perf.profiling import Work, kernel_times, work_of_functions

UNIT = "+amx"
"""What a CPU's name ends in if code for it may use the unit."""
OPERATIONS_OF_CYCLE = 1024
"""Of a unit: `tdpbf16ps` does 16 × 16 × 32 multiply-adds and begins every 16 cycles (Intel's optimization manual)."""
FP32, BESIDE = "fp32", "bf16 beside the unit"
LONGEST_NAME = 60
"""Characters of a kernel's name that are printed."""


@dataclass(frozen=True)
class Compiled:
    """A compiled component on its inputs.

    Attributes:
        executable: The component.
        inputs: What it is called with.
        work: The work of one call of each kernel.
        library: Where its code is.
    """

    executable: Executable
    inputs: Sequence[tvm.runtime.Tensor]
    work: dict[str, Work]
    library: Path

    def run(self) -> object:
        """Calls it."""
        return self.executable.run(self.inputs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures a component and prints what was found."""
    parser = argparse.ArgumentParser(description="What bf16 takes beside the instructions of the matrix unit.")
    parser.add_argument("--component", required=True, help="a component of `sam3-tvm list`")
    parser.add_argument("--scale", choices=[str(scale) for scale in Scale], default=str(Scale.SHALLOW))
    parser.add_argument("--cpu", default=f"x86-64-v3{UNIT}", help="what to compile for; all but the unit is needed")
    parser.add_argument("--rounds", type=int, default=5, help="calls of each side")
    given: Any = parser.parse_args(arguments)
    try:
        measure(given.component, given.scale, given.cpu, given.rounds)
    except HarnessError as error:
        sys.exit(f"error: {error}")


def measure(component: str, scale: str, cpu: str, rounds: int) -> None:
    """Prints what `main` does.

    Raises:
        HarnessError: There is no such component, it is no trace of calls, or this machine is not such a CPU without a
            unit.
    """
    if component not in subjects():
        raise HarnessError(f"there is no component {component!r}: choose one of {', '.join(subjects())}")
    if not cpu.endswith(UNIT) or not lacks_matrix_unit_alone(Processors(cpu)):
        raise HarnessError(f"--cpu {cpu} must name a CPU that this machine is but for the unit, and end in {UNIT}")
    if rounds < 1:
        raise HarnessError(f"cannot measure {rounds} rounds: give --rounds 1 or more")
    threads = configure_threads()
    add_emulated_features(MATRIX_UNIT)
    fp32 = Case(component, DEFAULT_STRATEGY, HOST.name, scale)
    with tempfile.TemporaryDirectory(prefix="sam3-tvm-") as folder:
        plain = _compiled(fp32, cpu.removesuffix(UNIT), Path(folder) / f"fp32{LIBRARY_SUFFIX}")
        beside = _compiled(replace(fp32, precision="bf16"), cpu, Path(folder) / f"bf16{LIBRARY_SUFFIX}")
        leave_out()
        with launched_by(beside.library, one_by_one(threads)):
            beside.run()
        sides = {FP32: Side(plain.run), BESIDE: Side(beside.run)}
        for side in sides.values():
            side.warm_up()
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds):
            for name in (FP32, BESIDE) if number % 2 == 0 else (BESIDE, FP32):
                seconds[name].append(sides[name].once())
        kernels = kernel_times(beside.executable, beside.inputs)
    print(
        f"{component}, {scale}, {cpu}, {threads} threads of {describe_machine()['cpu']}, "
        f"{rounds} interleaved rounds, medians"
    )
    _tell(seconds, kernels, beside.work)


def _tell(seconds: dict[str, list[float]], kernels: Sequence[dict[str, Any]], work: dict[str, Work]) -> None:
    """Prints what was measured of both sides, and of the kernels of the one without a unit."""
    for name, times in seconds.items():
        shortest, median, longest = map(_told, (min(times), statistics.median(times), max(times)))
        print(f"  {name}: {median} ({shortest}–{longest})")
    most = statistics.median(seconds[FP32]) / statistics.median(seconds[BESIDE])
    print(f"  with these vectors no unit makes bf16 more than {most:.1f} times as fast as fp32")
    operations = sum(_of_unit(kernel["name"], work) * kernel["calls"] for kernel in kernels)
    cycles = operations / OPERATIONS_OF_CYCLE
    print(f"  {operations / 1e9:.2f} GFLOP are left to units, {cycles / 1e6:.1f} million cycles of theirs at least")
    print("  kernels of one run beside the unit:")
    for kernel in kernels:
        name = kernel["name"]
        print(
            f"    {_told(kernel['seconds']):>9}  {kernel['calls']:3} × {name[:LONGEST_NAME]} {work[name].size}".rstrip()
        )


def _compiled(case: Case, cpu: str, library: Path) -> Compiled:
    """Compiles the main call of a component for a CPU.

    Raises:
        HarnessError: The component is no trace of calls.
    """
    subject, processors = subjects()[case.component], Processors(cpu)
    with models()[subject.model].context():
        workload = subject.open(case, SEEDED)
        if not isinstance(workload, TracedWorkload):
            raise HarnessError(f"{case.component} is no trace of calls: measure a component that is one")
        call = call_of(workload, case.component, "")
        program, inputs = workload.programs[call.program], inputs_of(call, case.component)
        route = Route.from_case(case, NO_GROUPS)
        imported = route.lower(route.export(program.module, inputs, program.axes), program.module)
    target = HOST.tvm_target(processors)
    lowered = lower_module(imported.module, HOST, target, UNTUNED)
    build_library(lowered, target, library)
    executable = Executable(library, HOST.device(), list(imported.parameters().values()))
    return Compiled(
        executable, [tvm.runtime.tensor(tensor.numpy()) for tensor in inputs], work_of_functions(lowered), library
    )


def _of_unit(name: str, work: dict[str, Work]) -> int:
    """Returns the operations of bfloat16 that a kernel leaves to the unit in one call."""
    in_tiles = UNIT.removeprefix("+") in name.rstrip("0123456789").split("_")
    return (work[name].flop or 0) if in_tiles else 0


def _told(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


if __name__ == "__main__":
    main()
