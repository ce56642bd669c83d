"""Tables of what was measured, as text for a terminal."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.core.case import Case
from perf.kernels import Group
from perf.shifts import Comparison

Result = Mapping[str, Any]

WIDTH = 160
"""Columns of the tables: the shapes are long."""

KERNELS_SHOWN = 4
"""How many of a component's functions are named."""

STEADY = 1.1
"""Probes before and after a kernel that differ by less are one peak."""

GOALS = (Group.VIT_LINEAR, Group.CONV_3X3, Group.VIT_ATTENTION)
"""Groups whose share of the peak is summed up."""


def kernel_tables(results: Sequence[Result]) -> str:
    """Every kernel, by group and longest first, then the groups that have a goal and what was measured as peak."""
    tables = [_kernels(group, [r for r in results if r["group"] == group]) for group in Group]
    summary = [line for group in GOALS if (line := goal([r for r in results if r["group"] == group]))]
    return text(*[table for table in tables if table.row_count], *summary, _peaks(results))


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


def component_tables(results: Sequence[Result]) -> str:
    """Every side of each case: latency, then what it takes to have it; then where our time goes."""
    named = [(_name(r), r) for r in results]
    return text(
        _latency("components", named),
        _costs("compiling, loading, resident memory, parity", named),
        *[_where_time_goes(name, r) for name, r in named],
        *_absent(named),
        *_settings(named),
        *dict.fromkeys(f"{name}: {r['note']}" for name, r in named if r["note"]),
        circumstances(results),
    )


def _name(result: Result) -> str:
    """The id of a case, and its sample where that is not the main one."""
    return "-".join(filter(None, (Case.from_json(result["case"]).id, result["sample"])))


def end_to_end_table(results: Sequence[Result]) -> str:
    """Every side of each question to the whole model."""
    named = [(f"{r['what']}, {r['case']['scale']}", r) for r in results]
    loads = [
        f"{side} loaded without checksums in {s['unchecked_load_seconds']:.2f} s"
        for side, s in results[0]["sides"].items()
        if "unchecked_load_seconds" in s
    ]
    return text(
        _latency("whole model", named),
        _costs("compiling, loading, resident memory", named[:1]),
        *loads,
        circumstances(results),
    )


def comparison_table(compared: Sequence[Comparison], stored: str) -> str:
    """What became of every side since a stored run; slowdowns of ours once more at the end."""
    table = _table(f"against {stored}", "benchmark", "side", "before ms", "after ms", "time now / then", "interval")
    for name in ("noise", "relative to", ""):
        table.add_column(name, justify="right")
    for c in compared:
        interval = "n/a" if c.shift.high == math.inf else f"{c.shift.low:.3f}–{c.shift.high:.3f}"
        milliseconds = (_digits(c.before * 1e3), _digits(c.after * 1e3))
        shift = (f"{c.shift.ratio:.3f}", interval, f"±{c.shift.noise - 1:.1%}")
        table.add_row(c.case.rpartition("::")[2], c.side, *milliseconds, *shift, c.relative_to, c.shift.change.value)
    slowdowns = [c for c in compared if c.is_slowdown]
    lines = [f"slower: {c.case.rpartition('::')[2]}, {c.side}, {c.shift.ratio:.2f} times the time" for c in slowdowns]
    return text(table, *(lines or ["nothing of ours is slower beyond the noise of both runs"]))


def circumstances(results: Sequence[Result]) -> str:
    """Machine, threads and the peaks that were measured, which belong to every figure."""
    machine = results[0]["machine"]
    where = ", ".join([f"on {results[0]['threads']} threads of {machine['cpu']}", *machine["gpus"]])
    flops, bandwidths = ([r[key] / 1e9 for r in results if key in r] for key in ("peak_flops", "peak_bandwidth"))
    if not flops:
        return where
    peaks = f"{_range(flops)} GFLOP/s of fp32 multiply-adds, {_range(bandwidths)} GB/s, triad"
    return f"{where}; peaks in the same run: {peaks}"


