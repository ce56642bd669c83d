"""Draws the plots of the report, without pyplot's global state; the same rows give the same bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from harness.verify.report.performance import tables
from harness.verify.report.performance.reading import LABELS, PYTORCH, TUNED, UNTUNED
from harness.verify.report.performance.tables import divide_by_ours, divide_times, duration, gain, percent, select_side

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: Mapping[str, str] = {PYTORCH: "C2", UNTUNED: "C5", TUNED: "C0"}
_STYLE: list[Any] = [
    "seaborn-v0_8-colorblind",
    {"axes.grid": True, "axes.spines.right": False, "axes.spines.top": False, "font.size": 8, "grid.alpha": 0.25},
    {"figure.constrained_layout.use": True, "legend.fontsize": 7, "savefig.dpi": 150, "ytick.major.size": 0},
]
_WIDTH = 8.3
"""Width of a figure in inches; a page of GitHub shows it at about 100 dots per inch."""
_MARKERS = "osD^v<>P*X"
_LONGEST_COUNT, _NAME_LENGTH = 5, 34
"""Number of a component's kernels with a bar of their own, and length of their names, whose ends tell copies apart."""


@matplotlib.style.context(_STYLE, after_reset=True)
def render_plots(section: tables.Section) -> dict[str, bytes]:
    """Draws all plots that the section has rows for; returns PNG files by name."""
    figures: dict[str, Figure] = {}
    for kind, group in section.runs.groupby("kind"):
        figures["latency" if kind == "component" else "end_to_end"] = _latency(group)
    peaks = {bound: values.median() for bound, values in tables.collect_peaks(section).items()}
    if section.kernels["bound"].nunique() == 2:
        figures["roofline"] = _roofline(section.kernels, peaks)
    if len(profiled := tables.select_profiled(section.runs)):
        figures["kernels"] = _kernels(profiled)
        kernel_tables = [run.kernels.assign(colour=COLOURS[run.profiled]).dropna() for run in profiled.itertuples()]
        if any(map(len, kernel_tables)) and not np.isnan(list(peaks.values())).any():
            figures["roofline_components"] = _component_roofline(pd.concat(kernel_tables), peaks)
    if len(tables.select_peers(section.runs)):
        figures["peers"] = _peers(section.runs)
    return {name: png(figure) for name, figure in figures.items()}


@matplotlib.style.context(_STYLE, after_reset=True)
def png(figure: Figure) -> bytes:
    """Returns the figure as PNG, without anything that differs between two runs."""
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _figure(height: float, title: str, **options: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(_WIDTH, height))
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    return figure, figure.subplots(**options)


def _name_rows(axes: Axes, names: pd.Index, label: str) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.axvline(1, color="black", linewidth=1, zorder=0)
    axes.set_xlim(left=0)
    axes.set_xlabel(label)


def _latency(runs: pd.DataFrame) -> Figure:
    gains = divide_times(select_side(runs, UNTUNED), select_side(runs, TUNED))["value"]
    title = f"Tuning gains {gain(gains.min())} to {gain(gains.max())}" if len(gains) else "Without tuning"
    runs = tables.select_own_sides(runs)
    figure, axes = _figure(1 + 0.18 * len(runs), title)
    boxes = axes.boxplot(
        list(runs["seconds"] / runs["torch"]), orientation="horizontal", positions=range(len(runs)), widths=0.6,
        whis=(0, 100), patch_artist=True, medianprops={"color": "black", "linewidth": 1.6},
    )["boxes"]  # fmt: skip
    for box, key in zip(boxes, runs["key"], strict=True):
        box.set_facecolor(COLOURS[key])
    label = "time relative to PyTorch's median · box: middle half of the rounds, line: median, whiskers: all rounds"
    _name_rows(axes, runs["side"].where(runs["key"] != PYTORCH, runs.index + " · " + runs["side"]), label)
    axes.set_xlim(0, max(1.6, 1.2 * (runs["median"] / runs["torch"]).max()))
    axes.xaxis.set_major_formatter("{x:.0%}")
    return figure


def _roof(axes: Axes, x: pd.Series, peaks: Mapping[str, float]) -> None:
    ridge = peaks["compute"] / peaks["memory"]
    ends = np.array([min(ridge, x.min()) / 1.5, ridge, max(ridge, x.max()) * 1.5])
    label = f"measured {peaks['compute'] / 1e9:.0f} GFLOP/s, {peaks['memory'] / 1e9:.0f} GB/s"
    axes.loglog(ends, np.minimum(peaks["compute"], ends * peaks["memory"]) / 1e9, color="black", label=label)
    axes.set(xlabel="FLOP per byte that must move at least", ylabel="GFLOP/s")
    axes.legend(loc="lower right")


