"""From a photograph and a text to masks, and a second text on the same photograph: PyTorch against the compiled model.

    pytest perf/test_end_to_end.py --scale full --benchmark-json=perf.json

Sides are PyTorch eager (upstream's `Sam3Processor`), the model compiled without tuning and, with a tuning database,
the model compiled with it. Each has a process of its own (`perf/seats.py`), and they take turns once their answers were
found to be the same. Peak memory is that of a side's process over all calls of the first question; the time to load is
that of a process which has imported everything, with checksums of all files (and without, `unchecked_load_seconds`).
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

from harness.core.case import Scale
from harness.deployment.compiling import Model, compile_model
from harness.processes import WorkerEnd, run_isolated
from harness.processes.threads import configure_threads
from harness.targets import TARGETS
from harness.tuning.database import schedules_from
from perf.options import Options
from perf.probe import measured_peaks
from perf.results import TORCH, TUNED, UNTUNED, circumstances, memory_bytes, ratios, summary
from perf.seats import Seat, contest
from perf.whole_model import ENCODE, PHOTO_AND_TEXT, QUESTIONS, SECOND_TEXT, Answer

TARGET = "llvm"
BUDGET_SECONDS = dict(zip(QUESTIONS, (60.0, 40.0), strict=True))
"""How long the rounds of all sides together may take; at least six run in any case."""


@dataclass
class Side:
    """A side that was loaded and gave the right answer, and what is known of it apart from its rounds."""

    seat: Seat
    facts: dict[str, Any]


@pytest.fixture(scope="module")
def scale(request: pytest.FixtureRequest) -> str:
    return str((request.config.getoption("scale") or [Scale.SHALLOW.value])[0])


@pytest.fixture(scope="module")
def sides(scale: str, options: Options) -> Iterator[dict[str, Side]]:
    """All of them, which were asked the same and answered the same."""
    problem = TARGETS[TARGET].compile_problem() or TARGETS[TARGET].run_problem()
    if problem:
        pytest.skip(problem)
    configure_threads()
    # Not pytest's folder, which stays: at full scale there are gigabytes of weights in it.
    with tempfile.TemporaryDirectory(prefix="sam3-tvm-") as name, ExitStack() as stack:
        found: dict[str, Side] = {}

        def take_part(side: str, function: str, request: Any, facts: dict[str, Any]) -> Answer:
            seat = stack.enter_context(Seat(f"perf.whole_model:{function}", request))
            found[side] = Side(seat, {"load_seconds": seat.load_seconds} | facts)
            found[side].facts["first_call"], answer = seat.first(PHOTO_AND_TEXT)
            return answer

        expected = take_part(TORCH, "torch_side", scale, {"compile_seconds": None})
        database = options.database_for(TARGET)
        for side in (UNTUNED, TUNED) if schedules_from(database, TARGET) else (UNTUNED,):
            artifact = Path(name) / side
            start = time.perf_counter()
            compile_model(Model(scale=scale, database=database if side == TUNED else None), TARGET, artifact)
            facts = {"compile_seconds": time.perf_counter() - start, "unchecked_load_seconds": unchecked(artifact)}
            check(take_part(side, "tvm_side", artifact, facts), expected)
            found[side].facts["verdict"] = "same objects"
        yield found


def check(found: Answer, expected: Answer) -> None:
    """The same queries, scores within 1e-5, boxes within 0.01 pixel, masks but for a millionth of their pixels."""
    assert len(found.scores) == len(expected.scores) > 0
    np.testing.assert_allclose(found.scores, expected.scores, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.boxes, expected.boxes, rtol=0, atol=0.01)
    assert (found.masks != expected.masks).mean() <= 1e-6


def unchecked(artifact: Path) -> float:
    """Seconds that loading takes without checksums."""
    ended = run_isolated("perf.whole_model:unchecked_load_seconds", artifact)
    assert ended.kind is WorkerEnd.OK, ended.error
    return float(ended.value)


@pytest.mark.parametrize("question", QUESTIONS)
def test_end_to_end(
    question: str,
    sides: dict[str, Side],
    scale: str,
    options: Options,
    benchmark: Any,
    end_to_end_results: list[dict[str, Any]],
) -> None:
    threads = configure_threads()
    if question == SECOND_TEXT:
        for side in sides.values():
            side.seat.result(ENCODE)
            side.facts["first_call"], _ = side.seat.first(SECOND_TEXT)
    seats = {name: side.seat for name, side in sides.items()}
    peaks = [measured_peaks(threads)]
    seconds, lost = contest(benchmark, seats, question, budget=BUDGET_SECONDS[question], most=40, rounds=options.rounds)
    peaks.append(measured_peaks(threads))
    assert not lost
    results = {
        name: summary(rounds)
        | sides[name].facts
        | {"memory": memory_bytes(seats[name].memory()) if question == PHOTO_AND_TEXT else None}
        for name, rounds in seconds.items()
    }
    tried = TUNED not in sides and options.database_for(TARGET) is not None
    note = "tuning found nothing over the defaults" if tried else ""
    result = {"what": question, "scale": scale, "sides": results, "ratios": ratios(results), "note": note}
    result |= circumstances(threads, peaks)
    benchmark.extra_info |= result
    end_to_end_results.append(result)
