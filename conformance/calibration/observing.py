"""`python -m conformance.calibration.observing COMPONENT STRATEGY FOLDER`: what one case shows, written to a folder.

The checkout that it runs in may have a fault. `verify` and `diagnose` are asked as their commands ask them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]

OBSERVED, OUTPUTS, TRUTH = "observed.json", "outputs.npz", "truth-{}.npz"
"""The files of an observation; the last are written with `--trace`, one for each run of PyTorch."""

RUNS = ("reference", "again", "exact")


def main(arguments: Sequence[str] | None = None) -> None:
    """Observes a case; what it raises ends the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("component")
    parser.add_argument("strategy")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trace", action="store_true", help="note the lines of the project that ran, and the truth")
    parser.add_argument("--program", default="", help="end where the lowered program is this one, by its SHA-256")
    asked = parser.parse_args(arguments)
    asked.folder.mkdir(exist_ok=True)
    observe(asked.component, asked.strategy, asked.folder, trace=asked.trace, known=asked.program)


def observe(component: str, strategy: str, folder: Path, *, trace: bool = False, known: str = "") -> None:
    """Verifies a case, diagnoses its main program if it is refused, and writes what both say and what it computes.

    Args:
        component: A component of SAM 3.
        strategy: A RoPE strategy.
        folder: Gets the files.
        trace: Whether to write as well which lines of the project a verification runs, and what PyTorch computes.
        known: The SHA-256 of a lowered program of which nothing more is asked, or nothing.
    """
    from harness.core.case import Case
    from harness.core.outcome import Status
    from harness.core.settings import SEEDED
    from harness.models.registry import models, subjects
    from harness.processes.threads import configure_threads
    from harness.targets import HOST
    from harness.verify.stages import run_case

    configure_threads(None)
    case = Case(component, strategy, HOST.name)
    found: dict[str, Any] = {}

    def save(**more: Any) -> None:
        found.update(more)
        (folder / OBSERVED).write_text(json.dumps(found))

    def open_program() -> Any:
        return next(iter(subjects()[component].open(case, SEEDED).programs.values()))

    save(verify={"stage": "build"})
    with suppress(Exception), models()["sam3"].context():  # a verification says at which stage it ends
        if _run(open_program(), case, folder, save, known):
            return
    reached: defaultdict[str, set[int]] = defaultdict(set)
    with _tracing(reached) if trace else nullcontext():
        outcome = run_case(case, SEEDED, lambda stage: save(verify={"stage": str(stage)}))
    save(reached={name: sorted(lines) for name, lines in reached.items()})
    error = outcome.error.message.partition("\n")[0] if outcome.error else ""
    save(verify={"status": str(outcome.status), "stage": str(outcome.stage), "error": error})
    with models()["sam3"].context():
        if trace:
            _write_truth(open_program(), case, folder)
        if trace or outcome.status != Status.PASSED:
            save(diagnosis=_diagnosed(open_program(), case))


def _write_truth(program: Any, case: Any, folder: Path) -> None:
    import numpy as np

    from harness.diagnose.upstream import Upstream

    upstream = Upstream.of(program, case)
    for name in RUNS:
        np.savez(folder / TRUTH.format(name), **getattr(upstream, name))


def _run(program: Any, case: Any, folder: Path, save: Any, known: str) -> bool:
    """Writes what is compiled and what that computes; returns whether it is known, so that it does not run."""
    import numpy as np

    from conformance.calibration.reaching import functions_of
    from harness.lowering.route import Route
    from harness.runtime.executable import Executable
    from harness.schedules.common.origins import tagged
    from harness.targets import HOST
    from harness.targets.compiling import LIBRARY_SUFFIX, build_library, lower_module

    route, inputs = Route.of(case), tuple(program.example.values())
    lowered = route.lower(route.export(program.module, inputs, program.axes), program.module)
    code = lower_module(tagged(lowered.module), HOST, HOST.tvm_target())
    functions = {
        name: _digest(code[variable].without_attr("global_symbol")) for name, variable in functions_of(code).items()
    }
    save(functions=functions, program=(digest := _digest(code)))
    if digest == known:
        return True
    library = folder / f"program{LIBRARY_SUFFIX}"
    build_library(code, HOST.tvm_target(), library)
    results = Executable(library, HOST.device(), list(lowered.parameters().values())).run([x.numpy() for x in inputs])
    np.savez(folder / OUTPUTS, **dict(zip(program.outputs, results, strict=True)))
    return False


def _digest(code: Any) -> str:
    import tvm

    return hashlib.sha256(tvm.ir.save_json(code).encode()).hexdigest()


def _diagnosed(program: Any, case: Any) -> dict[str, Any]:
    """Returns what a diagnosis says."""
    from harness.core.settings import SEEDED
    from harness.diagnose.diagnosing import diagnose_program

    found = diagnose_program(program, case, SEEDED)
    first = None if found.first is None else found.first.boundary
    rewriting = found.rewriting
    cause = rewriting.cause if rewriting else None if found.ablation is None else found.ablation.cause
    return {
        "faulty": found.faulty,
        "failed": dict(found.failed),
        "first": None if first is None else f"{first.function} ({first.node})",
        "named": [] if first is None else [first.function, *first.between],
        "changed": [*found.changed, *found.altered],
        "misshapen": [wrong.node for wrong in found.misshapen],
        "unsteady": list(found.unsteady),
        "cause": None if cause is None else str(cause),
        "reason": "" if found.ablation is None else found.ablation.reason,
        "source": "" if rewriting is None else rewriting.source,
        "by": "" if rewriting is None else rewriting.by,
    }


@contextmanager
def _tracing(reached: defaultdict[str, set[int]]) -> Iterator[None]:
    """Notes the lines of `harness/` that run in the context, of every thread."""
    below = f"{CHECKOUT / 'harness'}/"

    def enter(frame: FrameType, _event: str, _argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(below):
            return None
        lines = reached[file.removeprefix(below)]

        def line(frame: FrameType, _event: str, _argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return line

        lines.add(frame.f_lineno)
        return line

    threading.settrace(enter)
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
