"""The plots: one function each, from plain data to a figure; without pyplot, so nothing global changes.

The same data gives the same bytes: style and font are matplotlib's own, whatever the user's settings are, and the
files carry no date and no version.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from harness.core.errors import HarnessError
from harness.report.performance import findings
from harness.report.performance.document import GOALS, Section, Share, best_side, peak_range, ratio, shares
from harness.report.performance.formatting import duration, factor, percent
from harness.report.performance.palette import EDGE, FAINT, MARKER_BY_SIDE, STYLE, WIDTH, colour
from harness.report.performance.reading import KernelRate, Measurement, Side
from harness.report.performance.roofline import Point, draw_bandwidth, draw_roof, draw_roofline, kind_of, rate_span
from harness.report.performance.sides import LABELS, PYTORCH, TUNED, UNTUNED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_PER_INCH = 150
_ROW, _GAP = 1.0, 1.05
"""Height of a row, and of the heading of a block of rows, in units of the y axis."""
_ROW_INCHES = 0.2
_MOST = 1.6
"""Length of the axis of latencies in units of PyTorch's median, if all medians are within it."""
_LEAST_SHARE = 0.005
"""Share of a component's time below which a kernel is no point of the roofline."""
_LEGEND_COLUMNS = 5
_NAME = 34
"""Characters of a kernel's name beside its bar."""


def render_plots(section: Section) -> dict[str, bytes]:
    """Draws all plots that the section has data for; returns PNG files by name without an ending.

    Raises:
        HarnessError: matplotlib is not installed.
    """
    drawings: dict[str, Callable[[], Figure | None]] = {
        "speedup": lambda: draw_speedup(section),
        "latency": lambda: draw_latency(section.components, section.names, "Components"),
        "end_to_end": lambda: draw_latency(section.questions, section.names, "Whole model"),
        "roofline": lambda: draw_kernel_rates(section.kernels, findings.roofline_title(section)),
        "roofline_components": lambda: draw_component_roofline(section),
        "kernels": lambda: draw_kernels(section),
        "peers": lambda: draw_peers(section),
    }
    with _style():
        figures = {name: draw() for name, draw in drawings.items()}
        return {name: png(figure) for name, figure in figures.items() if figure is not None}


