"""Speed and memory of each component: PyTorch eager, TVM untuned, TVM tuned and, with --peers, what else there is.

    pytest perf/test_components.py --scale full --benchmark-json=perf.json
    pytest perf/test_components.py --component vit --scale full --peers

Every side has a process of its own (`perf/seats.py`) and the same weights and inputs. The outputs of its first call
are judged as in a verification: ours must pass, peers are reported with their figures. Then all sides take turns, one
call a round, and the first of a round is the last of the next. Peak memory is that of the side's process over all its
calls. The machine's peaks are measured right before and right after; where our time goes, kernel by kernel, is from one
more run.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi

from harness.core.case import Case
from harness.core.outcome import VerdictKind
from harness.core.settings import Settings
from harness.lowering.frontends.torch_export import export_program
from harness.lowering.rope import STRATEGIES
from harness.models.sam3.source import Arrays, Source
from harness.models.sam3.upstream import upstream
from harness.parity.verdict import judge
from harness.processes.threads import configure_threads
from harness.schedules import UNTUNED as NO_SCHEDULES
from harness.targets import TARGETS
from harness.targets.compiling import LIBRARY_SUFFIX, build_library, lower_module
from harness.tuning.database import schedules_from, this_place
from harness.tuning.tasks import tasks_of
from harness.tuning.trials import nothing_found, read_trials
from perf import peers
from perf.options import Options
from perf.peers import COMPILE, PEERS, Peer, PeerError
from perf.probe import measured_peaks
from perf.profiling import Work, flop_of_program, with_work, work_of_functions
from perf.results import OURS, TORCH, TUNED, UNTUNED, circumstances, judged, memory_bytes, ratios, summary
from perf.seats import Seat, SeatError, contest
from perf.sides import KERNELS, RUN, Request, save

BUDGET_SECONDS = 30.0
"""How long the rounds of all sides together may take per component; at least six run in any case."""


@dataclass
class Prepared:
    """A component that is compiled and saved, and what its outputs are held to.

    Attributes:
        judge: Outputs of a side → the worst verdict, with its figures.
        flop: Operations of its products, convolutions and attention.
        libraries: What TVM compiled, by side.
        compile_seconds: From PyTorch's module to a library, by side.
        work: What one call of each compiled function does, by side.
        note: Why there is no tuned side, if there is none.
    """

    judge: Callable[[list[np.ndarray]], dict[str, Any]]
    flop: int
    libraries: dict[str, Path] = field(default_factory=dict)
    compile_seconds: dict[str, float] = field(default_factory=dict)
    work: dict[str, dict[str, Work]] = field(default_factory=dict)
    note: str = ""


def test_component(
    measured_case: Case, benchmark: Any, component_results: list[dict[str, Any]], options: Options
) -> None:
    case = measured_case
    target = TARGETS[case.target]
    problem = target.compile_problem() or target.run_problem()
    if problem or case.strategy == "none":
        pytest.skip(problem or "the control strategy does not compile")
    threads = configure_threads()
    # Not pytest's folder, which stays: at full scale there are gigabytes of weights in it.
    with tempfile.TemporaryDirectory(prefix="sam3-tvm-") as name, ExitStack() as stack:
        folder = Path(name)
        prepared = prepare(case, folder, options.database_for(case.target))
        gc.collect()
        sides: dict[str, dict[str, Any]] = {}
        seats: dict[str, Seat] = {}

        def take_part(side: str, seat: Seat, compile_seconds: float | None) -> None:
            seats[side] = stack.enter_context(seat)
            first_call, outputs = seat.first(RUN)
            load = {"compile_seconds": compile_seconds, "load_seconds": seat.load_seconds}
            sides[side] = {"first_call": first_call, **load, **prepared.judge(outputs)}

        take_part(TORCH, Seat("perf.sides:torch_side", Request(folder)), None)
        for side, library in prepared.libraries.items():
            seat = Seat("perf.sides:tvm_side", Request(folder, case.target, library))
            take_part(side, seat, prepared.compile_seconds[side])
            assert sides[side]["verdict"] in (VerdictKind.STRICT, VerdictKind.ORACLE), sides[side]
        files: dict[str, float] = {}
        for side in options.peers:
            try:
                memory = seats[TORCH].memory()
                take_part(side, *sit_down(PEERS[side], folder, memory.run if memory else 0, files))
            except (PeerError, SeatError) as error:
                seats.pop(side, None)
                sides[side] = {"error": str(error)}

        peaks = [measured_peaks(threads)]
        seconds, lost = contest(benchmark, seats, RUN, budget=BUDGET_SECONDS, rounds=options.rounds)
        peaks.append(measured_peaks(threads))
        assert not lost.keys() - PEERS.keys(), lost
        sides |= {side: {"error": error} for side, error in lost.items()}
        for side, rounds in seconds.items():
            sides[side] = summary(rounds) | {"memory": memory_bytes(seats[side].memory())} | sides[side]
        best = next(side for side in reversed(OURS) if side in seats)
        seats[best].wake(RUN)
        times = seats[best].result(KERNELS) if case.target == "llvm" else []  # a GPU is not waited for after each
        kernels = with_work(times, prepared.work[best])
    result = {"case": case.id, "sides": sides, "ratios": ratios(sides), "flop": prepared.flop}
    result |= {"kernels": kernels, "profiled": best, "note": prepared.note} | circumstances(threads, peaks)
    result["versions"] |= peers.versions() if options.peers else {}
    benchmark.extra_info |= result
    component_results.append(result)


def prepare(case: Case, folder: Path, database: Path | None) -> Prepared:
    """Compiles the main sample without and with what a database has found, and saves what the sides load."""
    target, strategy = TARGETS[case.target], STRATEGIES[case.strategy]
    with upstream():
        source = Source(case, Settings())
        sample, args = next(iter(source.samples.items()))
        inputs = tuple(args.values())
        start = time.perf_counter()
        with strategy.apply(source.module):
            program = export_program(source.module, inputs)
        module, parameters = strategy.import_program(program)
        importing = time.perf_counter() - start
        reference, oracle = source.reference()[0], source.oracle()
        prepared = Prepared(judging(sample, source, reference, oracle), flop_of_program(program))
        save(source.module, inputs, list(parameters.values()), folder)
    del program, parameters, source
    lowered: tvm.IRModule | None = None
    sides = {UNTUNED: NO_SCHEDULES}
    if database is not None:
        sides[TUNED] = schedules_from(database, case.target)
    for side, chosen in sides.items():
        start = time.perf_counter()
        tvm_target = target.tvm_target()
        before, lowered = lowered, lower_module(module, target, tvm_target, chosen)
        if database is not None and side == TUNED and tvm_ffi.structural_equal(before, lowered):
            tasks = {task.key for task in tasks_of(module, tvm_target)}
            prepared.note = nothing_found(read_trials(database)[0], this_place(case.target), tasks)
            break
        library = folder / f"{side}{LIBRARY_SUFFIX}"
        build_library(lowered, tvm_target, library)
        prepared.compile_seconds[side] = importing + time.perf_counter() - start
        prepared.libraries[side] = library
        prepared.work[side] = work_of_functions(lowered)
    return prepared


def judging(
    sample: str, source: Source, reference: Arrays, oracle: Arrays
) -> Callable[[list[np.ndarray]], dict[str, Any]]:
    """What a side's outputs are put to; it keeps nothing of the model."""
    names = list(source.named(sample, [np.empty(0)] * len(source.component.outputs)))

    def check(outputs: list[np.ndarray]) -> dict[str, Any]:
        actual = dict(zip(names, outputs, strict=True))
        return judged(judge(actual, {name: reference[name] for name in names}, oracle))

    return check


def sit_down(peer: Peer, folder: Path, run_bytes: int, files: dict[str, float]) -> tuple[Seat, float]:
    """A peer that is loaded, and how long it took to compile; `run_bytes` and `files` are for `perf.peers.prepare`.

    Raises:
        PeerError, SeatError: It cannot take part.
    """
    compile_seconds = peers.prepare(peer, folder, run_bytes, files)
    seat = Seat(peer.side, Request(folder))
    if peer.compiles:
        compile_seconds += seat.prepare(COMPILE)
    return seat, compile_seconds
