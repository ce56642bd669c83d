"""Renders the JSON report as Markdown and as one self-contained HTML file; all that they show is in the JSON."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness.core.case import DEFAULT_STRATEGY
from harness.core.outcome import Stage
from harness.verify.report.template import rendered
from harness.verify.report.verification import charts, wording
from harness.verify.report.verification.schema import error_rows, number

_TEMPLATES = Path(__file__).parent / "templates"


def render_report(report: Mapping[str, Any]) -> str:
    """Renders a report that was read as Markdown; `harness.verify.report.verification.document` defines the schema."""
    return _render_report("verification_report.md.j2", report, linked=True)


def render_summary(report: Mapping[str, Any]) -> str:
    """Renders the summary of a report: the matrix, and the problem of each case that is not as expected."""
    return _render_report("verification_summary.md.j2", report, linked=False)


def render_overview(report: Mapping[str, Any]) -> str:
    """Renders the overview of a report: a line for each case in place of one for each output."""
    return _render_report("verification_overview.md.j2", report, linked=False, default_strategy=DEFAULT_STRATEGY)


def render_page(report: Mapping[str, Any]) -> str:
    """Renders a report that was read as HTML; `harness.verify.report.verification.document` defines the schema."""
    outputs = [output for case in report["cases"] for output in case["outputs"]]
    return _render_report(
        "verification_report.html.j2", report, any_distribution=any("distribution" in output for output in outputs)
    )


def _render_report(template: str, report: Mapping[str, Any], **values: Any) -> str:
    cases = [case | {"anchor": f"case-{n}"} for n, case in enumerate(report["cases"], start=1)]
    title = wording.titles(cases)
    by_cell = {(case["component"], title(case)): case for case in cases}
    columns = wording.distinct(map(title, cases))
    components = wording.distinct(case["component"] for case in cases)
    return render_template(
        template,
        filters={"title": title},
        headline=wording.headline(report["summary"]),
        provenance=wording.provenance(report),
        columns=columns,
        matrix={name: [by_cell.get((name, column)) for column in columns] for name in components},
        components={name: [case for case in cases if case["component"] == name] for name in components},
        unexpected=[case for case in cases if case["expected"] is False],
        diagnosed=[case for case in cases if case.get("diagnosis") or case.get("not_diagnosed")],
        known=wording.known_causes(cases),
        skipped=[case for case in cases if case["expected"] is None],
        cases=cases,
        machine=[wording.fact(key, value) for key, value in report["machine"].items()],
        versions=report["versions"],
        **values,
    )


def render_template(template: str, filters: Mapping[str, Callable[..., Any]], **values: Any) -> str:
    """Renders a template with the words, drawings and script that all pages share.

    Args:
        template: Name of the template's file.
        filters: Functions of this page that format values.
        **values: Variables of the template.
    """
    script = (_TEMPLATES / "page.js").read_bytes()
    return rendered(
        _TEMPLATES / template,
        {**wording.FILTERS, "error_rows": error_rows, "missing_reason": _missing_reason, "png": charts.png, **filters},
        charts=charts,
        not_run=wording.NOT_RUN,
        stages=[stage.value for stage in Stage],
        script_hash=base64.b64encode(hashlib.sha256(script).digest()).decode(),
        **values,
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
