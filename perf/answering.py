"""The sides of a whole model that answer the same questions: PyTorch eager, folders without and with tuning, and peers.

Peers run the folder's entry points (`perf/model_peers.py`), and an answer of theirs that fails the check is reported.
Each side has a process of its own (`perf/processes.py`). Once their answers were found to be the same, the rounds of a
question are interleaved. Peak memory is that of a side's process over all calls of the first question; the time to load
is that of a process which has imported everything, with checksums of all files (and without,
`unchecked_load_seconds`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.compiler.deployment.compiling import compile_model
from harness.compiler.deployment.deployable import ArtifactSpec
from harness.compiler.schedules import DEFAULT_SCHEDULES
from harness.compiler.targets import TARGETS
from harness.compiler.tuned.database import choose_schedules
from harness.core.case import DEFAULT_FRONTEND, DEFAULT_STRATEGY, Case, Scale, Weights
from harness.core.outcome import VerdictKind
from harness.core.precision import DEFAULT_PRECISION
from harness.core.processes.call import WorkerEnd, run_isolated
from harness.core.processes.threads import configure_threads
from harness.core.settings import Settings
from harness.models.sam3.deployed.deployable import DEPLOYABLE
from harness.models.sam3.deployed.options import GROUNDING_ALONE, Sam3Options
from harness.models.selection import select
from perf.model_peers import FolderRequest, ModelPeer, prepare
from perf.options import Options
from perf.peer_sides import PRECISION
from perf.peers import PEERS, PeerError, peers_of
from perf.probe import measured_peaks
from perf.processes import BenchmarkProcess, BenchmarkProcessError, error_sentence, run_interleaved
from perf.results import NOTHING_FOUND, OURS, TORCH, TUNED, UNTUNED, circumstances, memory_bytes, ratios, summary

TARGET = "llvm"
MOST_ROUNDS = 40
FOLDER_SIDE = "perf.model_peers:folder_side"
SAME = "same answer"
HALF = "see verify --precision"
"""The verdicts of a side that answers as PyTorch does, and of ours in half precision, which answers otherwise."""


@dataclass(frozen=True)
class Questions:
    """What the sides are asked.

    Attributes:
        subject: Name of the whole model that is asked.
        sides: The module of the sides: `torch_side` takes a case, and `folder_calls` returns what asks a loaded folder.
        first: The question that all sides answer once before anything is timed.
        encode: Another function of every side, which encodes the photograph that later questions are about.
        check: Fails unless the answer of a side, which comes first, is that of PyTorch.
        options: The options that the folders are compiled with.
    """

    subject: str
    sides: str
    first: str
    encode: str
    check: Callable[[Any, Any], None]
    options: Sam3Options = GROUNDING_ALONE


@dataclass
class Side:
    """A side that was loaded and gave the right answer.

    Attributes:
        process: Its process.
        facts: Its figures apart from its rounds.
        artifact: The compiled folder that it runs; None for PyTorch. It goes when the sides end.
    """

    process: BenchmarkProcess
    facts: dict[str, Any]
    artifact: Path | None = None


def named_case(subject: str, config: pytest.Config) -> Case:
    """Returns the case of a subject that the command line names; of several strategies, scales, … the first."""
    option = config.getoption
    cases = select(
        [subject],
        option("strategy") or [DEFAULT_STRATEGY],
        [TARGET],
        option("scale") or [Scale.SHALLOW.value],
        option("seed"),
        option("precision") or [DEFAULT_PRECISION],
        option("frontend") or [DEFAULT_FRONTEND],
        option("weights") or [Weights.SEEDED.value],
    )
    return cases[0]


Errors = dict[str, dict[str, Any]]
"""The figures of peers that cannot be measured, by name: the error, and how they are set."""


@contextmanager
def answering_sides(questions: Questions, case: Case, options: Options) -> Iterator[tuple[dict[str, Side], Errors]]:
    """Yields all sides, which were asked the first question and gave the same answer, and peers without a side.

    It skips where TVM cannot run.
    """
    problem = TARGETS[TARGET].compile_problem() or TARGETS[TARGET].run_problem(options.processors)
    if problem:
        pytest.skip(problem)
    configure_threads()
    # Not pytest's folder, which stays: at full scale there are gigabytes of weights in it.
    with tempfile.TemporaryDirectory(prefix="sam3-tvm-") as name, ExitStack() as stack:
        found: dict[str, Side] = {}
        errors: Errors = {}
        files: dict[str, float] = {}

        def add_side(
            side: str, function: str, request: Any, facts: dict[str, Any], artifact: Path | None = None
        ) -> Any:
            process = stack.enter_context(BenchmarkProcess(function, request))
            found[side] = Side(process, {"load_seconds": process.load_seconds} | facts, artifact)
            found[side].facts["first_call"], answer = process.first(questions.first)
            return answer

        expected = add_side(TORCH, f"{questions.sides}:torch_side", case, {"compile_seconds": None})
        calls = f"{questions.sides}:folder_calls"
        tuned = choose_schedules(options.database_for(TARGET), TARGET, options.processors)
        for side in (UNTUNED, TUNED) if tuned.schedules else (UNTUNED,):
            artifact = Path(name) / side
            start = time.perf_counter()
            schedules = tuned if side == TUNED else DEFAULT_SCHEDULES
            settings = Settings(processors=options.processors)
            compile_model(ArtifactSpec(DEPLOYABLE, case, settings, questions.options), artifact, schedules)
            facts = {"compile_seconds": time.perf_counter() - start, "unchecked_load_seconds": _unchecked(artifact)}
            answer = add_side(side, FOLDER_SIDE, FolderRequest(calls, artifact), facts, artifact)
            if case.precision == DEFAULT_PRECISION:
                questions.check(answer, expected)
            found[side].facts["verdict"] = SAME if case.precision == DEFAULT_PRECISION else HALF
        for peer in peers_of(case.precision, TARGET, options.peers):
            setting = {"setting": PEERS[peer].setting}
            memory = found[TORCH].process.memory()
            try:
                chosen = ModelPeer(peer, case, questions.options, Path(name) / "peers")
                seconds = prepare(chosen, Path(name) / UNTUNED, memory.run if memory else 0, files)
                request = FolderRequest(calls, Path(name) / UNTUNED, chosen)
                answer = add_side(peer, FOLDER_SIDE, request, setting | {"compile_seconds": seconds})
                found[peer].facts |= _verdict(questions, answer, expected)
                if PEERS[peer].chooses:
                    found[peer].facts["computes_in"] = found[peer].process.result(PRECISION)
            except (PeerError, BenchmarkProcessError) as error:
                found.pop(peer, None)
                errors[peer] = setting | {"error": str(error)}
        yield found, errors


def _verdict(questions: Questions, answer: Any, expected: Any) -> dict[str, Any]:
    try:
        questions.check(answer, expected)
    except AssertionError as error:
        return {"verdict": VerdictKind.FAILED.value, "reason": error_sentence("another answer", str(error))}
    return {"verdict": SAME}


def _leave_out(name: str, error: object, sides: dict[str, Side], errors: Errors) -> None:
    """Moves a peer whose process has ended from the sides to the errors."""
    errors[name] = {"setting": sides.pop(name).facts["setting"], "error": str(error)}


def measure(
    question: str,
    questions: Questions,
    sides: dict[str, Side],
    errors: Errors,
    case: Case,
    options: Options,
    benchmark: Any,
    budget: float,
    check: bool = False,
) -> dict[str, Any]:
    """Times one question on all sides.

    Args:
        question: Name of the function that the sides have for it.
        questions: What it is one of; memory belongs to the first one.
        sides: The sides; a peer that fails is taken out.
        errors: Peers that cannot be measured; that one is added.
        case: What they run.
        options: How many rounds there are.
        benchmark: The fixture of pytest-benchmark, which keeps the result as extra information.
        budget: Seconds that the rounds of all sides together may take; at least six run in any case.
        check: Whether all sides are asked the same in their first call of this question, so that it is checked too.

    Returns:
        The result as plain data, which the tables and the performance report read.
    """
    threads = configure_threads()
    is_first = question == questions.first
    if not is_first:
        answers: dict[str, Any] = {}
        for name, side in list(sides.items()):
            try:
                side.process.result(questions.encode)
                side.facts["first_call"], answers[name] = side.process.first(question)
            except BenchmarkProcessError as error:
                if name not in PEERS:
                    raise
                _leave_out(name, error, sides, errors)
        for name in answers.keys() & set(OURS) if check and case.precision == DEFAULT_PRECISION else ():
            questions.check(answers[name], answers[TORCH])
        answers.clear()
    processes = {name: side.process for name, side in sides.items()}
    peaks = [measured_peaks(threads)]
    seconds, failed = run_interleaved(
        benchmark, processes, question, budget=budget, most=MOST_ROUNDS, rounds=options.rounds
    )
    peaks.append(measured_peaks(threads))
    assert not failed.keys() - PEERS.keys(), failed
    for name, problem in failed.items():
        _leave_out(name, problem, sides, errors)
    results: dict[str, dict[str, Any]] = {
        name: summary(rounds)
        | sides[name].facts
        | {"memory": memory_bytes(processes[name].memory()) if is_first else None}
        for name, rounds in seconds.items()
    }
    tried = TUNED not in sides and options.database_for(TARGET) is not None
    note = NOTHING_FOUND if tried else ""
    result = {
        "what": question,
        "case": case.to_json(),
        "sides": results | errors,
        "ratios": ratios(results),
        "note": note,
    }
    result |= circumstances(threads, peaks)
    benchmark.extra_info |= result
    return result


def _unchecked(artifact: Path) -> float:
    """Returns the seconds that loading takes without checksums."""
    ended = run_isolated("perf.answering:unchecked_load_seconds", artifact)
    assert ended.kind is WorkerEnd.OK, ended.error
    return float(ended.value)


def unchecked_load_seconds(artifact: Path, _enter: Callable[[str], None]) -> float:
    """Returns how long loading takes without checksums; to be called by `harness.core.processes.call.run_isolated`."""
    from harness.runtime import Sam3
    from harness.runtime.loading import load_runtime

    load_runtime()
    start = time.perf_counter()
    Sam3.load(artifact, check=False)
    return time.perf_counter() - start
