"""`sam3-tvm report`: the performance report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.console import console


def report(
    results: Annotated[
        list[Path], typer.Argument(help="Files of pytest perf … --benchmark-json=FILE.", metavar="RESULTS…")
    ],
    out: Annotated[Path, typer.Option(help="Folder of PERFORMANCE_REPORT.md and its plots.")],
    db: Annotated[Path | None, typer.Option(help="Folder of a tuning database, to list what was found.")] = None,
) -> None:
    """Render the performance report, with plots, from what the suites in perf/ measured."""
    from harness.report.performance.writer import write_performance_report

    with console.status("Drawing"):
        page = write_performance_report(results, out, db)
    console.print(f"Report: {page}", highlight=False, soft_wrap=True)
