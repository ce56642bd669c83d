"""The roofline: rates over operations per byte, below what the machine was measured to do.

Drawn from kernels alone (`perf/test_kernels.py`, PyTorch beside TVM) or from the kernels within the components.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.report.performance.palette import BY_SIDE, EDGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS: Mapping[str, str] = {"linear": "o", "products": "^", "convolutions": "s", "attention": "D"}
"""Markers, by a word in the name of a group of kernels."""


@dataclass(frozen=True)
class Point:
    """A kernel in the plane.

    Attributes:
        side: `torch`, `untuned` or `tuned`.
        label: What the legend calls this side.
        kind: A key of `MARKERS`; it does not matter beside the bandwidth alone.
        x: FLOP per byte that must move at least; beside the bandwidth alone, these bytes.
        rate: FLOP/s or byte/s.
    """

    side: str
    label: str
    kind: str
    x: float
    rate: float


def kind_of(group: str) -> str:
    """Returns the key of `MARKERS` for a group of kernels.

    Raises:
        ValueError: None of the words is in its name.
    """
    for word in MARKERS:
        if word in group:
            return word
    raise ValueError(f"{group!r} has no marker")


def draw_roofline(axes: Axes, points: Sequence[Point], flops: float, bandwidth: float) -> None:
    """Draws the roof and the points below it.

    Args:
        axes: Where to draw; both scales become logarithmic.
        points: Sides that come first are drawn last, on top.
        flops: Measured arithmetic peak, FLOP/s.
        bandwidth: Measured bandwidth, byte/s.
    """
    draw_roof(axes, [point.x for point in points], flops, bandwidth)
    sides = dict.fromkeys((point.side, point.label) for point in points)
    for side, label in reversed(sides):
        for kind, marker in MARKERS.items():
            chosen = [(p.x, p.rate / 1e9) for p in points if (p.side, p.kind) == (side, kind)]
            if chosen:
                x, y = zip(*chosen, strict=True)
                name = f"{label}, {kind}"
                axes.scatter(x, y, s=22, marker=marker, color=BY_SIDE[side], alpha=0.75, linewidths=0, label=name)
    axes.set(xlabel="FLOP per byte that must move at least", ylabel="GFLOP/s")
    axes.set_ylim(*rate_span([point.rate for point in points], flops))
    axes.legend(fontsize=7.5, loc="lower right", frameon=False)
    axes.grid(alpha=0.25, which="major")


def draw_roof(axes: Axes, intensities: Sequence[float], flops: float, bandwidth: float) -> None:
    """Draws the measured limits over these intensities, FLOP per byte; both scales become logarithmic."""
    ridge = flops / bandwidth
    start, end = min(ridge, *intensities) / 1.5, max(ridge, *intensities) * 1.5
    axes.set(xscale="log", yscale="log")
    axes.plot(
        [start, ridge, end], [min(flops, x * bandwidth) / 1e9 for x in (start, ridge, end)], color=EDGE, linewidth=1.2
    )
    # Minimal filtering, which counts as much as a direct convolution, lies above the right end of the roof.
    axes.text(ridge, flops / 1e9 * 1.12, f"measured peak {flops / 1e9:.0f} GFLOP/s", va="bottom", fontsize=8)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    if start < ridge / 8:  # there is room along the slanted line
        x, y = start * 1.1, start * 1.1 * bandwidth / 1e9 * 1.25
        axes.text(
            x,
            y,
            f"measured {bandwidth / 1e9:.0f} GB/s",
            rotation=math.degrees(math.atan2(y, x)),  # of a line y ~ x in the data, turned with it on the page
            rotation_mode="anchor",
            transform_rotates_text=True,
            fontsize=8,
        )


def rate_span(rates: Sequence[float], flops: float) -> tuple[float, float]:
    """Limits of the y axis, GFLOP/s: from the decade of the slowest to well above the peak and the fastest."""
    return 10.0 ** math.floor(math.log10(min(rates) / 1e9)), max(flops, *rates) / 1e9 * 2


def draw_bandwidth(axes: Axes, points: Sequence[Point], bandwidth: float) -> None:
    """Rates of what memory limits over its size, beside the measured bandwidth.

    Args:
        axes: Where to draw; both scales become logarithmic.
        points: Sides that come first are drawn last, on top.
        bandwidth: Measured bandwidth, byte/s.
    """
    axes.axhline(bandwidth / 1e9, color=EDGE, linewidth=1.2, label=f"measured triad, {bandwidth / 1e9:.0f} GB/s")
    for side, label in reversed(dict.fromkeys((point.side, point.label) for point in points)):
        chosen = [(point.x / 1e6, point.rate / 1e9) for point in points if point.side == side]
        x, y = zip(*chosen, strict=True)
        axes.scatter(x, y, s=22, color=BY_SIDE[side], alpha=0.75, linewidths=0, label=label)
    axes.set(xscale="log", yscale="log", xlabel="MB read and written", ylabel="GB/s")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.legend(fontsize=7.5, loc="lower left", frameon=False)
    axes.grid(alpha=0.25, which="major")
