"""Speed and memory of each component: PyTorch eager, TVM untuned, TVM tuned and, with --peers, the peers.

    pytest perf/test_components.py --scale full --benchmark-json=perf.json
    pytest perf/test_components.py --component vit --scale full --peers
    pytest perf/test_components.py --component vit --scale full --precision bf16 --peer "torch bf16"
    pytest perf/test_components.py --component memory_attention -k second --scale full

TVM's sides are lowered with the frontend, the strategy and the precision of the case; PyTorch runs in fp32, and each
peer as it is set (`perf/peers.py`). Beside a case in half precision runs ours in fp32, so that one run tells what it
gains. Every side has a process of its own (`perf/processes.py`) and the same weights and
inputs. The outputs of its first call are judged as in a verification, against the reference of the precision: ours must
pass, peers are reported with their figures. Then the rounds of all sides are interleaved: each side makes one call a
round, and the first side of a round is the last of the next. Peak memory is that of the side's process over all its
calls. The CPU's peaks are measured right before and right after; the times of our kernels are measured in one more
run, in which a GPU is waited for after each of them.

A peer whose first call takes more than five times as long as PyTorch's, and longer than all rounds may take, is
reported with that sentence and has no rounds. On a CPU without instructions for bfloat16, PyTorch under autocast is
such a peer.
"""

from __future__ import annotations

import gc
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.compiler.targets import HOST, TARGETS
from harness.core.case import Case
from harness.core.outcome import VerdictKind
from harness.core.precision import DEFAULT_PRECISION
from harness.core.processes.threads import configure_threads
from harness.models.registry import subjects
from perf import peers
from perf.components import Judge, prepare
from perf.options import Options
from perf.peer_sides import COMPILE, PRECISION
from perf.peers import PEERS, Peer, PeerError, peers_of
from perf.probe import measured_peaks
from perf.processes import BenchmarkProcess, BenchmarkProcessError, run_interleaved
from perf.profiling import with_work
from perf.results import OURS, OURS_IN_FP32, TORCH, circumstances, memory_bytes, ratios, summary
from perf.sides import KERNELS, RUN, Request

BUDGET_SECONDS = 30.0
"""How long the rounds of all sides together may take per component; at least six run in any case."""

SLOWEST_PEER = 5.0
"""How many times as long as PyTorch's the first call of a peer may take, if it takes longer than `BUDGET_SECONDS`."""

SAMPLES = {"memory_attention": ("second",)}
"""By component: samples that are measured besides the main one. `second` has three objects, with a memory each."""


def test_component(
    measured_case: Case, measured_sample: str, benchmark: Any, component_results: list[dict[str, Any]], options: Options
) -> None:
    case = measured_case
    target = TARGETS[case.target]
    problem = target.compile_problem() or target.run_problem(options.processors)
    if problem or case.strategy == "none":
        pytest.skip(problem or "the control strategy does not compile")
    threads = configure_threads()
    # Not pytest's folder, which stays: at full scale there are gigabytes of weights in it.
    with tempfile.TemporaryDirectory(prefix="sam3-tvm-") as name, ExitStack() as stack:
        request = Request(Path(name), subjects()[case.component].model, case.target)
        database = options.database_for(case.target)
        kept = options.float32(case)
        prepared = prepare(case, request.folder, database, options.processors, measured_sample, kept)
        in_fp32 = None
        if case.precision != DEFAULT_PRECISION:
            fp32_request = replace(request, folder=request.folder / DEFAULT_PRECISION)
            fp32_request.folder.mkdir()
            fp32_case = replace(case, precision=DEFAULT_PRECISION)
            in_fp32 = prepare(fp32_case, fp32_request.folder, database, options.processors, measured_sample)
        gc.collect()
        sides: dict[str, dict[str, Any]] = {}
        processes: dict[str, BenchmarkProcess] = {}

        def add_side(
            side: str,
            process: BenchmarkProcess,
            compile_seconds: float | None,
            judge: Judge = prepared.judge,
            limit: float | None = None,
        ) -> None:
            processes[side] = stack.enter_context(process)
            first_call, outputs = process.first(RUN, limit=limit)
            load = {"compile_seconds": compile_seconds, "load_seconds": process.load_seconds}
            sides[side] = {"first_call": first_call, **load, **judge(outputs)}

        add_side(TORCH, BenchmarkProcess("perf.sides:torch_side", request), None)
        for side, library in prepared.libraries.items():
            process = BenchmarkProcess("perf.sides:tvm_side", request.with_library(library))
            add_side(side, process, prepared.compile_seconds[side])
        if in_fp32 is not None:
            best, library = list(in_fp32.libraries.items())[-1]
            process = BenchmarkProcess("perf.sides:tvm_side", fp32_request.with_library(library))
            add_side(OURS_IN_FP32, process, in_fp32.compile_seconds[best], in_fp32.judge)
        for side in sides.keys() - {TORCH}:
            assert sides[side]["verdict"] in (VerdictKind.STRICT, VerdictKind.ORACLE), sides[side]
        files: dict[str, float] = {}
        settings = {
            side: {"setting": PEERS[side].setting} for side in peers_of(case.precision, case.target, options.peers)
        }
        limit = max(BUDGET_SECONDS, SLOWEST_PEER * sides[TORCH]["first_call"])
        for side in settings:
            try:
                memory = processes[TORCH].memory()
                add_side(side, *start_peer(PEERS[side], request, memory.run if memory else 0, files), limit=limit)
                if PEERS[side].chooses:
                    settings[side]["computes_in"] = processes[side].result(PRECISION)
                sides[side] |= settings[side]
            except (PeerError, BenchmarkProcessError) as error:
                processes.pop(side, None)
                sides[side] = {"error": str(error)} | settings[side]

        probes = target is HOST  # the CPU's peaks tell nothing about a GPU
        peaks = [measured_peaks(threads)] if probes else []
        seconds, failed = run_interleaved(benchmark, processes, RUN, budget=BUDGET_SECONDS, rounds=options.rounds)
        if probes:
            peaks.append(measured_peaks(threads))
        assert not failed.keys() - PEERS.keys(), failed
        sides |= {side: {"error": error} | settings[side] for side, error in failed.items()}
        for side, rounds in seconds.items():
            sides[side] = summary(rounds) | {"memory": memory_bytes(processes[side].memory())} | sides[side]
        best = next(side for side in reversed(OURS) if side in processes)
        processes[best].warm_up(RUN)
        kernels = with_work(processes[best].result(KERNELS), prepared.work[best])
    result: dict[str, Any] = {"case": case.to_json(), "sample": measured_sample, "sides": sides}
    result |= {"flop": prepared.flop, "kernels": kernels, "profiled": best, "note": prepared.note}
    result |= {"ratios": ratios(sides)} | circumstances(threads, peaks)
    result["versions"] |= peers.versions() if options.peers else {}
    benchmark.extra_info |= result
    component_results.append(result)


def start_peer(peer: Peer, request: Request, run_bytes: int, files: dict[str, float]) -> tuple[BenchmarkProcess, float]:
    """Starts the process of a peer, and returns it with the seconds that compiling took.

    Args:
        peer: The peer.
        request: Where its side finds what it loads.
        run_bytes: As for `perf.peers.prepare`; `files` is its `done`.

    Raises:
        PeerError, BenchmarkProcessError: The peer cannot be measured.
    """
    compile_seconds = peers.prepare(peer, request, run_bytes, files)
    process = BenchmarkProcess(peer.side, request)
    if peer.compiles:
        compile_seconds += process.prepare(COMPILE)
    return process, compile_seconds
