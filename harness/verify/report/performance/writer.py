"""Writes the performance report: `performance.md`, and its plots and tables in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from harness.core.errors import HarnessError
from harness.core.files import write_files
from harness.core.precision import DEFAULT_PRECISION
from harness.verify.report.performance import plots, tables
from harness.verify.report.performance.reading import PERCENTILES, read_results
from harness.verify.report.template import rendered
from harness.verify.report.verification.wording import cell, size

MARKDOWN_NAME = "performance.md"
_TEMPLATE = Path(__file__).parent / "templates" / "performance.md.j2"


def write_performance_report(results: Sequence[Path], directory: Path, order: Sequence[str]) -> Path:
    """Writes page, plots and CSV files, each complete or not at all, and returns the page's path.

    Args:
        results: JSON files of `pytest perf … --benchmark-json=FILE`, plain or compressed by gzip.
        directory: The report's folder, which is made if it does not exist.
        order: Names of components that come first on the page, in this order.

    Raises:
        HarnessError: The results cannot be read or are in another layout, or the folder cannot be written.
    """
    if directory.exists() and not directory.is_dir():
        raise HarnessError(f"{directory} is a file; give --out a folder.")
    results_table = read_results(results)
    sections = tables.split_sections(results_table, order)
    files: dict[str, bytes] = {}
    for number, section in enumerate(sections, 1):
        pictures = plots.render_plots(section).items()
        files |= {f"performance/{name}-{number}.png": picture for name, picture in pictures}
        rows = tables.collect_rows(section).items()
        files |= {f"performance/{name}-{number}.csv": format_table(frame).to_csv().encode() for name, frame in rows}
    page = rendered(
        _TEMPLATE,
        {"cell": cell, "giga": tables.giga, "size": size, "table": table},
        sections=sections,
        files=files,
        t=tables,
        percentiles=PERCENTILES,
        half=not results_table["precision"].isin({"", DEFAULT_PRECISION}).all(),
        others=results_table[results_table["kind"] == "other"],
    )
    write_files(directory, {**files, MARKDOWN_NAME: page.encode()}, advice="choose another folder with --out")
    return directory / MARKDOWN_NAME


def table(frame: pd.DataFrame, columns: Sequence[str] = ()) -> str:
    """Writes a table in Markdown, whose index is the first column.

    Args:
        frame: The table.
        columns: The columns to show; all of them by default.
    """
    texts = format_table(frame[list(columns or frame.columns)])
    rules = ["---:" if name in tables.WRITERS else "---" for name in texts]
    lines = [[texts.index.name, *texts], ["---", *rules], *texts.itertuples()]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def format_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the table with numbers as texts."""
    texts = {name: frame[name].map(tables.WRITERS.get(name, tables.text)) for name in frame}
    return pd.DataFrame(texts, index=frame.index)
