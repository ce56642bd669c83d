"""One fault after the other: put in, compiled, run, judged and diagnosed; a line of JSON for each as it ends."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conformance.calibration.faults import Fault
from conformance.calibration.folders import run
from conformance.calibration.layers import LAYERS, Injected, NoPlaceError, injected
from conformance.calibration.mutation import RACE
from conformance.calibration.preparing import Interrupted, Observed, Prepared, built_anew, followed, prepared
from conformance.calibration.sources import PARTS, PATCHES
from harness.core.files import append_bytes
from harness.core.outcome import Verdict, VerdictKind
from harness.core.program import Arrays
from harness.parity.verdict import ORACLE_R_INF, judge
from harness.verify.diagnose.diagnosis import Cause, Diagnosis

UNREACHED, UNDETECTED, OUTPUTS, CRASHED = "not reached", "undetected", "outputs", "crashed"
"""How a fault ends besides the name of the stage that it breaks."""


_VALUES = ("memory", "packing", "weights")
"""Layers whose faults are no kernel's: a right diagnosis says which values are not what they should be."""


_ROTATION = ("rope", "rotary")
"""A word of each line of a model or of a strategy that rotates."""


@dataclass(frozen=True)
class Request:
    """Faults of one component.

    Attributes:
        component: The component.
        faults: What is put into it, one after the other.
        file: Gets a line for each.
        seconds: Time after which a fault ends the process, as a crash does.
        reproduced: Numbers of the faults that are cut out as well.
    """

    component: str
    faults: tuple[Fault, ...]
    file: Path
    seconds: float
    reproduced: frozenset[int] = frozenset()


class _Unreached(Exception):
    """The program computes the same by the same code."""


def measure_all(request: Request, announce: Callable[[str], None]) -> None:
    """Measures the faults of one component, as `harness.core.processes` calls functions."""
    announce("built")
    with prepared(request.component) as (component, right):
        for fault in request.faults:
            announce(str(fault.number))
            signal.setitimer(signal.ITIMER_REAL, request.seconds)
            record = measured(fault, component, right, reproduce=fault.number in request.reproduced)
            add(request.file, record)
            if fault.layer in PARTS and record["ended"] != UNREACHED and not _is_right_again(component, right):
                return


def _is_right_again(component: Prepared, right: Observed) -> bool:
    """Returns whether a fault is out of this process: a wrong function may have left something behind."""
    again = Observed()

    def compiled(*arguments: Any) -> None:
        again.run(component, *arguments)
        raise Interrupted

    with suppress(Exception):
        followed(component, compiled, exported_anew=True)
    return again.outputs is not None and again.code == right.code and _same(again.outputs, right.outputs)


def measured(fault: Fault, component: Prepared, right: Observed, *, reproduce: bool = False) -> dict[str, Any]:
    """Returns what became of a fault, as JSON can hold it."""
    began = time.perf_counter()
    seen, stages, found = Observed(), ["build"], None
    record: dict[str, Any] = {"fault": fault.to_json()}
    made, problem = Injected(), ""
    try:
        with injected(fault, component) as made:
            if fault.layer == PATCHES:
                component = built_anew(component)

            def compiled(*arguments: Any) -> None:
                seen.run(component, *arguments)
                is_same = seen.code == right.code and _same(seen.outputs, right.outputs)
                if is_same and made.again(component.reference.again) is component.reference.again:
                    raise _Unreached

            if made.folder is None:
                anew = bool(made.file)
                found = followed(component, compiled, stages.append, reproduce=reproduce, exported_anew=anew)
            else:
                stages.append("load")
                seen.outputs = run(made.folder, component.program.example)
    except Exception as error:  # what the compiler refuses, or what a wrong program does
        if made.absent or isinstance(error, _Unreached | NoPlaceError):
            where = made.where or f"{error}"
            return record | {"where": where, "ended": UNREACHED, "seconds": _since(began)}
        problem = f"{type(error).__name__}: {_line(error)}"
    record |= {"where": made.where, "problem": problem}
    if seen.outputs is None:
        return record | {"ended": stages[-1], "seconds": _since(began)}
    if made.file:
        known = set(right.functions.values())
        made.functions |= {name for name, function in seen.functions.items() if function not in known}
    reference = component.reference
    verdicts = judge(seen.outputs, replace(reference, again=made.again(reference.again)))
    record |= judged(verdicts) | {"changed": not _same(seen.outputs, right.outputs)}
    if found is not None:
        record["diagnosis"] = diagnosed(fault, made, found)
    return record | {"seconds": _since(began)}


def judged(verdicts: tuple[Verdict, ...]) -> dict[str, Any]:
    """Returns whether the judge sees a fault, and the largest error of an output."""
    wrong = [verdict for verdict in verdicts if verdict.kind is not VerdictKind.STRICT]
    ratios = [(verdict.r_rms, verdict.r_inf) for verdict in verdicts if math.isfinite(verdict.r_rms)]
    return {
        "ended": OUTPUTS if wrong else UNDETECTED,
        "reason": wrong[0].reason if wrong else "",
        "r_rms": max((r_rms for r_rms, _ in ratios), default=None),
        "r_inf": max((r_inf for _, r_inf in ratios), default=None),
        "hole": not wrong and any(r_inf > ORACLE_R_INF for _, r_inf in ratios),
    }


def diagnosed(fault: Fault, made: Injected, found: Diagnosis) -> dict[str, Any]:
    """Returns what a diagnosis says of a fault, and whether that is right; None where it cannot be."""
    causes = LAYERS[fault.layer].causes | ({Cause.SCHEDULE} if fault.kind == RACE else set())
    first = None if found.first is None else found.first.boundary
    cause = None if found.ablation is None else found.ablation.cause
    if found.rewriting is not None:
        cause = found.rewriting.cause
    named = [] if first is None else [first.function, *first.between]
    nodes = set() if first is None else {first.node, *first.inside}
    if first is None and found.misshapen:
        nodes, cause = {wrong.node for wrong in found.misshapen}, Cause.IMPORTER
    located = None
    if found.rewriting is not None:
        lines = f"{found.rewriting.source} {found.rewriting.by}"
        located = made.file in lines or any(word in lines for word in _ROTATION) if made.file else False
    elif made.functions or made.nodes:
        located = not made.functions.isdisjoint(named) or not made.nodes.isdisjoint(nodes)
    elif fault.layer in _VALUES:
        located = bool(found.changed or found.altered)
    return {
        "faulty": found.faulty,
        "first": None if first is None else f"{first.function} ({first.node})",
        "excess": None if first is None or not math.isfinite(first.local.excess) else first.local.excess,
        "changed": [*found.changed, *found.altered],
        "located": located,
        "cause": None if cause is None else str(cause),
        "right": cause in causes if cause is not None and causes else located if fault.layer in _VALUES else None,
        "reason": "" if found.ablation is None else found.ablation.reason,
        "reproduced": None if found.reproduction is None else bool(found.reproduction.files),
    }


def records(file: Path) -> list[dict[str, Any]]:
    """Returns the records of a file; a line that was not written to its end is left out."""
    return list(_records(file)) if file.exists() else []


def _records(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def add(file: Path, record: dict[str, Any]) -> None:
    """Adds the record of a fault to a file."""
    half = file.exists() and file.stat().st_size and not file.read_bytes().endswith(b"\n")
    append_bytes(file, ("\n" * half + json.dumps(record) + "\n").encode())


def _same(one: Arrays | None, other: Arrays | None) -> bool:
    assert one is not None and other is not None
    return all(one[name].tobytes() == other[name].tobytes() for name in other) and len(one) == len(other)


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else "")[:200]


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 1)
