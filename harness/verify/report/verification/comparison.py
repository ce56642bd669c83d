"""Compares two verification reports: outcomes of cases, accuracy of outputs, durations of stages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    """

    case: str
    output: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None

    @property
    def is_visible(self) -> bool:
        """Returns whether a report shows the difference, in the digits of r_rms or in the verdict."""
        before, after = (o and (digits(o["r_rms"]), o["verdict"]) for o in (self.before, self.after))
        return before != after

    @property
    def ratio(self) -> float:
        """The ratio of r_rms after to before; NaN if it is undefined."""
        if self.before is None or self.after is None:
            return math.nan
        before, after = number(self.before["r_rms"]), number(self.after["r_rms"])
        return after / before if before > 0 and math.isfinite(before) else math.nan


@dataclass(frozen=True)
class Durations:
    """Durations of the stages of a case in both reports.

    Attributes:
        case: Name of the case.
        stages: Seconds before and after by stage, NaN for a stage that did not finish.
        before, after: Total seconds.
    """

    case: str
    stages: Mapping[str, tuple[float, float]]
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """The ratio of the duration after to before; NaN if it is undefined."""
        return self.after / self.before if self.before > 0 else math.nan


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
        if (change := AccuracyChange(case, name, a.get(name), b.get(name))).is_visible
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
    return (
        f"{len(comparison.outcomes)} cases ended in another way; the accuracy of {len(comparison.accuracies)} of "
        f"{comparison.outputs} outputs in both reports changed."
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


def _weight(change: AccuracyChange) -> float:
    """Returns the size of a change, by which changes are sorted; undefined ratios come first."""
    return abs(math.log(change.ratio)) if change.ratio > 0 else math.inf


def _durations(name: str, before: Case, after: Case) -> Durations:
    stages = {
        stage.value: (number(before["seconds"].get(stage)), number(after["seconds"].get(stage)))
        for stage in Stage
        if stage in before["seconds"] or stage in after["seconds"]
    }
    return Durations(name, stages, total_seconds(before), total_seconds(after))


def _environment(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
    sides = [
        dict(fact(key, value) for part in ("machine", "versions") for key, value in report[part].items())
        for report in (before, after)
    ]
    facts = ((name, *(side.get(name, "") for side in sides)) for name in distinct([*sides[0], *sides[1]]))
    return tuple((name, a, b) for name, a, b in facts if a != b)
