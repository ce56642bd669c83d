"""Renders the page; everything that it shows is in the sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.core.precision import DEFAULT_PRECISION
from harness.report.performance import findings
from harness.report.performance.document import (
    NO_DATABASE,
    NOT_ASKED,
    Section,
    best_side,
    group_rates,
    peak_range,
    ratio,
    shares,
)
from harness.report.performance.formatting import NOT_APPLICABLE, decimals, duration, factor, giga, percent
from harness.report.performance.reading import (
    ENOUGH_FOR_P95,
    ENOUGH_FOR_P99,
    Measurement,
    ResultFile,
    Side,
)
from harness.report.performance.sides import LABELS, OURS, PYTORCH, TUNED, UNTUNED
from harness.report.template import rendered
from harness.report.verification.markdown import cell
from harness.report.verification.wording import size

_TEMPLATE = Path(__file__).parent / "templates" / "performance_report.md.j2"


def render_page(
    sections: Sequence[Section],
    plots: Sequence[Mapping[str, str]],
    files: Sequence[ResultFile],
) -> str:
    """Renders the Markdown.

    Args:
        sections: One for each machine.
        plots: For each section, where each plot lies, relative to the page.
        files: All that were read.
    """
    filters = {
        "cell": cell,
        "size": size,
        "duration": duration,
        "ratio_cell": cell_of_ratio,
        "gain_cell": cell_of_gain,
        "factor": factor,
        "percent": percent,
        "giga": giga,
        "decimals": decimals,
    }
    return rendered(
        _TEMPLATE,
        filters,
        sections=list(zip(sections, plots, strict=True)),
        files=files,
        findings=findings,
        label=lambda name: LABELS.get(name, name),
        best_side=best_side,
        ratio=ratio,
        shares=shares,
        group_rates=group_rates,
        peaks=peak_range,
        rate=rate,
        why_absent=why_absent,
        settings=settings,
        enough=(ENOUGH_FOR_P95, ENOUGH_FOR_P99),
        half=any(m.case.precision != DEFAULT_PRECISION for section in sections for m in section.measurements),
        ours=OURS,
        PYTORCH=PYTORCH,
        UNTUNED=UNTUNED,
        TUNED=TUNED,
    )


def cell_of_ratio(found: Any) -> str:
    """Writes a ratio with its interval."""
    return NOT_APPLICABLE if found is None else findings.format_ratio(found)


def cell_of_gain(found: Any) -> str:
    """Writes a ratio as per cent above 1, with its interval."""
    return NOT_APPLICABLE if found is None else findings.format_ratio(found, as_gain=True)


def rate(measurement: Measurement, side: Side) -> str:
    """Writes the arithmetic rate of a side with its share of the peak: 418 (82 %)."""
    if not measurement.flop:
        return NOT_APPLICABLE
    found = measurement.flop / side.median
    share = f" ({percent(found / measurement.peak_flops)})" if measurement.peak_flops else ""
    return f"{giga(found)}{share}"


def why_absent(measurement: Measurement, name: str) -> str:
    """Returns why a side was not measured."""
    return measurement.absent.get(name, NO_DATABASE if name == TUNED else NOT_ASKED)


def settings(section: Section) -> list[tuple[str, str, list[str]]]:
    """Returns each peer with each of its settings, where the files say how it was set, and what was measured so."""
    found: dict[tuple[str, str], list[str]] = {}
    for measurement in section.measurements:
        for name in section.peers:
            if name in measurement.sides and (setting := measurement.sides[name].setting):
                found.setdefault((name, setting), []).append(section.names[measurement])
    return [(name, setting, measured) for (name, setting), measured in found.items()]
