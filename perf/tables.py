"""Tables of what was measured, as text for a terminal."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from perf.kernels import Group

Result = Mapping[str, Any]

WIDTH = 160
"""Columns of the tables: the shapes are long."""

STEADY = 1.1
"""Probes before and after a kernel that differ by less are one peak."""

GOALS = (Group.VIT_LINEAR, Group.CONV_3X3, Group.VIT_ATTENTION)
"""Groups whose share of the peak is summed up."""


def kernel_tables(results: Sequence[Result]) -> str:
    """Every kernel, by group and longest first, then the groups that have a goal and what was measured as peak."""
    tables = [_kernels(group, [r for r in results if r["group"] == group]) for group in Group]
    summary = [line for group in GOALS if (line := goal([r for r in results if r["group"] == group]))]
    return _text(*[table for table in tables if table.row_count], *summary, _peaks(results))


def goal(results: Sequence[Result]) -> str:
    """The share of the peak over several kernels together, each counted by its time; empty without kernels."""
    if not results:
        return ""
    seconds, torch_seconds = (sum(r[key] for r in results) for key in ("tvm_median", "torch_median"))
    # Peaks differ from kernel to kernel with the clock: the time at the peak is what adds up.
    share = sum(r["work"] / r["peak"] for r in results) / seconds
    rate = sum(r["work"] for r in results) / seconds
    return (
        f"{results[0]['group']}, share of peak: {share:.1%} ({len(results)} of its kernels, {rate / 1e9:.0f} GFLOP/s, "
        f"PyTorch's time / ours {torch_seconds / seconds:.2f})"
    )


def component_table(results: Sequence[Result]) -> str:
    """Latency and peak memory of each case."""
    table = _table("components", "case", "TVM ms", "min–max", "PyTorch ms", "min–max", "PyTorch / TVM")
    for name in ("TVM MB", "weights + run", "PyTorch MB", "weights + run"):
        table.add_column(name, justify="right")
    for r in results:
        table.add_row(
            r["case"],
            *_timing(r["tvm_seconds"]),
            *_timing(r["torch_seconds"]),
            f"{r['torch_over_tvm']:.2f}",
            *_memory(r["tvm_memory"]),
            *_memory(r["torch_memory"]),
        )
    return _text(table)


def end_to_end_table(results: Sequence[Result]) -> str:
    """Latency of the whole model, then peak memory and the time to load."""
    table = _table("whole model", "what", "TVM ms", "min–max", "PyTorch ms", "min–max", "PyTorch / TVM")
    lines = []
    for r in results:
        timings = (*_timing(r["tvm_seconds"]), *_timing(r["torch_seconds"]))
        table.add_row(f"{r['what']}, {r['scale']}", *timings, f"{r['torch_over_tvm']:.2f}")
        if r.get("tvm_memory") and r.get("torch_memory"):
            ours, theirs = (r[f"{side}_memory"]["peak_bytes"] for side in ("tvm", "torch"))
            load = r["load_seconds"]
            lines += [
                f"peak memory: {ours / 1e6:.0f} MB, PyTorch {theirs / 1e6:.0f} MB, ratio {ours / theirs:.2f}",
                f"loaded in {load['checked']:.2f} s, without checksums {load['unchecked']:.2f} s",
            ]
    return _text(table, *lines, f"on {results[0]['threads']} threads")


def rope_tables(results: Sequence[Result]) -> str:
    """Every strategy beside PyTorch and beside no rotation, a table for each workload."""
    tables = []
    for workload in dict.fromkeys(r["workload"] for r in results):
        table = _table(workload, "strategy", "ms", "min–max", "PyTorch / it", "added", "min–max", "kernels", "MB moved")
        for r in (r for r in results if r["workload"] == workload):
            counted = (str(r["kernels"]), f"{r['moved'] / 1e6:.1f}") if r["kernels"] is not None else ("n/a", "n/a")
            table.add_row(
                r["side"],
                *_timing(r["seconds"]),
                f"{r['torch_over_side']:.2f}",
                *_added(r["over_unrotated"]),
                *counted,
            )
        tables.append(table)
    return _text(*tables, f"on {results[0]['threads']} threads; added: to the time without rotation")


def _kernels(group: Group, results: Sequence[Result]) -> Table:
    unit = "GB/s" if any(r["bound"] == "memory" for r in results) else "GFLOP/s"
    table = _table(group.value, "kernel", "shape", "TVM ms", "min–max", "PyTorch ms", "min–max", "PyTorch / TVM", unit)
    table.add_column("of peak", justify="right")
    table.add_column("PyTorch's", justify="right")
    for r in sorted(results, key=lambda r: -r["tvm_median"]):
        table.add_row(
            r["kernel"],
            r["shape"],
            *_timing(r["tvm_seconds"]),
            *_timing(r["torch_seconds"]),
            f"{r['torch_over_tvm']:.2f}",
            f"{r['rate'] / 1e9:.1f}",
            _share(r["rate"], r["peaks"]),
            _share(r["torch_rate"], r["peaks"]),
        )
    return table


def _peaks(results: Sequence[Result]) -> str:
    """The median and range of the peaks that were measured beside the kernels."""
    lines = []
    for bound, unit in (("compute", "GFLOP/s of fp32 multiply-adds"), ("memory", "GB/s, triad")):
        peaks = [peak / 1e9 for r in results if r["bound"] == bound for peak in r["peaks"]]
        if peaks:
            median = statistics.median(peaks)
            lines.append(f"{median:.0f} {unit} ({min(peaks):.0f}–{max(peaks):.0f} over {len(peaks)} probes)")
    return f"peak on {results[0]['threads']} threads: {'; '.join(lines)}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < (2 if "shape" in columns else 1) else "right", no_wrap=True)
    return table


def _timing(seconds: Sequence[float]) -> tuple[str, str]:
    """Median and range in milliseconds."""
    values = [_digits(value * 1e3) for value in (statistics.median(seconds), min(seconds), max(seconds))]
    return values[0], f"{values[1]}–{values[2]}"


def _share(rate: float, peaks: Sequence[float]) -> str:
    """Of the median peak; of each where they are far apart, because the machine changed meanwhile."""
    if max(peaks) < STEADY * min(peaks):
        return f"{rate / statistics.median(peaks):.0%}"
    return f"{rate / max(peaks):.0%}–{rate / min(peaks):.0%}"


def _added(over: Result | None) -> tuple[str, str]:
    """Of the medians, and the range over the rounds."""
    if over is None:
        return "n/a", "n/a"
    return f"{over['medians']:+.1%}", f"{over['least']:+.1%}–{over['most']:+.1%}"


def _digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def _memory(measured: Result | None) -> tuple[str, str]:
    """Together, and what it consists of, in MB."""
    if measured is None:
        return "n/a", "n/a"
    weights, run = measured["weights_bytes"] / 1e6, measured["run_bytes"] / 1e6
    return f"{weights + run:.0f}", f"{weights:.0f} + {run:.0f}"


def _text(*parts: Table | str) -> str:
    console = Console(file=io.StringIO(), width=WIDTH, highlight=False)
    for part in parts:
        console.print()
        console.print(part, markup=False, soft_wrap=isinstance(part, str))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