def _roofline(kernels: pd.DataFrame, peaks: Mapping[str, float]) -> Figure:
    compute, memory = (kernels[kernels["bound"] == bound] for bound in peaks)
    figure, (left, right) = _figure(4.4, "Kernels alone: TVM and PyTorch", ncols=2, width_ratios=(3, 2))
    for key, column in ((PYTORCH, "torch"), (TUNED, "TVM")):
        style = {"s": 20, "color": COLOURS[key], "alpha": 0.7, "linewidths": 0}
        for marker, (group, kernels_of_group) in zip(_MARKERS, compute.groupby("group", sort=False), strict=False):
            label, rate = group if key == TUNED else None, kernels_of_group["work"] / kernels_of_group[column] / 1e9
            left.scatter(
                kernels_of_group["work"] / kernels_of_group["moved"], rate, marker=marker, label=label, **style
            )
        label = LABELS[key].removesuffix(" tuned")
        right.scatter(memory["moved"] / 1e6, memory["work"] / memory[column] / 1e9, label=label, **style)
    _roof(left, compute["work"] / compute["moved"], peaks)
    right.axhline(peaks["memory"] / 1e9, color="black", label=f"measured triad, {peaks['memory'] / 1e9:.0f} GB/s")
    right.set(xscale="log", yscale="log", xlabel="MB read and written", ylabel="GB/s")
    right.legend(loc="lower left")
    return figure


def _component_roofline(kernels: pd.DataFrame, peaks: Mapping[str, float]) -> Figure:
    share = (kernels["of peak"] * kernels["time"]).sum() / kernels["time"].sum()
    title = f"Within the components, the kernels that multiply run at {percent(share)} of the measured peak"
    figure, axes = _figure(3.6, title)
    kernels = kernels[kernels["share"] > 0.005]
    x = kernels["GFLOP/s"] / kernels["GB/s"]
    axes.scatter(x, kernels["GFLOP/s"] / 1e9, s=6 + 220 * kernels["share"], c=kernels["colour"], alpha=0.55)
    _roof(axes, x, peaks)
    axes.set_title("area: share of the component's time, from 0.5 % on", loc="left", fontsize=7)
    return figure


def _kernels(runs: pd.DataFrame) -> Figure:
    longest = runs["kernels"].map(lambda kernels: kernels["share"].max())
    title = f"The longest kernel takes {percent(longest.min())} to {percent(longest.max())} of the time"
    lines = -(-len(runs) // 2)
    figure, panels = _figure(0.5 + 1.2 * lines, title, nrows=lines, ncols=2, squeeze=False)
    for axes, run in zip(panels.flat, runs.itertuples(), strict=False):
        kernels = run.kernels[["share", "time"]]
        others = kernels.iloc[_LONGEST_COUNT:].sum().to_frame(f"{len(kernels) - _LONGEST_COUNT} others").T
        bars = pd.concat([kernels.head(_LONGEST_COUNT), others[others["time"] > 0]])
        names = [
            name if len(name) <= _NAME_LENGTH else f"{name[: _NAME_LENGTH - 12]}…{name[-11:]}" for name in bars.index
        ]
        bar_container = axes.barh(range(len(bars)), bars["share"], tick_label=names, color=COLOURS[run.profiled])
        axes.bar_label(
            bar_container, bars["share"].map(percent) + " · " + bars["time"].map(duration), fontsize=6.5, padding=3
        )
        axes.set_title(run.Index, fontsize=8, weight="bold", loc="left")
        axes.tick_params(axis="y", labelsize=6.5)
        axes.set(xticks=[], xlim=(0, 2 * bars["share"].max()), ylim=(_LONGEST_COUNT + 0.5, -0.6))
    for axes in panels.flat[len(runs) :]:
        axes.set_axis_off()
    return figure


def _peers(runs: pd.DataFrame) -> Figure:
    peers = tables.select_peers(runs)
    names = peers.index.unique()
    wins = (divide_by_ours(peers)["value"] >= 1).sum()
    title = f"Ours is at least as fast in {wins} of {len(peers)} comparisons with peers"
    figure, axes = _figure(1.35 + 0.27 * len(names), title)
    sides = pd.concat([select_side(runs, PYTORCH).loc[names], peers]).groupby("side", sort=False)
    for number, (side, rows) in enumerate(sides):
        y, colour = names.get_indexer(rows.index), f"C{number % 6}"
        style = {"marker": _MARKERS[number % len(_MARKERS)], "s": 34, "edgecolors": colour, "label": side}
        axes.scatter(divide_by_ours(rows)["value"], y, facecolors=np.where(rows["unsound"], "white", colour), **style)
    _name_rows(axes, names, "its time / ours; to the right of the line it is slower (open: fails the parity gate)")
    figure.legend(loc="outside lower center", ncols=6)
    return figure