def _latency(title: str, results: Sequence[tuple[str, Result]]) -> Table:
    table = _table(title, "case", "side", "median ms", "min–max", "mean", "p95", "p99", "rounds", "calls/s", "first ms")
    table.add_column("PyTorch / it", justify="right")
    table.add_column("of peak", justify="right")
    for name, r in results:
        torch = r["sides"]["torch"]["median"]
        for number, (side, s) in enumerate(_measured(r)):
            known = r.get("flop") and "peak_flops" in r
            share = f"{r['flop'] / s['median'] / r['peak_flops']:.0%}" if known else "n/a"
            table.add_row(
                name if number == 0 else "",
                side,
                *_timing(s["seconds"]),
                *(_milliseconds(s[key]) for key in ("mean", "p95", "p99")),
                str(len(s["seconds"])),
                _digits(s["throughput"]),
                _milliseconds(s["first_call"]),
                f"{torch / s['median']:.2f}",
                share,
            )
    return table


def _costs(title: str, results: Sequence[tuple[str, Result]]) -> Table:
    table = _table(title, "case", "side", "compile s", "load s", "peak MB", "weights + run", "r_rms", "tolerance")
    table.add_column("verdict", justify="right")
    for name, r in results:
        for number, (side, s) in enumerate(_measured(r)):
            table.add_row(
                name if number == 0 else "",
                side,
                *(_or_none(s.get(key), ".1f") for key in ("compile_seconds", "load_seconds")),
                *_memory(s["memory"]),
                _or_none(s.get("worst_r_rms"), ".2f"),
                _or_none(s.get("required_tolerance"), ".1e"),
                s.get("verdict", ""),
            )
    return table


def _measured(result: Result) -> list[tuple[str, Result]]:
    """The sides that have rounds."""
    return [(side, s) for side, s in result["sides"].items() if "error" not in s]


def _absent(results: Sequence[tuple[str, Result]]) -> list[str]:
    """A line for each side that could not be measured."""
    return [f"{name}, {side}: {s['error']}" for name, r in results for side, s in r["sides"].items() if "error" in s]


def _settings(results: Sequence[tuple[str, Result]]) -> dict[str, None]:
    """A line for each setting of a peer that was measured, and for each type that one chose."""
    return dict.fromkeys(
        f"{side}: {s['setting']}" + (f"; it computed in {s['computes_in']}" if "computes_in" in s else "")
        for _, r in results
        for side, s in _measured(r)
        if "setting" in s
    )


def _where_time_goes(name: str, result: Result) -> str:
    """The functions that take most of a run's time."""
    whole = sum(kernel["seconds"] for kernel in result["kernels"])
    if not whole:
        return f"{name}: no kernel was timed"
    shares = []
    for kernel in result["kernels"][:KERNELS_SHOWN]:
        rate = f", {kernel['flop'] / kernel['seconds'] / 1e9:.0f} GFLOP/s" if kernel["flop"] else ""
        shares.append(f"{kernel['seconds'] / whole:.0%} {kernel['name']} ({kernel['calls']}×{rate})")
    return f"{name}, {result['profiled']}, of {_digits(whole * 1e3)} ms in kernels: {'; '.join(shares)}"


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
    return text(*tables, f"on {results[0]['threads']} threads; added: to the time without rotation")


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
        of_text = number == 0 or column in ("shape", "side")
        table.add_column(column, justify="left" if of_text else "right", no_wrap=True)
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


def _milliseconds(seconds: float | str) -> str:
    return seconds if isinstance(seconds, str) else _digits(seconds * 1e3)


def _or_none(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _range(values: Sequence[float]) -> str:
    """One number, or the smallest and the largest where they differ."""
    low, high = (f"{value:.0f}" for value in (min(values), max(values)))
    return low if low == high else f"{low}–{high}"


def text(*parts: Table | str) -> str:
    """Returns tables and sentences as they stand in a terminal."""
    console = Console(file=io.StringIO(), width=WIDTH, highlight=False)
    for part in parts:
        console.print()
        console.print(part, markup=False, soft_wrap=isinstance(part, str))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
