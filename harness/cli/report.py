"""What the `report` command does with its options, and what it prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.report.performance.writer import write_performance_report


def report(console: Console, results: Sequence[Path], out: Path, database: Path | None) -> None:
    """Writes the page with its plots, and tells where.

    Raises:
        HarnessError: Something cannot be read or written.
    """
    with console.status("Drawing"):
        page = write_performance_report(results, out, database)
    console.print(f"Report: {page}", highlight=False, soft_wrap=True)
