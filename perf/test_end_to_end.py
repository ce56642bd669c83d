"""Speed of the whole model: a photograph and a text to masks, and a second text on the same photograph.

    pytest perf/test_end_to_end.py --scale full --benchmark-json=perf.json

Sides are PyTorch eager (upstream's `Sam3Processor`), the model compiled without tuning and, with a tuning database,
the model compiled with it. Each has a process of its own (`perf/processes.py`). Once their answers were found to be the
same, their rounds are interleaved. Peak memory is that of a side's process over all calls of the first question; the
time to load is that of a process which has imported everything, with checksums of all files (and without,
`unchecked_load_seconds`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.core.case import DEFAULT_FRONTEND, DEFAULT_STRATEGY, Case, Scale
from harness.core.precision import DEFAULT_PRECISION
from harness.core.settings import Settings
from harness.deployment.compiling import compile_model
from harness.models.sam3.end_to_end.subject import END_TO_END
from harness.models.sam3.model import DEPLOYABLE
from harness.models.selection import select
from harness.processes import WorkerEnd, run_isolated
from harness.processes.threads import configure_threads
from harness.schedules import DEFAULT_SCHEDULES
from harness.targets import TARGETS
from harness.tuning.database import chosen_schedules
from perf.options import Options
from perf.probe import measured_peaks
from perf.processes import BenchmarkProcess, run_interleaved
from perf.results import TORCH, TUNED, UNTUNED, circumstances, memory_bytes, ratios, summary
from perf.whole_model import ENCODE, PHOTO_AND_TEXT, QUESTIONS, SECOND_TEXT, Answer

TARGET = "llvm"
BUDGET_SECONDS = dict(zip(QUESTIONS, (60.0, 40.0), strict=True))
"""How long the rounds of all sides together may take; at least six run in any case."""


@dataclass
class Side:
    """A side that was loaded and gave the right answer.

    Attributes:
        process: Its process.
        facts: Its figures apart from its rounds.
    """

    process: BenchmarkProcess
    facts: dict[str, Any]


@pytest.fixture(scope="module")
def whole(request: pytest.FixtureRequest) -> Case:
    """Returns the case that the command line names; of several strategies, scales, … the first."""
    option = request.config.getoption
    cases = select(
        [END_TO_END.name],
        option("strategy") or [DEFAULT_STRATEGY],
        [TARGET],
        option("scale") or [Scale.SHALLOW.value],
        option("seed"),
        option("precision") or [DEFAULT_PRECISION],
        option("frontend") or [DEFAULT_FRONTEND],
    )
    return cases[0]


@pytest.fixture(scope="module")
def sides(whole: Case, options: Options) -> Iterator[dict[str, Side]]:
    """Yields all sides, which were asked the same question and gave the same answer."""
    problem = TARGETS[TARGET].compile_problem() or TARGETS[TARGET].run_problem(options.processors)
    if problem:
        pytest.skip(problem)
    configure_threads()
    # Not pytest's folder, which stays: at full scale there are gigabytes of weights in it.
    with tempfile.TemporaryDirectory(prefix="sam3-tvm-") as name, ExitStack() as stack:
        found: dict[str, Side] = {}

        def add_side(side: str, function: str, request: Any, facts: dict[str, Any]) -> Answer:
            process = stack.enter_context(BenchmarkProcess(f"perf.whole_model:{function}", request))
            found[side] = Side(process, {"load_seconds": process.load_seconds} | facts)
            found[side].facts["first_call"], answer = process.first(PHOTO_AND_TEXT)
            return answer

        expected = add_side(TORCH, "torch_side", whole, {"compile_seconds": None})
        tuned = chosen_schedules(options.database_for(TARGET), TARGET, options.processors)
        for side in (UNTUNED, TUNED) if tuned.schedules else (UNTUNED,):
            artifact = Path(name) / side
            start = time.perf_counter()
            schedules = tuned if side == TUNED else DEFAULT_SCHEDULES
            compile_model(DEPLOYABLE, whole, artifact, Settings(processors=options.processors), schedules=schedules)
            facts = {"compile_seconds": time.perf_counter() - start, "unchecked_load_seconds": unchecked(artifact)}
            check(add_side(side, "tvm_side", artifact, facts), expected)
            found[side].facts["verdict"] = "same objects"
        yield found


def check(found: Answer, expected: Answer) -> None:
    """Checks for the same queries, scores within 1e-5, boxes within 0.01 pixel, a millionth of the masks' pixels."""
    assert len(found.scores) == len(expected.scores) > 0
    np.testing.assert_allclose(found.scores, expected.scores, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.boxes, expected.boxes, rtol=0, atol=0.01)
    assert (found.masks != expected.masks).mean() <= 1e-6


def unchecked(artifact: Path) -> float:
    """Returns the seconds that loading takes without checksums."""
    ended = run_isolated("perf.whole_model:unchecked_load_seconds", artifact)
    assert ended.kind is WorkerEnd.OK, ended.error
    return float(ended.value)


@pytest.mark.parametrize("question", QUESTIONS)
def test_end_to_end(
    question: str,
    sides: dict[str, Side],
    whole: Case,
    options: Options,
    benchmark: Any,
    end_to_end_results: list[dict[str, Any]],
) -> None:
    threads = configure_threads()
    if question == SECOND_TEXT:
        for side in sides.values():
            side.process.result(ENCODE)
            side.facts["first_call"], _ = side.process.first(SECOND_TEXT)
    processes = {name: side.process for name, side in sides.items()}
    peaks = [measured_peaks(threads)]
    seconds, failed = run_interleaved(
        benchmark, processes, question, budget=BUDGET_SECONDS[question], most=40, rounds=options.rounds
    )
    peaks.append(measured_peaks(threads))
    assert not failed
    results = {
        name: summary(rounds)
        | sides[name].facts
        | {"memory": memory_bytes(processes[name].memory()) if question == PHOTO_AND_TEXT else None}
        for name, rounds in seconds.items()
    }
    tried = TUNED not in sides and options.database_for(TARGET) is not None
    note = "tuning found nothing over the defaults" if tried else ""
    result = {"what": question, "case": whole.to_json(), "sides": results, "ratios": ratios(results), "note": note}
    result |= circumstances(threads, peaks)
    benchmark.extra_info |= result
    end_to_end_results.append(result)
