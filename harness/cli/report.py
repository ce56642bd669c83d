"""Defines `sam3-tvm report`: renders pages of measurements or verifications, and compares two verifications."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.console import console, print_sentence
from harness.core.errors import HarnessError


def report(
    results: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Files of pytest perf … --benchmark-json=FILE, gzipped or not, or one verification_report.json.",
            metavar="[RESULTS…]",
        ),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Two files verification_report.json: what changed.", metavar="BEFORE AFTER"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the pages. Default for verification reports: the last file's.")
    ] = None,
    summary: Annotated[
        Path | None,
        typer.Option(help="File to append a summary to, as Markdown; for verification reports."),
    ] = None,
) -> None:
    """Render the pages of measurements of perf/ or of a verification, or compare two verifications."""
    if compare is not None:
        if results or summary:
            raise HarnessError("--compare takes two reports, and no other option than --out: leave the others out")
        page = _compare(*compare, out)
    elif not results:
        raise HarnessError("give files of results, or two reports with --compare")
    elif any(map(_is_verification, results)):
        if len(results) > 1:
            raise HarnessError("a verification report is rendered by itself: give one file, or two with --compare")
        page = _report_verification(results[0], out, summary)
    else:
        if out is None or summary:
            raise HarnessError("benchmarks need a folder for their page: give --out DIR, and no --summary")
        page = _report_measurements(results, out)
    print_sentence(f"Report: {page}")


def _is_verification(path: Path) -> bool:
    """Returns whether a file looks like a verification report; the reader reports what is wrong with it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return path.name == "verification_report.json"
    return isinstance(data, dict) and "cases" in data and "benchmarks" not in data


def _report_measurements(results: list[Path], out: Path) -> Path:
    from harness.models.registry import subjects

    try:
        from harness.verify.report.performance.writer import write_performance_report
    except ModuleNotFoundError as error:
        raise HarnessError(
            f"this report takes {error.name}, which is not installed: pip install 'sam3-tvm[perf]'"
        ) from error

    with console.status("Drawing"):
        return write_performance_report(results, out, order=list(subjects()))


def _report_verification(path: Path, out: Path | None, summary: Path | None) -> Path:
    from harness.verify.report.verification.writer import append_summary, write_pages

    page = write_pages(path, out or path.parent)
    if summary is not None:
        append_summary(path, summary)
    return page


def _compare(before: Path, after: Path, out: Path | None) -> Path:
    from harness.verify.report.verification.comparison import summary_sentence
    from harness.verify.report.verification.writer import write_comparison

    page, comparison = write_comparison(before, after, out or after.parent)
    print_sentence(summary_sentence(comparison))
    for case in comparison.outcomes:
        print_sentence(f"{case.case}: {case.before or 'not there'} → {case.after or 'not there'}")
    return page
