"""Writes the performance report: `PERFORMANCE_REPORT.md`, and its plots in a folder beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.core.errors import HarnessError
from harness.files import write_files
from harness.report.performance.document import build_sections
from harness.report.performance.markdown import render_page
from harness.report.performance.plots import render_plots
from harness.report.performance.reading import read_results

MARKDOWN_NAME = "PERFORMANCE_REPORT.md"
PLOTS_FOLDER = "performance"


def write_performance_report(results: Sequence[Path], directory: Path, order: Sequence[str] = ()) -> Path:
    """Writes page and plots, each complete or not at all, and returns the page's path.

    Args:
        results: JSON files of `pytest perf … --benchmark-json=FILE`.
        directory: Is made if it does not exist.
        order: Names of components and whole models that come first on the page, in this order.

    Raises:
        HarnessError: If the results cannot be read or are not what the suites write, matplotlib is not
            installed, or the folder cannot be written.
    """
    if directory.exists() and not directory.is_dir():
        raise HarnessError(f"{directory} is a file; give --out a folder.")
    files = read_results(results)
    sections = build_sections(files, order)
    pictures: dict[str, bytes] = {}
    places = []
    for number, section in enumerate(sections, 1):
        suffix = f"-{number}" if len(sections) > 1 else ""
        drawn = {
            name: (f"{PLOTS_FOLDER}/{name}{suffix}.png", picture) for name, picture in render_plots(section).items()
        }
        pictures |= dict(drawn.values())
        places.append({name: place for name, (place, _) in drawn.items()})
    page = render_page(sections, places, files)
    write_files(directory, {**pictures, MARKDOWN_NAME: page.encode()}, advice="choose another folder with --out")
    return directory / MARKDOWN_NAME
