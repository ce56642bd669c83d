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
"""By a word in the name of a group of kernels."""


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
    """The key of `MARKERS` for a group of kernels.

    Raises:
        ValueError: None of the words is in its name.
    """
    for word in MARKERS:
        if word in group:
            return word
    raise ValueError(f"{group!r} has no marker")


def draw_roofline(axes: Axes, points: Sequence[Point], flops: float, bandwidth: float) -> None:
    """The roof and the points below it.

    Args:
        axes: Where to draw; both scales become logarithmic.
        points: Sides that come first are drawn last, on top.
        flops: Measured arithmetic peak, FLOP/s.
        bandwidth: Measured bandwidth, byte/s.
    """
    intensities = [point.x for point in points]
    ridge = flops / bandwidth
    span = [min(ridge, *intensities) / 1.5, ridge, max(ridge, *intensities) * 1.5]
    axes.plot(span, [min(flops, x * bandwidth) / 1e9 for x in span], color=EDGE, linewidth=1.2)
    axes.text(
        span[2], flops / 1e9 * 1.15, f"measured peak {flops / 1e9:.0f} GFLOP/s", ha="right", va="bottom", fontsize=8
    )
    sides = dict.fromkeys((point.side, point.label) for point in points)
    for side, label in reversed(sides):
        for kind, marker in MARKERS.items():
            chosen = [(p.x, p.rate / 1e9) for p in points if (p.side, p.kind) == (side, kind)]
            if chosen:
                axes.scatter(
                    *zip(*chosen, strict=True),
                    s=22,
                    marker=marker,
                    color=BY_SIDE[side],
                    alpha=0.75,
                    linewidths=0,
                    label=f"{label}, {kind}",
                )
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte that must move at least", ylabel="GFLOP/s")
    axes.set_ylim(bottom=_floor(min(p.rate for p in points) / 1e9), top=flops / 1e9 * 3)
    axes.legend(fontsize=7.5, loc="lower right", frameon=False)
    axes.grid(alpha=0.25, which="major")
    _tell_bandwidth(axes, span[0], bandwidth)


def draw_bandwidth(axes: Axes, points: Sequence[Point], bandwidth: float) -> None:
    """Rates of what memory limits over its size, beside the measured bandwidth.

    Args:
        axes: Where to draw; both scales become logarithmic.
        points: Sides that come first are drawn last, on top.
        bandwidth: Measured, byte/s.
    """
    axes.axhline(bandwidth / 1e9, color=EDGE, linewidth=1.2, label=f"measured triad, {bandwidth / 1e9:.0f} GB/s")
    for side, label in reversed(dict.fromkeys((point.side, point.label) for point in points)):
        chosen = [(point.x / 1e6, point.rate / 1e9) for point in points if point.side == side]
        axes.scatter(*zip(*chosen, strict=True), s=22, color=BY_SIDE[side], alpha=0.75, linewidths=0, label=label)
    axes.set(xscale="log", yscale="log", xlabel="MB read and written", ylabel="GB/s")
    axes.legend(fontsize=7.5, loc="lower left", frameon=False)
    axes.grid(alpha=0.25, which="major")


def _floor(rate: float) -> float:
    return 10 ** math.floor(math.log10(rate))


def _tell_bandwidth(axes: Axes, start: float, bandwidth: float) -> None:
    """Along the slanted line, at its angle on the page once the limits stand."""
    y = start * bandwidth / 1e9
    axes.text(
        start * 1.1,
        y * 1.35,
        f"measured {bandwidth / 1e9:.0f} GB/s",
        rotation=45,
        rotation_mode="anchor",
        transform_rotates_text=True,
        fontsize=8,
    )