def png(figure: Figure) -> bytes:
    """Writes the picture as PNG, without anything that differs between two runs."""
    file = io.BytesIO()
    with _style():
        figure.savefig(file, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return file.getvalue()


@contextmanager
def _style() -> Iterator[None]:
    try:
        import matplotlib
    except ImportError as error:
        raise HarnessError(
            "The report's plots take matplotlib, which is not installed: pip install 'sam3-tvm[perf]'."
        ) from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def _figure(height: float, title: str, **options: Any) -> tuple[Figure, Any]:
    """Makes a figure of the page's width, and its axes; the title stands above all, at the left."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    return figure, figure.subplots(**options)


# Components beside PyTorch


def draw_speedup(section: Section) -> Figure | None:
    """Draws PyTorch's time over ours: untuned and tuned as the ends of a line, and the goals."""
    rows = section.components
    if not rows:
        return None
    figure, axes = _figure(1.25 + 0.27 * len(rows), findings.speedup_title(section))
    for y, measurement in enumerate(rows):
        found = {name: r for name in (UNTUNED, TUNED) if (r := ratio(measurement, PYTORCH, name))}
        values = [r.value for r in found.values()]
        axes.plot([min(values), max(values)], [y, y], color=FAINT, linewidth=2.5, zorder=1, solid_capstyle="butt")
        for name, value in found.items():
            if value.low is not None and value.high is not None:
                axes.plot([value.low, value.high], [y, y], color=colour(name), linewidth=1.2, zorder=2)
            axes.scatter(value.value, y, s=42, color=colour(name), zorder=3, linewidths=0)
        axes.annotate(
            "  →  ".join(factor(value) for value in values),
            (1.02, y),
            xycoords=axes.get_yaxis_transform(),
            va="center",
            fontsize=8.5,
        )
    side = best_side(rows)
    goal = next(goal for goal in GOALS if (goal.over, goal.under) == (PYTORCH, side) and not goal.as_gain)
    for bar, text, style in ((goal.least, f"at least {goal.least:g}", "-"), (goal.aim, f"aim {goal.aim:g}", ":")):
        axes.axvline(bar, color=EDGE, linewidth=1, linestyle=style, zorder=0)
        axes.annotate(
            text,
            (bar, 1),
            xycoords=axes.get_xaxis_transform(),
            xytext=(3 if style == ":" else -3, 2),
            textcoords="offset points",
            ha="left" if style == ":" else "right",
            fontsize=8,
        )
    axes.set_yticks(range(len(rows)), [section.names[m] for m in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    values = [r.value for m in rows for name in (UNTUNED, TUNED) if (r := ratio(m, PYTORCH, name))]
    axes.set_xlim(0, 1.12 * max(goal.aim, *values))  # an interval may end beyond
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"PyTorch's time / ours ({_key(rows)})")
    return figure


def _key(rows: Sequence[Measurement]) -> str:
    if best_side(rows) == TUNED:
        return "light: untuned, dark: tuned; to the right is faster"
    return "untuned; to the right is faster"


# Before and after tuning, from the raw rounds


def draw_latency(measurements: Sequence[Measurement], names: Mapping[Measurement, str], what: str) -> Figure | None:
    """Draws rounds, middle half, median and percentiles of the sides, relative to PyTorch's median."""
    if not measurements:
        return None
    blocks = [(m, [m.sides[name] for name in (PYTORCH, UNTUNED, TUNED) if name in m.sides]) for m in measurements]
    rows = sum(len(sides) for _, sides in blocks)
    figure, axes = _figure(
        1.1 + _ROW_INCHES * (rows * _ROW + len(blocks) * _GAP), findings.latency_title(measurements, what)
    )
    relative = [(m.sides[PYTORCH].median, side) for m, sides in blocks for side in sides]
    most = max(_typical_most(side) / unit for unit, side in relative)
    limit = 1.06 * min(most, max(_MOST, *(1.2 * side.median / unit for unit, side in relative)))
    y, ticks, labels = 0.0, [], []
    for measurement, sides in blocks:
        _heading(axes, y, names[measurement])
        y += _GAP
        for side in sides:
            _box(axes, y, side, measurement.sides[PYTORCH].median, limit)
            ticks.append(y)
            labels.append(side.label)
            y += _ROW
    axes.axvline(1, color=FAINT, linewidth=1, zorder=0)
    axes.set_yticks(ticks, labels)
    axes.set_ylim(y - 0.3, -0.8)
    axes.set_xlim(0, limit * 1.01)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(lambda x, _: f"{100 * x:.0f} %")
    axes.set_xlabel(
        "time relative to PyTorch's median · box: middle half of the rounds, line: median, dots: rounds (▸ beyond), "
        "◆ p95, ▲ p99",
        fontsize=7.5,
    )
    return figure


def _typical_most(side: Side) -> float:
    """Returns a time that nearly all rounds stay below, so that one disturbed round does not set the scale."""
    return sorted(side.seconds)[math.ceil(0.95 * len(side.seconds)) - 1]


def _heading(axes: Axes, y: float, text: str) -> None:
    axes.annotate(
        text,
        (0, y),
        xycoords=axes.get_yaxis_transform(),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        weight="bold",
        fontsize=8.5,
    )


def _box(axes: Axes, y: float, side: Side, unit: float, limit: float) -> None:
    shade = colour(side.name)
    rounds = [seconds / unit for seconds in side.seconds]
    inside = [x for x in rounds if x <= limit]
    axes.scatter(inside, [y] * len(inside), s=6, color=shade, alpha=0.35, linewidths=0, zorder=1)
    if len(inside) < len(rounds):
        axes.scatter([limit], [y], s=14, marker=">", color=EDGE, linewidths=0, zorder=3)
    first, third = (value / unit for value in side.quartiles)
    axes.barh(y, third - first, left=first, height=0.62, color=shade, zorder=2)
    axes.plot([side.median / unit] * 2, [y - 0.38, y + 0.38], color=EDGE, linewidth=1.6, zorder=4)
    for value, marker in ((side.p95, "D"), (side.p99, "^")):
        if value is not None and value / unit <= limit:
            axes.scatter(value / unit, y, s=15, marker=marker, color=EDGE, linewidths=0, zorder=3)
    percentiles = [f"p95 {duration(side.p95)}"] if side.p95 is not None else []
    percentiles += [f"p99 {duration(side.p99)}"] if side.p99 is not None else []
    axes.annotate(
        " · ".join([duration(side.median), *percentiles]),
        (1.015, y),
        xycoords=axes.get_yaxis_transform(),
        va="center",
        fontsize=7.5,
    )


# Rooflines


def draw_kernel_rates(kernels: Sequence[KernelRate], title: str) -> Figure | None:
    """Draws kernels alone: products, convolutions and attention below the roof, the rest beside the bandwidth."""
    compute = [kernel for kernel in kernels if kernel.bound == "compute"]
    memory = [kernel for kernel in kernels if kernel.bound == "memory"]
    if not compute or not memory:  # then either the peak or the bandwidth was not probed
        return None
    compute_points = [(kind_of(kernel.group), kernel.work / kernel.moved, kernel) for kernel in compute]
    memory_points = [("", kernel.moved, kernel) for kernel in memory]
    return draw_rooflines(
        title, _points(compute_points), _points(memory_points), _median_peak(compute), _median_peak(memory)
    )


def draw_rooflines(
    title: str, compute: Sequence[Point], memory: Sequence[Point], flops: float, bandwidth: float
) -> Figure:
    """Draws what arithmetic limits below the roof, and what memory limits beside the bandwidth.

    Args:
        title: Title of the figure.
        compute: x is FLOP per byte, rates are in FLOP/s.
        memory: x is bytes moved, rates are in byte/s.
        flops: Measured arithmetic peak, FLOP/s.
        bandwidth: Measured bandwidth, byte/s.
    """
    with _style():
        figure, (left, right) = _figure(4.1, title, ncols=2, width_ratios=(3, 2))
        draw_roofline(left, compute, flops, bandwidth)
        draw_bandwidth(right, memory, bandwidth)
        left.set_title("Products, convolutions, attention")
        right.set_title("Normalization, elementwise, movement")
        return figure


def _points(places: Sequence[tuple[str, float, KernelRate]]) -> list[Point]:
    """Returns the points, ours on top of PyTorch's."""
    ours = [Point(TUNED, "TVM", kind, x, kernel.rate) for kind, x, kernel in places]
    return ours + [Point(PYTORCH, "PyTorch", kind, x, kernel.torch_rate) for kind, x, kernel in places]


def _median_peak(kernels: Sequence[KernelRate]) -> float:
    return statistics.median(peak for kernel in kernels for peak in kernel.peaks)


def draw_component_roofline(section: Section) -> Figure | None:
    """Draws the components' kernels on the CPU whose work is known; the area is their share of the time."""
    peaks = peak_range(section)
    if peaks.flops is None or peaks.bandwidth is None:
        return None
    flops, bandwidth = peaks.flops.median, peaks.bandwidth.median
    points = []
    for measurement in section.measurements:
        if measurement.peak_flops is None:
            continue
        total = sum(kernel.seconds for kernel in measurement.kernels)
        for kernel in measurement.kernels:
            if kernel.flop and kernel.bytes and kernel.seconds > _LEAST_SHARE * total:
                place = kernel.flop / kernel.bytes, kernel.flop / kernel.seconds
                points.append((kernel.seconds / total, *place, measurement.profiled))
    if not points:
        return None
    figure, axes = _figure(3.6, findings.component_roofline_title(section.measurements))
    shades = [colour(side) for *_, side in points]
    sizes = [6 + 220 * share for share, *_ in points]
    x, y = [x for _, x, _, _ in points], [rate / 1e9 for _, _, rate, _ in points]
    draw_roof(axes, x, flops, bandwidth)
    axes.scatter(x, y, s=sizes, color=shades, alpha=0.55, linewidths=0.4, edgecolors="white")
    axes.set_ylabel("GFLOP/s")
    axes.set_xlabel("FLOP per byte that must move at least (area: share of the component's time, from 0.5 % on)")
    axes.set_ylim(*rate_span([rate for _, _, rate, _ in points], flops))
    axes.grid(alpha=0.25, which="major")
    return figure


# Where the time goes


def draw_kernels(section: Section) -> Figure | None:
    """Draws the longest kernels of each component as bars with their share, in panels two side by side."""
    blocks = [(m, found) for m in section.measurements if (found := shares(m.kernels))]
    if not blocks:
        return None
    columns = min(2, len(blocks))
    lines = math.ceil(len(blocks) / columns)
    most = max(len(found) for _, found in blocks)
    figure, panels = _figure(
        0.5 + lines * (0.35 + 0.16 * most),
        findings.kernels_title([m for m, _ in blocks]),
        nrows=lines,
        ncols=columns,
        squeeze=False,
    )
    for axes, (measurement, found) in zip(panels.flat, blocks, strict=False):
        _bars(axes, found, measurement.profiled, most)
        axes.set_title(section.names[measurement], fontsize=8, weight="bold")
    for axes in list(panels.flat)[len(blocks) :]:
        axes.set_axis_off()
    return figure


def _bars(axes: Axes, found: Sequence[Share], side: str, rows: int) -> None:
    longest = max(share.share for share in found)
    for y, share in enumerate(found):
        axes.barh(y, share.share / longest, height=0.72, color=FAINT if share.calls is None else colour(side))
        calls = "" if share.calls in (None, 1) else f" · {share.calls}×"
        text = f"{percent(share.share)} · {duration(share.seconds)}{calls}"
        axes.annotate(
            text, (share.share / longest, y), xytext=(3, 0), textcoords="offset points", va="center", fontsize=6.5
        )
    axes.set_yticks(range(len(found)), [shortened(share.name) for share in found], fontsize=6.5)
    axes.set_ylim(rows - 0.5, -0.6)
    axes.set_xlim(0, 2.2)  # room for the longest bar's text
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def shortened(name: str, limit: int = _NAME) -> str:
    """Shortens a name that is too long to its ends, which tell operators and copies apart."""
    if len(name) <= limit:
        return name
    tail = limit // 3
    return f"{name[: limit - tail - 1]}…{name[-tail:]}"


# Peers


def draw_peers(section: Section) -> Figure | None:
    """Draws the times of each peer and of PyTorch, over ours."""
    rows = [m for m in section.measurements if any(name in m.sides for name in section.peers)]
    if not rows:
        return None
    figure, axes = _figure(1.35 + 0.27 * len(rows), findings.peers_title(section))
    sides = [PYTORCH, *section.peers]
    for name in sides:
        found = [(r, y) for y, m in enumerate(rows) if (r := ratio(m, name, m.ours.name))]
        if not found:
            continue
        unsound = [rows[y].sides[name].unsound for _, y in found]
        axes.scatter(
            [r.value for r, _ in found],
            [y for _, y in found],
            s=34,
            marker=MARKER_BY_SIDE.get(name, "v"),
            facecolors=["white" if open_ else colour(name) for open_ in unsound],
            edgecolors=colour(name),
            linewidths=1.2,
            zorder=2,
        )
        axes.scatter(
            [], [], s=34, marker=MARKER_BY_SIDE.get(name, "v"), color=colour(name), label=LABELS.get(name, name)
        )
    for y in range(len(rows)):
        axes.axhline(y, color=FAINT, linewidth=0.5, zorder=0)
    axes.axvline(1, color=EDGE, linewidth=1, zorder=1)
    axes.annotate(
        "ours", (1, 1), xycoords=axes.get_xaxis_transform(), xytext=(3, 2), textcoords="offset points", fontsize=8
    )
    axes.set_yticks(range(len(rows)), [section.names[m] for m in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.tick_params(axis="y", length=0)
    failing = any(m.sides[name].unsound for m in rows for name in sides if name in m.sides)
    what = "its time / ours; to the right of the line it is slower than ours"
    axes.set_xlabel(f"{what} (open: fails the parity gate)" if failing else what)
    figure.legend(loc="outside lower center", ncols=min(len(sides), _LEGEND_COLUMNS), frameon=False, handletextpad=0.2)
    return figure
