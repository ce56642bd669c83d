"""The picture of a model of scaling: speed-up over threads, of programs and of their longest kernels."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

from harness.core.files import write_bytes
from harness.verify.report.performance.plots import png
from perf.scaling import THREADS, Distribution, Machine, Program

_COLOURS = ("#1f5fa8", "#d9822b", "#1b9e77", "#a3499f", "#7a4a12", "#86b7e6", "#555555", "#b8860b")
_MARKERS = "os^D"
"""Programs of the same colour differ in their markers."""
_KERNELS = 6
_LINES: Mapping[Distribution, str] = {"dynamic": "-", "static": ":"}


def draw(programs: Mapping[str, Program], machine: Machine, path: Path) -> None:
    """Writes the picture: on the left programs by name, on the right the kernels that take longest of all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 6.0), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        "Speed-up over one thread, replayed; solid: dynamic distribution, dotted: TVM's static", x=0.01, ha="left"
    )
    left, right = figure.subplots(ncols=2, sharey=True)
    kernels: dict[str, Program] = {}
    for program in programs.values():
        kernels |= program.by_function()
    longest = sorted(kernels, key=lambda name: -kernels[name].busy(1))[:_KERNELS]
    for axes, title, shown in (
        (left, "Programs", programs),
        (right, "Longest kernels", {name[:44]: kernels[name] for name in longest}),
    ):
        axes.plot(THREADS, THREADS, color="silver", linewidth=1, label="as many times as threads")
        kinds = itertools.cycle((marker, colour) for marker in _MARKERS for colour in _COLOURS)
        for (name, program), (marker, colour) in zip(shown.items(), kinds, strict=False):
            for how, line in _LINES.items():
                speedups = [program.speedup(threads, machine, how) for threads in THREADS]
                axes.plot(THREADS, speedups, line, color=colour, marker=marker, markersize=3, linewidth=1.2)
            axes.plot([], [], color=colour, marker=marker, markersize=3, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(THREADS, [str(threads) for threads in THREADS])
        axes.set_yticks(THREADS, [str(threads) for threads in THREADS])
        axes.set_xlabel("threads")
        axes.set_title(title)
        axes.legend(frameon=False, fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    left.set_ylabel("speed-up")
    write_bytes(path, png(figure))
