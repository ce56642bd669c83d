"""Writes a report: `verification_report.json`, and `VERIFICATION_REPORT.md` rendered from it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.files import write_files
from harness.report.verification.document import Result, build_report
from harness.report.verification.markdown import render_report

ADVICE = "choose another folder with --report"
"""Advice for the user where a report cannot be written."""

JSON_NAME = "verification_report.json"
MARKDOWN_NAME = "VERIFICATION_REPORT.md"


def write_report(
    results: Sequence[Result],
    machine: Mapping[str, Any],
    versions: Mapping[str, Any],
    directory: Path,
    *,
    flags: Sequence[str] = (),
    created: datetime | None = None,
) -> Path:
    """Writes both files into the folder, each complete or not at all, and returns the JSON's path.

    Args:
        results: In the order in which they are to appear.
        machine: From `harness.machine.describe_machine`.
        versions: From `harness.machine.versions`.
        directory: Is made if it does not exist.
        flags: Appended to every command that reproduces a case.
        created: Now, unless it is given.

    Raises:
        HarnessError: If the folder cannot be made or written.
    """
    report = build_report(results, machine, versions, flags=flags, created=created)
    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    page = render_report(json.loads(text))
    write_files(directory, {JSON_NAME: text.encode(), MARKDOWN_NAME: page.encode()}, advice=ADVICE)
    return directory / JSON_NAME
