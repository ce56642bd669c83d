"""Renders the JSON report as one self-contained HTML file; everything that it shows is in the JSON."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.outcome import Stage
from harness.verify.report.template import Filters, rendered_html
from harness.verify.report.verification import charts, distribution, wording
from harness.verify.report.verification.diagnosis import Diagnosis, read_diagnosis
from harness.verify.report.verification.images import ErrorMap, error_map, png
from harness.verify.report.verification.numbers import number

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class OutputView:
    """One output, as the page shows it.

    Attributes:
        anchor: Anchor of the output on the page.
        data: The output in the JSON.
        histogram: Histogram of its errors; None if it is unknown or does not apply.
        largest: Map of its largest errors; None if it is unknown or the output is not an image.
        masks: Pictures of masks, as in the JSON.
        missing_reason: Why there is no histogram; empty if there is one.
    """

    anchor: str
    data: Mapping[str, Any]
    histogram: charts.Histogram | None
    largest: ErrorMap | None
    masks: Sequence[Mapping[str, Any]]
    missing_reason: str


@dataclass(frozen=True)
class DiagnosisView:
    """The diagnosis of a case, as the page shows it; curves are None if nothing has an error."""

    diagnosis: Diagnosis
    curves: charts.Curves | None


@dataclass(frozen=True)
class CaseView:
    """One case, as the page shows it.

    Attributes:
        anchor: Anchor of the case on the page.
        data: The case in the JSON.
        title: Its strategy, target, scale and other distinguishing names.
        sign: Symbol of its outcome.
        word: Its outcome in one or two words.
        meaning: Meaning of the outcome.
        outputs: Views of its outputs.
        timeline: Its stages.
        diagnosis: Its diagnosis; None if it was not diagnosed.
    """

    anchor: str
    data: Mapping[str, Any]
    title: str
    sign: str
    word: str
    meaning: str
    outputs: tuple[OutputView, ...]
    timeline: tuple[charts.Step, ...]
    diagnosis: DiagnosisView | None

    @property
    def component(self) -> str:
        """Name of the case's component."""
        return str(self.data["component"])


def render_page(report: Mapping[str, Any]) -> str:
    """Renders the page of a report that was read; `harness.verify.report.verification.document` defines the schema."""
    cases = report["cases"]
    title = wording.titles(cases)
    any_distribution = any("distribution" in output for case in cases for output in case["outputs"])
    views = [_case(case, f"case-{n}", title, any_distribution) for n, case in enumerate(cases, start=1)]
    columns = wording.distinct(view.title for view in views)
    views_by_cell = {(view.component, view.title): view for view in views}
    components = wording.distinct(view.component for view in views)
    return render_template(
        "verification_report.html.j2",
        headline=wording.headline(report["summary"]),
        legend=wording.LEGEND,
        glossary=wording.GLOSSARY,
        provenance=wording.provenance(report),
        columns=columns,
        matrix=[(name, [views_by_cell.get((name, column)) for column in columns]) for name in components],
        components=[(name, [view for view in views if view.component == name]) for name in components],
        unexpected=[view for view in views if view.data["expected"] is False],
        known=[
            (why, [views_by_cell[case["component"], title(case)] for case in group])
            for why, group in wording.known_causes(cases).items()
        ],
        skipped=[view for view in views if view.data["expected"] is None],
        cases=views,
        stages=[stage.value for stage in Stage],
        machine=[wording.fact(key, value) for key, value in report["machine"].items()],
        versions=report["versions"].items(),
    )


def render_template(template: str, **values: Any) -> str:
    """Renders a page template with the style and the script that all pages share.

    Args:
        template: Name of the template's file.
        **values: Variables of the template.
    """
    style, script = ((_TEMPLATES / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    filters: Filters = {
        "count": wording.count,
        "digits": wording.digits,
        "first_line": wording.first_line,
        "notes": wording.notes,
        "png": png,
        "seconds": wording.seconds,
        "size": wording.size,
        "total_seconds": wording.total_seconds,
    }
    return rendered_html(
        _TEMPLATES / template,
        filters,
        charts=charts,
        not_run=wording.NOT_RUN,
        style=_trusted(style),
        script=_trusted(script),
        script_hash=script_hash,
        **values,
    )


def _case(
    case: Mapping[str, Any], anchor: str, title: Callable[[Mapping[str, Any]], str], any_distribution: bool
) -> CaseView:
    sign, _, word = wording.mark(case).partition(" ")
    diagnosis = read_diagnosis(case["diagnosis"]) if "diagnosis" in case else None
    return CaseView(
        anchor=anchor,
        data=case,
        title=title(case),
        sign=sign,
        word=word,
        meaning=wording.meaning(case),
        outputs=tuple(
            _output(output, f"{anchor}-output-{n}", any_distribution)
            for n, output in enumerate(case["outputs"], start=1)
        ),
        timeline=charts.timeline(case["seconds"]),
        diagnosis=DiagnosisView(diagnosis, charts.curves(diagnosis)) if diagnosis else None,
    )


def _output(output: Mapping[str, Any], anchor: str, any_distribution: bool) -> OutputView:
    """Returns the view of an output, in a report in which some output has a distribution or none has."""
    distribution_data = output.get("distribution", {"histogram": [], "largest": [], "masks": []})
    rows = distribution.rows_of(distribution_data)
    return OutputView(
        anchor=anchor,
        data=output,
        histogram=charts.histogram(distribution_data["histogram"]) if distribution_data["histogram"] else None,
        largest=error_map(rows) if rows else None,
        masks=distribution_data["masks"],
        missing_reason="" if distribution_data["histogram"] else _missing_reason(output, any_distribution),
    )


def _missing_reason(output: Mapping[str, Any], any_distribution: bool) -> str:
    """Returns why an output has no histogram, in a report with or without any histogram."""
    if output["dtype"].startswith(("bool", "int", "uint")):
        return "Integers and booleans are equal or not: there is no histogram of their errors."
    if "distribution" in output or math.isnan(number(output["max_abs"])):
        return "There is no error that could be counted."
    if any_distribution:
        return "How the errors of this output are distributed was not measured."
    return "This report does not have how errors are distributed: verify again to see it."


def _trusted(text: str) -> Any:
    """Marks a file of this project as HTML, so that it is not escaped."""
    from markupsafe import Markup

    return Markup(text)
