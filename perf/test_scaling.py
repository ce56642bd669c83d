"""How each component would scale to 128 threads: its loops measured part by part, replayed, and held to the clock.

    pytest perf/test_scaling.py --component scoring_head
    pytest perf/test_scaling.py --scale full --scaling-plot docs/scaling.png

The model and what it assumes are in `perf/scaling.py`. It is held to the clock where that can be done: on as many
threads as this machine has, and on more of them (`OVERSUBSCRIBED`). Both are reported, and held within `TOLERANCE`
if nothing else used the CPUs meanwhile; otherwise only the processor time of all threads is held, within
`BUSY_TOLERANCE`. Programs of small kernels are not held, where launching loops from Python takes as long as they do.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from harness.core.case import Case
from harness.processes.threads import configure_threads
from harness.runtime.executable import Executable
from harness.runtime.threads import usable_cpus
from harness.targets import HOST, TARGETS
from perf.components import prepare
from perf.launching import launched_by, on_threads
from perf.options import Options
from perf.parts import measured_program
from perf.probe import probe
from perf.results import UNTUNED
from perf.scaling import THREADS, Machine
from perf.sides import read

ROUNDS = 3
"""Runs for each number of parts, unless --rounds says otherwise."""
OVERSUBSCRIBED = 16
"""Threads of the run on more threads than CPUs."""
TOLERANCE = 0.25
"""Share by which the clock and the model may differ."""
PART_SECONDS = 30e-6
"""What a part costs besides that is launched from Python: a run is held only if these are a tenth of it at most."""
BUSY_TOLERANCE = 1.0
"""The same for processor time beside other processes, which leave less of the caches and of the memory's bandwidth."""
QUIET = 0.9
"""Share of the CPUs that a run must have had for its wall time to count."""


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Returns the seconds of a run and the processor time of all threads meanwhile, each the least of three."""
    walls, busy_times = [], []
    for _ in range(3):
        wall, busy = time.perf_counter(), time.process_time()
        run()
        walls.append(time.perf_counter() - wall)
        busy_times.append(time.process_time() - busy)
    return min(walls), min(busy_times)


def test_scaling(measured_case: Case, benchmark: Any, scaling_results: list[dict[str, Any]], options: Options) -> None:
    case = measured_case
    if TARGETS[case.target] is not HOST:
        pytest.skip(f"threads are the CPU's: {case.target} has none of this kind")
    threads, cpus = configure_threads(), usable_cpus()
    with tempfile.TemporaryDirectory(prefix="sam3-tvm-") as name:
        library = prepare(case, Path(name), None, options.processors).libraries[UNTUNED]
        executable = Executable(library, HOST.device(), read(Path(name), "weight"))
        inputs = read(Path(name), "input")
        executable.run(inputs)
        program = measured_program(library, executable, inputs, options.rounds or ROUNDS)
        machine = Machine(probe(threads).bandwidth())

        with ExitStack() as stack:
            launch = stack.enter_context(on_threads(OVERSUBSCRIBED))
            stack.enter_context(launched_by(library, launch))
            many, busy = timed(lambda: executable.run(inputs))
        wall, busy_on_all = benchmark.pedantic(lambda: timed(lambda: executable.run(inputs)), rounds=1)
    result: dict[str, Any] = {
        "case": case.to_json(),
        "threads": threads,
        "program": program,
        "machine": machine,
        "clock": {
            f"{threads} threads": (program.seconds(threads, machine), wall),
            f"{OVERSUBSCRIBED} threads on {cpus} CPUs": (program.shared(OVERSUBSCRIBED, cpus), many),
            "processor time": (program.busy(OVERSUBSCRIBED), busy),
        },
        "quiet": busy_on_all / wall > QUIET * threads and busy / many > QUIET * cpus,
    }
    scaling_results.append(result)
    benchmark.extra_info |= {
        "scaling": {how: {str(n): program.speedup(n, machine, how) for n in THREADS} for how in ("dynamic", "static")},
        "clock": result["clock"],
    }
    launching = PART_SECONDS * OVERSUBSCRIBED * sum(len(call.loops) for call in program.calls)
    tolerance = TOLERANCE if result["quiet"] else BUSY_TOLERANCE
    held = tuple(result["clock"]) if result["quiet"] else ("processor time",)
    for what in held if program.busy(1) > 10 * launching else ():
        modelled, measured = result["clock"][what]
        wrong = f"{what}: {modelled:.4g} s, but {measured:.4g} s"
        assert max(modelled, measured) <= (1 + tolerance) * min(modelled, measured), wrong
