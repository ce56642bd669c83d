"""Compares two verification reports: outcomes of cases, accuracy of outputs, durations of stages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.core.names import plural
from harness.core.outcome import Stage
from harness.verify.report.verification.pages import render_template
from harness.verify.report.verification.schema import number
from harness.verify.report.verification.wording import digits, distinct, fact, mark, provenance, total_seconds, variant

Case = Mapping[str, Any]


@dataclass(frozen=True)
class OutcomeChange:
    """A case whose outcomes differ; the mark is empty for a report without the case."""

    case: str
    before: str
    after: str
    why: str


@dataclass(frozen=True)
class AccuracyChange:
    """An output whose r_rms or verdict differs, in the digits that reports show.

    Attributes:
        case, output: Names of the case and the output.
        before, after: The output in the JSON of either report; None for a report without the output.
        ratio: The r_rms after divided by that before; NaN if it is undefined.
    """

    case: str
    output: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    ratio: float


@dataclass(frozen=True)
class Durations:
    """Durations of the stages of a case in both reports.

    Attributes:
        case: Name of the case.
        stages: Seconds before and after by stage, NaN for a stage that did not finish.
        before, after: Total seconds.
        ratio: The total after divided by that before; NaN if it is undefined.
    """

    case: str
    stages: Mapping[str, tuple[float, float]]
    before: float
    after: float
    ratio: float


@dataclass(frozen=True)
class Comparison:
    """The differences between two reports.

    Attributes:
        outcomes: Cases whose outcomes differ, in the order of the reports.
        accuracies: Outputs whose accuracy differs, largest change first.
        durations: Durations of the cases of both reports, in their order.
        cases, outputs: Number of cases and outputs in both reports.
        environment: Facts about machine and versions that differ: name, before, after.
    """

    outcomes: tuple[OutcomeChange, ...]
    accuracies: tuple[AccuracyChange, ...]
    durations: tuple[Durations, ...]
    cases: int
    outputs: int
    environment: tuple[tuple[str, str, str], ...]


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Compares two reports that were read; `harness.verify.report.verification.document` defines the schema."""
    sides = [{f"{case['component']} · {variant(case)}": case for case in report["cases"]} for report in (before, after)]
    pairs = {name: (sides[0].get(name), sides[1].get(name)) for name in distinct([*sides[0], *sides[1]])}
    outcomes = [
        OutcomeChange(name, mark(a) if a else "", mark(b) if b else "", _problem(b) or _problem(a))
        for name, (a, b) in pairs.items()
    ]
    common = {name: (a, b) for name, (a, b) in pairs.items() if a is not None and b is not None}
    outputs = {name: (_outputs(a), _outputs(b)) for name, (a, b) in common.items()}
    accuracies = [
        change
        for case, (a, b) in outputs.items()
        if a and b  # otherwise the outcomes of the case differ
        for name in distinct([*a, *b])
        if (change := _accuracy_change(case, name, a.get(name), b.get(name)))
    ]
    return Comparison(
        outcomes=tuple(change for change in outcomes if change.before != change.after),
        accuracies=tuple(sorted(accuracies, key=_weight, reverse=True)),
        durations=tuple(_durations(name, a, b) for name, (a, b) in common.items()),
        cases=len(common),
        outputs=sum(len(a.keys() & b.keys()) for a, b in outputs.values()),
        environment=_environment(before, after),
    )


def summary_sentence(comparison: Comparison) -> str:
    """Returns the number of differences in a sentence."""
    changed = sum(bool(change.before and change.after) for change in comparison.outcomes)
    alone = len(comparison.outcomes) - changed
    return (
        f"Of {plural(comparison.cases, 'case')} in both reports, {changed} ended in another way, and the accuracy of "
        f"{len(comparison.accuracies)} of {plural(comparison.outputs, 'output')} changed"
        + (f"; {plural(alone, 'case')} of one report alone." if alone else ".")
    )


def render_comparison(before: Mapping[str, Any], after: Mapping[str, Any], names: tuple[str, str]) -> str:
    """Renders the page of a comparison.

    Args:
        before: The earlier report.
        after: The later report.
        names: Names of the reports.
    """
    comparison = compare(before, after)
    return render_template(
        "verification_comparison.html.j2",
        filters={},
        comparison=comparison,
        summary=summary_sentence(comparison),
        names=names,
        provenances=(provenance(before), provenance(after)),
    )


def _problem(case: Case | None) -> str:
    return (case or {}).get("problem") or ""


def _outputs(case: Case) -> dict[str, Mapping[str, Any]]:
    return {output["name"]: output for output in case["outputs"]}


def _accuracy_change(
    case: str, name: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> AccuracyChange | None:
    """Returns the change of an output; None if no report shows it, in the digits of r_rms or in the verdict."""
    if len({output and (digits(output["r_rms"]), output["verdict"]) for output in (before, after)}) == 1:
        return None
    ratio = math.nan if before is None or after is None else _ratio(number(before["r_rms"]), number(after["r_rms"]))
    return AccuracyChange(case, name, before, after, ratio)


def _ratio(before: float, after: float) -> float:
    return after / before if before > 0 and math.isfinite(before) else math.nan


def _weight(change: AccuracyChange) -> float:
    """Returns the size of a change, by which changes are sorted; undefined ratios come first."""
    return abs(math.log(change.ratio)) if change.ratio > 0 else math.inf


def _durations(name: str, before: Case, after: Case) -> Durations:
    stages = {
        stage.value: (number(before["seconds"].get(stage)), number(after["seconds"].get(stage)))
        for stage in Stage
        if stage in before["seconds"] or stage in after["seconds"]
    }
    totals = total_seconds(before), total_seconds(after)
    return Durations(name, stages, *totals, _ratio(*totals))


def _environment(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
    sides = [
        dict(fact(key, value) for part in ("machine", "versions") for key, value in report[part].items())
        for report in (before, after)
    ]
    facts = ((name, *(side.get(name, "") for side in sides)) for name in distinct([*sides[0], *sides[1]]))
    return tuple((name, a, b) for name, a, b in facts if a != b)
