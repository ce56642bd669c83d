"""Renders the JSON report as one HTML file, which needs nothing beside it; everything that it shows is in the JSON."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.outcome import Stage
from harness.report.template import Filters, rendered_html
from harness.report.verification import charts, distribution, wording
from harness.report.verification.diagnosis import Diagnosis, read
from harness.report.verification.images import ErrorMap, error_map, png
from harness.report.verification.numbers import number

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class OutputView:
    """One output as the page shows it.

    Attributes:
        anchor: Where it is on the page.
        data: It in the JSON.
        histogram: How its errors are distributed; None where that is not known or does not apply.
        largest: Map of its largest errors; None where it is not known or not an image.
        masks: Pictures of masks, as they are in the JSON.
        missing: Why there is no histogram; empty where there is one.
    """

    anchor: str
    data: Mapping[str, Any]
    histogram: charts.Histogram | None
    largest: ErrorMap | None
    masks: Sequence[Mapping[str, Any]]
    missing: str


@dataclass(frozen=True)
class DiagnosisView:
    """The diagnosis of a case as the page shows it, with its curves if anything has an error."""

    found: Diagnosis
    curves: charts.Curves | None


@dataclass(frozen=True)
class CaseView:
    """One case as the page shows it.

    Attributes:
        anchor: Where it is on the page.
        data: It in the JSON.
        title: Its strategy, target and scale, and what else tells it apart.
        sign: The symbol of its outcome.
        word: Its outcome in a word or two.
        meaning: What that means.
        outputs: Its outputs.
        timeline: Its stages.
        diagnosis: Which kernel diverges; None where that was not looked for.
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
        """Name of its component."""
        return str(self.data["component"])


def render_page(report: Mapping[str, Any]) -> str:
    """Renders the page for a report that is read; `harness.report.verification.document` has the schema."""
    cases = report["cases"]
    title = wording.titles(cases)
    measured = any("distribution" in output for case in cases for output in case["outputs"])
    views = [_case(case, f"case-{n}", title, measured) for n, case in enumerate(cases, start=1)]
    columns = wording.distinct(view.title for view in views)
    placed = {(view.component, view.title): view for view in views}
    components = wording.distinct(view.component for view in views)
    return rendered_page(
        "verification_report.html.j2",
        headline=wording.headline(report["summary"]),
        legend=wording.LEGEND,
        glossary=wording.GLOSSARY,
        provenance=wording.provenance(report),
        columns=columns,
        matrix=[(name, [placed.get((name, column)) for column in columns]) for name in components],
        components=[(name, [view for view in views if view.component == name]) for name in components],
        unexpected=[view for view in views if view.data["expected"] is False],
        known=[
            (why, [placed[case["component"], title(case)] for case in some])
            for why, some in wording.known_causes(cases).items()
        ],
        skipped=[view for view in views if view.data["expected"] is None],
        cases=views,
        stages=[stage.value for stage in Stage],
        machine=[wording.fact(key, value) for key, value in report["machine"].items()],
        versions=report["versions"].items(),
    )


def rendered_page(template: str, **values: Any) -> str:
    """Renders a template of a page, with the style and the script of all pages in it.

    Args:
        template: Name of the file.
        **values: What it knows.
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


def _case(case: Mapping[str, Any], anchor: str, title: Callable[[Mapping[str, Any]], str], measured: bool) -> CaseView:
    sign, _, word = wording.mark(case).partition(" ")
    found = read(case["diagnosis"]) if "diagnosis" in case else None
    return CaseView(
        anchor=anchor,
        data=case,
        title=title(case),
        sign=sign,
        word=word,
        meaning=wording.meaning(case),
        outputs=tuple(
            _output(output, f"{anchor}-output-{n}", measured) for n, output in enumerate(case["outputs"], start=1)
        ),
        timeline=charts.timeline(case["seconds"]),
        diagnosis=DiagnosisView(found, charts.curves(found)) if found else None,
    )


def _output(output: Mapping[str, Any], anchor: str, measured: bool) -> OutputView:
    known = output.get("distribution", {"histogram": [], "largest": [], "masks": []})
    rows = distribution.rows_of(known)
    return OutputView(
        anchor=anchor,
        data=output,
        histogram=charts.histogram(known["histogram"]) if known["histogram"] else None,
        largest=error_map(rows) if rows else None,
        masks=known["masks"],
        missing="" if known["histogram"] else _missing(output, measured),
    )


def _missing(output: Mapping[str, Any], measured: bool) -> str:
    """Says why an output has no histogram, in a report that has some or none."""
    if output["dtype"].startswith(("bool", "int", "uint")):
        return "Integers and booleans are equal or not: there is no histogram of their errors."
    if "distribution" in output or math.isnan(number(output["max_abs"])):
        return "There is no error that could be counted."
    if measured:
        return "How the errors of this output are distributed was not measured."
    return "This report does not have how errors are distributed: verify again to see it."


def _trusted(text: str) -> Any:
    """Marks a file of this project as HTML, which is written as it is."""
    from markupsafe import Markup

    return Markup(text)
