"""How components and the whole model would scale to 128 threads: loops measured part by part, and replayed.

    pytest perf/test_scaling.py --component scoring_head
    pytest perf/test_scaling.py --component end_to_end --scale full --rounds 1
    pytest perf/test_scaling.py --scale full --scaling-plot scaling.png

The whole model is the compiled folder: each entry point that a photograph and a text call is a program, and all of them
together are one. At full scale that takes 8 GB of memory and some 15 minutes for each of the rounds.

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

from harness.compiler.deployment.compiling import compile_model
from harness.compiler.deployment.deployable import ArtifactSpec
from harness.compiler.targets import HOST, TARGETS
from harness.core.case import Case
from harness.core.processes.threads import configure_threads, thread_count
from harness.core.settings import Settings
from harness.models.sam3.deployed.deployable import DEPLOYABLE
from harness.models.sam3.deployed.options import GROUNDING_ALONE
from harness.models.sam3.subjects import END_TO_END
from harness.runtime.executable import Executable
from harness.runtime.manifest import LIBRARY
from harness.runtime.threads import usable_cpus
from perf.components import prepare
from perf.entry_points import calls_of
from perf.launching import launched_by, on_threads
from perf.options import Options
from perf.parts import measured_program
from perf.probe import probe
from perf.results import UNTUNED
from perf.scaling import DISTRIBUTIONS, THREADS, Machine, Program, together
from perf.scaling_tables import programs_of
from perf.sides import read
from perf.whole_model import PHOTOGRAPH, TEXT

SUBJECT = END_TO_END.name
WHOLE = "photograph and text"
ROUNDS = 3
"""Runs for each number of parts and of the clock, unless --rounds says otherwise."""
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


def timed(run: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Returns the seconds of a run and the processor time of all threads meanwhile, each the least of some rounds."""
    walls, busy_times = [], []
    for _ in range(rounds):
        wall, busy = time.perf_counter(), time.process_time()
        run()
        walls.append(time.perf_counter() - wall)
        busy_times.append(time.process_time() - busy)
    return min(walls), min(busy_times)


def test_scaling(measured_case: Case, benchmark: Any, scaling_results: list[dict[str, Any]], options: Options) -> None:
    _only_on_the_host(measured_case)
    configure_threads()
    rounds = options.rounds or ROUNDS
    with tempfile.TemporaryDirectory(prefix="sam3-tvm-") as name:
        library = prepare(measured_case, Path(name), None, options.processors).libraries[UNTUNED]
        executable = Executable(library, HOST.device(), read(Path(name), "weight"))
        inputs = read(Path(name), "input")

        def run() -> object:
            return executable.run(inputs)

        run()
        component = measured_case.component
        program = measured_program(library, executable._vm, run, rounds)  # nothing else needs the machine
        result = {"name": component, "parts": {}, "program": program, "case": measured_case.to_json()}
        result |= _clocked(program, library, run, benchmark, rounds)
    _held(result, scaling_results, benchmark)


def test_scaling_of_the_whole_model(
    whole_case: Case, benchmark: Any, scaling_results: list[dict[str, Any]], options: Options
) -> None:
    _only_on_the_host(whole_case)
    configure_threads()
    rounds = options.rounds or ROUNDS
    with tempfile.TemporaryDirectory(prefix="sam3-tvm-") as name:
        settings = Settings(processors=options.processors)
        compile_model(ArtifactSpec(DEPLOYABLE, whole_case, settings, GROUNDING_ALONE), Path(name))
        artifact, made = calls_of(Path(name), lambda model: model.set_image(PHOTOGRAPH).segment(TEXT).outputs.masks)
        # Each entry point once: a question has the masks of what it finds, and not those of all queries.
        calls = list({call.entry: call for call in made}.values())

        def run() -> None:
            for call in calls:
                call.run()

        library, machine = Path(name) / LIBRARY, artifact._machine  # nothing else needs it
        parts = {call.entry: measured_program(library, machine, call.run, rounds, call.entry) for call in calls}
        program = together(parts.values())
        result = {"name": WHOLE, "parts": parts, "program": program, "case": whole_case.to_json()}
        result |= _clocked(program, library, run, benchmark, rounds)
    _held(result, scaling_results, benchmark)


def _only_on_the_host(case: Case) -> None:
    if TARGETS[case.target] is not HOST:
        pytest.skip(f"threads are the CPU's: {case.target} has none of this kind")


def _clocked(program: Program, library: Path, run: Callable[[], object], benchmark: Any, rounds: int) -> dict[str, Any]:
    """Returns what the model and the clock say of a run on the threads of this process, and on `OVERSUBSCRIBED`."""
    threads, cpus = thread_count(), usable_cpus()
    machine = Machine(probe(threads).bandwidth())
    with ExitStack() as stack:
        launch = stack.enter_context(on_threads(OVERSUBSCRIBED))
        stack.enter_context(launched_by(library, launch))
        many, busy = timed(run, rounds)
    wall, busy_on_all = benchmark.pedantic(lambda: timed(run, rounds), rounds=1)
    return {
        "threads": threads,
        "machine": machine,
        "clock": {
            f"{threads} threads": (program.seconds(threads, machine), wall),
            f"{OVERSUBSCRIBED} threads on {cpus} CPUs": (program.shared(OVERSUBSCRIBED, cpus), many),
            "processor time": (program.busy(OVERSUBSCRIBED), busy),
        },
        "quiet": busy_on_all / wall > QUIET * threads and busy / many > QUIET * cpus,
    }


def _held(result: dict[str, Any], scaling_results: list[dict[str, Any]], benchmark: Any) -> None:
    """Adds a result to those of the session, and holds its model to the clock."""
    program, machine = result["program"], result["machine"]
    scaling_results.append(result)
    benchmark.extra_info |= {
        "scaling": {
            name: {how: {str(n): scaled.speedup(n, machine, how) for n in THREADS} for how in DISTRIBUTIONS}
            for name, scaled in programs_of([result]).items()
        },
        "clock": result["clock"],
        "kernels": {
            name: {"calls": len(of_one.calls), "seconds": {str(n): of_one.seconds(n, machine) for n in THREADS}}
            for name, of_one in program.by_function().items()
        },
    }
    launching = PART_SECONDS * OVERSUBSCRIBED * sum(len(call.loops) for call in program.calls)
    tolerance = TOLERANCE if result["quiet"] else BUSY_TOLERANCE
    held = tuple(result["clock"]) if result["quiet"] else ("processor time",)
    for what in held if program.busy(1) > 10 * launching else ():
        modelled, measured = result["clock"][what]
        wrong = f"{what}: {modelled:.4g} s, but {measured:.4g} s"
        assert max(modelled, measured) <= (1 + tolerance) * min(modelled, measured), wrong
