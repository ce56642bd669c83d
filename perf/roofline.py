"""`python -m perf.roofline results.json docs/roofline.png`: draws a run of perf/test_kernels.py.

The run: `pytest perf/test_kernels.py --benchmark-json=results.json`; several runs of parts of it may be given.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import HarnessError

Result = Mapping[str, Any]

SIDES = (("TVM", "#1f5fa8", "rate"), ("PyTorch eager", "#d9822b", "torch_rate"))
"""Label, colour, and where a result has the rate."""
MARKERS = {"linear": "o", "products": "^", "convolutions": "s", "attention": "D"}
"""By a word in a group's name."""


def read_results(paths: Sequence[Path]) -> list[Result]:
    """The kernels in pytest-benchmark's JSON.

    Raises:
        HarnessError: A file is missing or not of pytest-benchmark, or there are not kernels of both kinds.
    """
    results: list[Result] = []
    for path in paths:
        try:
            benchmarks = json.loads(path.read_text(encoding="utf-8"))["benchmarks"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HarnessError(f"{path} is not a JSON file of pytest-benchmark: {error}") from error
        results += [b["extra_info"] for b in benchmarks if "bound" in b.get("extra_info", {})]
    if {result["bound"] for result in results} != {"compute", "memory"}:
        names = ", ".join(map(str, paths))
        raise HarnessError(
            f"{names} lacks kernels: write it with pytest perf/test_kernels.py --benchmark-json={paths[0]}"
        )
    return results


def draw(results: Sequence[Result], path: Path) -> None:
    """Writes the picture: the roofline with products, convolutions and attention; the rest against the bandwidth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    compute = [r for r in results if r["bound"] == "compute"]
    memory = [r for r in results if r["bound"] == "memory"]
    flops, bandwidth = (statistics.median(p for r in rs for p in r["peaks"]) for rs in (compute, memory))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5.5), width_ratios=(3, 2), layout="constrained")
    _roofline(left, compute, flops, bandwidth)
    _bandwidth(right, memory, bandwidth)
    machine = results[0]["machine"]
    figure.suptitle(f"Kernels of SAM 3 on {machine['cpu']}, {results[0]['threads']} threads, fp32", fontsize=11)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _roofline(axes: Any, results: Sequence[Result], flops: float, bandwidth: float) -> None:
    intensities = [r["work"] / r["moved"] for r in results]
    ridge = flops / bandwidth
    span = [min(ridge, *intensities) / 1.5, ridge, max(ridge, *intensities) * 1.5]
    axes.plot(span, [min(flops, x * bandwidth) / 1e9 for x in span], color="black", linewidth=1.2)
    axes.text(span[2], flops / 1e9 * 1.15, f"{flops / 1e9:.0f} GFLOP/s", ha="right", va="bottom", fontsize=9)
    style = {"rotation": 38, "rotation_mode": "anchor", "fontsize": 9}
    axes.text(span[0], span[0] * bandwidth / 1e9 * 1.3, f"{bandwidth / 1e9:.0f} GB/s, triad", **style)
    for label, colour, rate in reversed(SIDES):
        for word, marker in MARKERS.items():
            chosen = [(x, r[rate] / 1e9) for x, r in zip(intensities, results, strict=True) if _kind(r) == word]
            if chosen:
                axes.scatter(
                    *zip(*chosen, strict=True),
                    s=26,
                    marker=marker,
                    color=colour,
                    alpha=0.75,
                    linewidths=0,
                    label=f"{label}, {word}",
                )
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte that must move at least", ylabel="GFLOP/s")
    axes.set_title("Products, convolutions, attention", fontsize=10)
    axes.set_ylim(top=flops / 1e9 * 3)
    axes.legend(fontsize=8, loc="lower right", frameon=False)
    axes.grid(alpha=0.25, which="major")


def _bandwidth(axes: Any, results: Sequence[Result], bandwidth: float) -> None:
    axes.axhline(bandwidth / 1e9, color="black", linewidth=1.2, label=f"triad, {bandwidth / 1e9:.0f} GB/s")
    moved = [r["moved"] / 1e6 for r in results]
    for label, colour, rate in reversed(SIDES):
        axes.scatter(moved, [r[rate] / 1e9 for r in results], s=26, color=colour, alpha=0.75, linewidths=0, label=label)
    axes.set(xscale="log", yscale="log", xlabel="MB read and written", ylabel="GB/s")
    axes.set_title("Normalization, elementwise, data movement", fontsize=10)
    axes.legend(fontsize=8, loc="lower left", frameon=False)
    axes.grid(alpha=0.25, which="major")


def _kind(result: Result) -> str:
    return next(word for word in MARKERS if word in result["group"])


def main(arguments: Sequence[str]) -> int:
    """Takes the JSON files and the picture; returns the exit status."""
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    *sources, picture = map(Path, arguments)
    try:
        draw(read_results(sources), picture)
    except HarnessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
