"""Renders the JSON report as Markdown; everything that it shows is in the JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.core.outcome import Stage
from harness.verify.report.template import Filters, rendered
from harness.verify.report.verification import wording
from harness.verify.report.verification.document import read_report

_TEMPLATES = Path(__file__).parent / "templates"


def render(json_path: Path) -> str:
    """Renders the page of a JSON report on disk.

    Raises:
        HarnessError: The file is not a report.
    """
    return render_report(read_report(json_path))


def render_report(report: Mapping[str, Any]) -> str:
    """Renders the page of a report that was read; `harness.verify.report.verification.document` defines the schema."""
    return _render_template("verification_report.md.j2", report, linked=True)


def render_summary(report: Mapping[str, Any]) -> str:
    """Renders the summary of a report: the matrix, and the problem of each case that is not as expected."""
    return _render_template("verification_summary.md.j2", report, linked=False)


def _render_template(template: str, report: Mapping[str, Any], *, linked: bool) -> str:
    cases = report["cases"]
    title = wording.titles(cases)
    headline = wording.headline(report["summary"])
    filters: Filters = {
        "cell": cell,
        "count": wording.count,
        "digits": wording.digits,
        "first_line": wording.first_line,
        "notes": wording.notes,
        "mark": wording.mark,
        "seconds": wording.seconds,
        "size": wording.size,
        "title": title,
        "total_seconds": wording.total_seconds,
    }
    return rendered(
        _TEMPLATES / template,
        filters,
        linked=linked,
        report=report,
        headline=f"{headline.sign} **{headline.verdict}:** {headline.counts}.".lstrip(),
        columns=wording.distinct(map(title, cases)),
        rows=_matrix(cases, title),
        components={
            name: [case for case in cases if case["component"] == name]
            for name in wording.distinct(case["component"] for case in cases)
        },
        unexpected=[case for case in cases if case["expected"] is False],
        diagnosed=[case for case in cases if case.get("diagnosis") or case.get("not_diagnosed")],
        known=wording.known_causes(cases),
        skipped=[case for case in cases if case["expected"] is None],
        legend=wording.LEGEND,
        glossary=wording.GLOSSARY,
        provenance=wording.provenance(report),
        stages=[stage.value for stage in Stage],
        tables=[case for case in cases if case["outputs"]],
        machine=[wording.fact(key, value) for key, value in report["machine"].items()],
    )


def cell(value: object) -> str:
    """Returns text that cannot break a table or a heading: one line, with pipes and angle brackets escaped."""
    text = " ".join(str(value).split())
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")


def _matrix(cases: Sequence[Mapping[str, Any]], title: Callable[[Mapping[str, Any]], str]) -> dict[str, list[str]]:
    """Returns the marks by component, one per column."""
    marks = {(case["component"], title(case)): wording.mark(case) for case in cases}
    columns = wording.distinct(map(title, cases))
    components = wording.distinct(case["component"] for case in cases)
    return {name: [marks.get((name, column), wording.NOT_RUN) for column in columns] for name in components}
