"""Writes a report: `verification_report.json`, and the pages that are rendered from it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.core.files import append_bytes, write_files
from harness.verify.report.verification.comparison import Comparison, compare, render_comparison
from harness.verify.report.verification.document import Result, build_report, read_report
from harness.verify.report.verification.pages import render_page, render_report, render_summary

ADVICE = "choose another folder with --report"
"""Advice for the user if a report cannot be written."""
ADVICE_ON_PAGES = "choose another folder with --out"
"""Advice for the user if the pages of existing reports cannot be written."""
ADVICE_ON_SUMMARY = "choose another file with --summary"

JSON_NAME = "verification_report.json"
MARKDOWN_NAME = "VERIFICATION_REPORT.md"
PAGE_NAME = "verification_report.html"
COMPARISON_NAME = "verification_comparison.html"


def write_report(
    results: Sequence[Result],
    machine: Mapping[str, Any],
    versions: Mapping[str, Any],
    directory: Path,
    *,
    flags: Sequence[str] = (),
    created: datetime | None = None,
) -> Path:
    """Writes all files into the folder, each completely or not at all, and returns the JSON's path.

    Args:
        results: Results in the order of the report.
        machine: Result of `harness.core.machine.describe_machine`.
        versions: Result of `harness.core.machine.versions`.
        directory: The folder; it is created if it does not exist.
        flags: Appended to every command that reproduces a case.
        created: Time of the report; None for now.

    Raises:
        HarnessError: The folder cannot be created or written.
    """
    report = build_report(results, machine, versions, flags=flags, created=created)
    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    files = {JSON_NAME: text.encode(), **_pages(json.loads(text))}
    write_files(directory, files, advice=ADVICE)
    return directory / JSON_NAME


def write_pages(json_path: Path, directory: Path) -> Path:
    """Renders the pages of a JSON report again, and returns the HTML page.

    Args:
        json_path: The report.
        directory: Folder of the pages; it is created if it does not exist.

    Raises:
        HarnessError: The file is not a report, or the folder cannot be created or written.
    """
    write_files(directory, _pages(read_report(json_path)), advice=ADVICE_ON_PAGES)
    return directory / PAGE_NAME


def write_comparison(before: Path, after: Path, directory: Path) -> tuple[Path, Comparison]:
    """Writes a page on the differences of two JSON reports; returns the page and the differences.

    Args:
        before: The earlier report.
        after: The later report.
        directory: Folder of the page; it is created if it does not exist.

    Raises:
        HarnessError: A file is not a report, or the folder cannot be created or written.
    """
    reports = read_report(before), read_report(after)
    page = render_comparison(*reports, names=(str(before), str(after)))
    write_files(directory, {COMPARISON_NAME: page.encode()}, advice=ADVICE_ON_PAGES)
    return directory / COMPARISON_NAME, compare(*reports)


def append_summary(json_path: Path, summary: Path) -> None:
    """Appends the summary of a JSON report to a Markdown file, such as a job's summary on GitHub.

    Raises:
        HarnessError: The first file is not a report, or the second cannot be written.
    """
    append_bytes(summary, render_summary(read_report(json_path)).encode(), advice=ADVICE_ON_SUMMARY)


def _pages(report: Mapping[str, Any]) -> dict[str, bytes]:
    return {MARKDOWN_NAME: render_report(report).encode(), PAGE_NAME: render_page(report).encode()}
