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

from harness.core.errors import HarnessError
from harness.report.performance.plots import draw_rooflines, png
from harness.report.performance.roofline import Point, kind_of
from harness.report.performance.sides import PYTORCH, TUNED

Result = Mapping[str, Any]


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
    compute = [r for r in results if r["bound"] == "compute"]
    memory = [r for r in results if r["bound"] == "memory"]
    flops, bandwidth = (statistics.median(p for r in rs for p in r["peaks"]) for rs in (compute, memory))
    title = f"Kernels of SAM 3 on {results[0]['machine']['cpu']}, {results[0]['threads']} threads, fp32"
    roof = points([(kind_of(r["group"]), r["work"] / r["moved"], r) for r in compute])
    path.write_bytes(png(draw_rooflines(title, roof, points([("", r["moved"], r) for r in memory]), flops, bandwidth)))


def points(places: Sequence[tuple[str, float, Result]]) -> list[Point]:
    """TVM's, on top of PyTorch's; of each kernel its kind, where it is, and its rates."""
    ours = [Point(TUNED, "TVM", kind, x, r["rate"]) for kind, x, r in places]
    return ours + [Point(PYTORCH, "PyTorch", kind, x, r["torch_rate"]) for kind, x, r in places]


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
