"""What differs between two verification reports: how cases ended, how accurate outputs are, how long stages took."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.core.outcome import Stage
from harness.report.verification.numbers import number
from harness.report.verification.page import rendered_page
from harness.report.verification.wording import digits, distinct, fact, mark, provenance, total_seconds, variant

Case = Mapping[str, Any]


@dataclass(frozen=True)
class Ended:
    """A case that did not end in the same way; the mark of a case that one report does not have is empty."""

    case: str
    before: str
    after: str
    why: str


@dataclass(frozen=True)
class Accuracy:
    """An output whose r_rms or verdict is another one, in the digits that reports show.

    Attributes:
        case, output: Which one it is.
        before, after: It in the JSON of either report; None where a report does not have it.
    """

    case: str
    output: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None

    @property
    def ratio(self) -> float:
        """How many times as large r_rms is after as before; NaN where that cannot be said."""
        if self.before is None or self.after is None:
            return math.nan
        before, after = number(self.before["r_rms"]), number(self.after["r_rms"])
        return after / before if before > 0 and math.isfinite(before) else math.nan


@dataclass(frozen=True)
class Took:
    """How long the stages of a case took in either report.

    Attributes:
        case: Which one it is.
        stages: Seconds before and after by stage, NaN where it did not come to its end.
        before, after: Seconds of all.
    """

    case: str
    stages: Mapping[str, tuple[float, float]]
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """How many times as long it takes after as before; NaN where that cannot be said."""
        return self.after / self.before if self.before > 0 else math.nan


@dataclass(frozen=True)
class Comparison:
    """What is different between two reports.

    Attributes:
        ended: Cases that did not end in the same way, in the order of the reports.
        accuracy: Outputs whose accuracy is another one, the largest change first.
        took: Cases of both reports, in their order.
        cases, outputs: How many both reports have.
        setting: Facts about machine and versions that differ: name, before, after.
    """

    ended: tuple[Ended, ...]
    accuracy: tuple[Accuracy, ...]
    took: tuple[Took, ...]
    cases: int
    outputs: int
    setting: tuple[tuple[str, str, str], ...]


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Compares two reports that are read; `harness.report.verification.document` has the schema."""
    ours, theirs = _cases(before), _cases(after)
    names = distinct([*ours, *theirs])
    both = [name for name in names if name in ours and name in theirs]
    accuracy = [change for name in both for change in _accuracy(name, ours[name], theirs[name])]
    return Comparison(
        ended=tuple(
            ended for name in names if (ended := _ended(name, ours.get(name), theirs.get(name))).before != ended.after
        ),
        accuracy=tuple(sorted(accuracy, key=_weight, reverse=True)),
        took=tuple(_took(name, ours[name], theirs[name]) for name in both),
        cases=len(both),
        outputs=sum(len(_outputs(ours[name]).keys() & _outputs(theirs[name]).keys()) for name in both),
        setting=_setting(before, after),
    )


def told(comparison: Comparison) -> str:
    """Says in a sentence how much is different."""
    return (
        f"{len(comparison.ended)} cases ended in another way; the accuracy of {len(comparison.accuracy)} of "
        f"{comparison.outputs} outputs in both reports changed."
    )


def render_comparison(before: Mapping[str, Any], after: Mapping[str, Any], names: tuple[str, str]) -> str:
    """Renders the page of a comparison.

    Args:
        before: One report.
        after: The other.
        names: What they are called.
    """
    found = compare(before, after)
    return rendered_page(
        "verification_comparison.html.j2",
        found=found,
        told=told(found),
        names=names,
        provenances=(provenance(before), provenance(after)),
        stages=[stage.value for stage in Stage],
    )


def _cases(report: Mapping[str, Any]) -> dict[str, Case]:
    """Returns the cases by what tells them apart, in words."""
    found: dict[str, Case] = {}
    for case in report["cases"]:
        found[f"{case['component']} · {variant(case)}"] = case
    return found


def _ended(name: str, before: Case | None, after: Case | None) -> Ended:
    why = (after or {}).get("problem") or (before or {}).get("problem") or ""
    return Ended(name, mark(before) if before else "", mark(after) if after else "", why)


def _outputs(case: Case) -> dict[str, Mapping[str, Any]]:
    return {output["name"]: output for output in case["outputs"]}


def _accuracy(name: str, before: Case, after: Case) -> list[Accuracy]:
    ours, theirs = _outputs(before), _outputs(after)
    if not ours or not theirs:
        return []  # one of them did not come so far, and ended in another way
    changes = [Accuracy(name, output, ours.get(output), theirs.get(output)) for output in distinct([*ours, *theirs])]
    return [change for change in changes if _shown(change.before) != _shown(change.after)]


def _shown(output: Mapping[str, Any] | None) -> tuple[str, str] | None:
    return None if output is None else (digits(output["r_rms"]), output["verdict"])


def _weight(change: Accuracy) -> float:
    """How large a change is: what cannot be measured comes first."""
    return abs(math.log(change.ratio)) if change.ratio > 0 else math.inf


def _took(name: str, before: Case, after: Case) -> Took:
    stages = {
        stage: (number(before["seconds"].get(stage)), number(after["seconds"].get(stage)))
        for stage in (each.value for each in Stage)
        if stage in before["seconds"] or stage in after["seconds"]
    }
    return Took(name, stages, total_seconds(before), total_seconds(after))


def _setting(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
    sides = [
        dict(fact(key, value) for part in ("machine", "versions") for key, value in report[part].items())
        for report in (before, after)
    ]
    names = distinct([*sides[0], *sides[1]])
    return tuple(
        (name, sides[0].get(name, ""), sides[1].get(name, ""))
        for name in names
        if sides[0].get(name) != sides[1].get(name)
    )
