"""Computes the tables of the page and the plots from the table of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import binom

from harness.verify.report.performance.reading import LABELS, PYTORCH, TUNED, UNTUNED
from harness.verify.report.verification.wording import size

CONFIDENCE = 0.95
"""Probability that an interval holds the median of the rounds' ratios."""
_IN_FP32 = "kind == 'component' and precision == 'fp32'"
_BACKBONE = f"{_IN_FP32} and subject == 'vision_backbone'"
GOALS = (
    ("every component, PyTorch / TVM untuned", 1.0, 1.8, PYTORCH, UNTUNED, _IN_FP32),
    ("every component, PyTorch / TVM tuned", 1.2, 2.4, PYTORCH, TUNED, _IN_FP32),
    ("`vision_backbone`, OpenVINO in f32 / TVM tuned", 0.95, 1.1, "openvino f32", TUNED, _BACKBONE),
    ("gain of tuning over the default schedules, end to end", 1.0, 1.1, UNTUNED, TUNED, "kind == 'question'"),
)
"""Goals at full scale, on two threads of the project's own kind of machine, in one interleaved run: name, minimum, aim,
keys of the sides whose times are divided and divide, and the query of their rows."""
OWN_SIDES = (PYTORCH, UNTUNED, TUNED)
NA = "n/a"

Write = Callable[[Any], str]


def _or_not_available(write: Write) -> Write:
    return lambda value: NA if pd.isna(value) else write(value)


decimals = _or_not_available(
    lambda value: f"{value:.{max(0, 2 - int(np.floor(np.log10(value))))}f}" if value > 0 else "0"
)
"""Writes three significant digits without an exponent: 0.0123, 4.56, 7890."""
duration = _or_not_available(
    lambda seconds: f"{decimals(seconds)} s" if seconds >= 1 else f"{decimals(seconds * 1e3)} ms"
)
percent = _or_not_available(lambda share: f"{100 * share:.{0 if share >= 0.0995 else 1}f} %")
giga = _or_not_available(lambda value: decimals(value / 1e9))
factor = _or_not_available(lambda ratio: f"{ratio:.{2 if ratio < 9.995 else 1}f}")
"""Writes a ratio: 2.41, 12.3."""
gain = _or_not_available(lambda ratio: f"{100 * (ratio - 1):+.1f} %".replace("-", "−"))
"""Writes a ratio as per cent above 1: +4.2 %."""
text = _or_not_available(str)
WRITERS: Mapping[str, Write] = {
    **dict.fromkeys(("median", "mean", "p95", "p99", "first call", "compile", "load", "time"), duration),
    **dict.fromkeys(("PyTorch", "TVM", "TVM untuned", "TVM tuned", "ours"), duration),
    **dict.fromkeys(("memory: weights", "run above them", "together"), _or_not_available(size)),
    **dict.fromkeys(("calls/s", "worst r_rms"), decimals),
    **dict.fromkeys(("share", "of peak", "PyTorch's, of peak"), percent),
    **dict.fromkeys(("GFLOP/s", "GB/s"), giga),
    **dict.fromkeys(("rounds", "calls", "kernels"), "{:.0f}".format),
    **dict.fromkeys(("middle half", "min–max", "PyTorch / untuned", "PyTorch / tuned", "gain of tuning"), text),
    **dict.fromkeys(("at least", "aim", "aim reached", "GFLOP/s (of peak)", "its time / ours", "rate"), text),
    **dict.fromkeys(("PyTorch: memory", "ours: memory"), _or_not_available(size)),
    "not measured": str,
    "PyTorch / TVM": factor,
}
"""Functions that write numbers, by column; other columns are text."""


def divide_times(numerators: pd.DataFrame, denominators: pd.DataFrame) -> pd.DataFrame:
    """Divides times by those of the rows of the same name in `denominators`.

    Returns:
        A table by name: `value` is the ratio of the medians; the interval from `low` to `high` holds it and, by the
            sign test, the median of the rounds' ratios; both are NaN if rounds are too few or not paired.
    """
    pairs = numerators.merge(denominators, left_index=True, right_index=True)
    return _ratios(pairs["seconds_x"], pairs["seconds_y"])


def divide_by_ours(rows: pd.DataFrame) -> pd.DataFrame:
    """Divides times by those of the best of ours in the same run, see `divide_times`."""
    return _ratios(rows["seconds"], rows["best_seconds"])


def _ratios(numerators: pd.Series, denominators: pd.Series) -> pd.DataFrame:
    rows = []
    for upper, lower in zip(numerators, denominators, strict=True):
        value, low, high = np.median(upper) / np.median(lower), np.nan, np.nan
        outside = int(binom.ppf((1 - CONFIDENCE) / 2, len(upper), 0.5))
        if outside and len(upper) == len(lower):
            low, high = np.sort(upper / lower)[[outside - 1, -outside]]
        rows.append((value, np.minimum(low, value), np.maximum(high, value)))
    return pd.DataFrame(rows, columns=["value", "low", "high"], index=numerators.index, dtype=float)


def format_ratios(ratios: pd.DataFrame, write: Write = factor) -> pd.Series:
    """Writes the table of `divide_times` as texts, intervals in parentheses: 2.41 (2.38–2.46)."""
    dash = "–" if write is factor else " to "
    intervals = (
        "" if pd.isna(row.low) else f" ({write(row.low)}{dash}{write(row.high)})" for row in ratios.itertuples()
    )
    return pd.Series(map(str.__add__, map(write, ratios["value"]), intervals), index=ratios.index, dtype=str)


@dataclass(frozen=True)
class Section:
    """The measurements of one machine with one number of threads; the newest of a figure in two files.

    The sides of PyTorch and ours are of one run. A peer is of the newest run that has it.

    Attributes:
        place: CPU, threads and GPUs.
        machine: Facts about the machine and the installed packages; where two files differ, those of the newer one.
        runs: Rows of the sides of components, then of questions, by name.
        absent: Rows of those that could not be measured.
        kernels: Rows of kernels alone, by their names.
        benchmarks: A row of each benchmark that is shown.
        superseded: A row of each of which other files have newer runs of all sides.
    """

    place: str
    machine: Mapping[str, Any]
    runs: pd.DataFrame
    absent: pd.DataFrame
    kernels: pd.DataFrame
    benchmarks: pd.DataFrame
    superseded: pd.DataFrame


def split_sections(results: pd.DataFrame, order: Sequence[str]) -> list[Section]:
    """Splits the results by machine and number of threads, in the order in which they appear.

    Args:
        results: From `read_results`.
        order: Names of components that come first, in this order.
    """
    figures = results[results["kind"] != "other"]
    return [_build_section(rows, list(order)) for _, rows in figures.groupby("facts", sort=False)]


def _build_section(rows: pd.DataFrame, order: list[str]) -> Section:
    run = ["file", "benchmark"]
    benchmarks = rows.drop_duplicates(run)
    newest = benchmarks.loc[benchmarks.groupby("name", sort=False)["created"].idxmax()]
    is_peer = ~rows["key"].isin(["", *OWN_SIDES])
    peers = rows[is_peer].sort_values("created", kind="stable").drop_duplicates(["name", "key"], keep="last")
    newest_rows = pd.concat([newest[run].merge(rows[~is_peer]), peers])
    visible = newest_rows.drop_duplicates(run)
    newest_rows = newest_rows.set_index("name")
    newest_rows["rank"] = [
        order.index(subject) if subject in order else len(order) for subject in newest_rows["subject"]
    ]
    runs = newest_rows[newest_rows["kind"] != "kernel"].sort_values(["kind", "rank"], kind="stable")
    machine: dict[str, Any] = {}
    for facts in visible.sort_values("created", kind="stable")["machine"]:
        machine |= facts
    return Section(
        newest.loc[newest["created"].idxmax(), "place"],
        machine,
        runs[runs["error"] == ""],
        runs[runs["error"] != ""],
        newest_rows[newest_rows["kind"] == "kernel"].rename_axis("kernel"),
        visible,
        benchmarks[~pd.MultiIndex.from_frame(benchmarks[run]).isin(pd.MultiIndex.from_frame(visible[run]))],
    )


def select_side(runs: pd.DataFrame, key: str) -> pd.DataFrame:
    """Returns the rows of one side."""
    return runs[runs["key"] == key]


def select_own_sides(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of PyTorch and of this project, with the spread of their rounds."""
    rows = runs[runs["key"].isin(OWN_SIDES) & ~runs["copied"]]
    quantiles = [[duration(point) for point in np.quantile(seconds, (0.25, 0.75, 0, 1))] for seconds in rows["seconds"]]
    texts = {
        "middle half": [f"{a} – {b}" for a, b, _, _ in quantiles],
        "min–max": [f"{a} – {b}" for _, _, a, b in quantiles],
    }
    return rows.assign(**texts)


def select_peers(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of the peers, with their times divided by this project's best of the same run."""
    rows = runs[~runs["key"].isin(OWN_SIDES)]
    return rows.assign(
        **{"ours": rows["best_seconds"].map(np.median), "its time / ours": format_ratios(divide_by_ours(rows))}
    )


def compare_peers(peers: pd.DataFrame) -> pd.DataFrame:
    """Arranges the ratios of `select_peers` as a table of components by peers; × marks those that fail the gate."""
    ratios = peers["its time / ours"].str.partition(" ")[0] + peers["unsound"].map({True: " ×", False: ""})
    cells = pd.DataFrame({"side": peers["side"], "ratio": ratios}).set_index("side", append=True)["ratio"]
    table = cells.unstack(fill_value="").loc[peers.index.unique(), peers["side"].unique()]
    return table.rename_axis("component").rename_axis(columns=None)


def collect_rows(section: Section) -> dict[str, pd.DataFrame]:
    """Collects the tables with a row for each side, peer or kernel, by the names of their files."""
    runs, rows = section.runs, {}
    if len(runs):
        measured = ["rounds", "median", "middle half", "min–max", "mean", "p95", "p99", "calls/s"]
        costs = ["first call", "compile", "load", "memory: weights", "run above them", "together"]
        columns = ["side", *measured, *costs, "verdict", "worst r_rms", "file", "benchmark"]
        rows["latency"] = select_own_sides(runs)[columns].rename_axis("name")
    if len(peers := select_peers(runs)):
        measured = ["side", "ours", "median", "its time / ours", "together", "verdict", "worst r_rms"]
        columns = [*measured, "setting", "reason", "file"]
        rows["peers"] = peers[columns].rename_axis("component")
    if len(profiled := select_profiled(runs)):
        columns = ["component", "size", "calls", "time", "share", "GFLOP/s", "of peak", "GB/s"]
        every = [run.kernels.assign(component=run.Index) for run in profiled.itertuples()]
        rows["kernels"] = pd.concat(every)[columns].rename_axis("kernel")
    if len(section.kernels):
        alone = section.kernels.rename(columns={"torch": "PyTorch"})
        alone["PyTorch / TVM"] = alone["PyTorch"] / alone["TVM"]
        rows["kernels_alone"] = alone[["group", "TVM", "PyTorch", "PyTorch / TVM", "file", "benchmark"]]
    return rows


def select_profiled(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the best rows of this project whose kernels were timed."""
    best = runs[runs["best"]]
    return best[[len(kernels) > 0 for kernels in best["kernels"]]]


def judge_goals(section: Section) -> pd.DataFrame:
    """Compares the measurements with the goals."""
    full, rows = section.runs[section.runs["scale"] == "full"], {}
    for goal, minimum, aim, numerator, denominator, query in GOALS:
        runs = (full if len(full) else section.runs).query(query)
        ratios = divide_times(select_side(runs, numerator), select_side(runs, denominator))
        write, format_bound = (gain, gain) if numerator == UNTUNED else (factor, "{:g}".format)
        is_noisy = (ratios["low"] < minimum) & (ratios["high"] >= minimum)
        is_below = (ratios["value"] < minimum) & ~(is_noisy & (write is gain))
        reaches_aim, texts = ratios["value"] >= aim, ratios.index + " " + format_ratios(ratios, write)
        signs = {
            "not measured": ratios.empty,
            "not reached": is_below.any(),
            "within the noise": is_noisy.any(),
        }
        rows[goal] = {
            **{"at least": format_bound(minimum), "aim": format_bound(aim)},
            "result": next((sign for sign, applies in signs.items() if applies), "reached"),
            "aim reached": f"{reaches_aim.sum()} of {len(ratios)}",
            "the least": "" if ratios.empty else texts.iloc[ratios["value"].argmin()],
            "below": ", ".join(texts[is_below]),
            "within the noise": ", ".join(texts[is_noisy]),
            "not measured": len(runs.index.unique().difference(ratios.index)),
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("goal")


def compute_speedups(runs: pd.DataFrame) -> pd.DataFrame:
    """Compares components, or questions, with PyTorch, and their rates with the peak."""
    torch, untuned, tuned = (select_side(runs, key) for key in OWN_SIDES)
    best = runs[runs["best"]]
    rate = best["flop"] / best["median"]
    share = rate / best["peak_flops"]
    gains = format_ratios(divide_times(untuned, tuned), gain).mask(tuned["copied"], "nothing found")
    columns = {
        **{LABELS[key]: side["median"] for key, side in zip(OWN_SIDES, (torch, untuned, tuned), strict=True)},
        "PyTorch / untuned": format_ratios(divide_times(torch, untuned)),
        "PyTorch / tuned": format_ratios(divide_times(torch, tuned)),
        "gain of tuning": gains,
        "GFLOP/s (of peak)": rate.map(giga) + (" (" + share.map(percent) + ")").where(share.notna(), ""),
        "PyTorch: memory": torch["together"],
        "ours: memory": best["together"],
        "worst r_rms": best["worst r_rms"],
    }
    return pd.DataFrame(columns, index=best.index).rename_axis(best["kind"].iloc[0])


def collect_peaks(section: Section) -> dict[str, pd.Series]:
    """Returns all peaks that were measured in the same runs, in FLOP/s (`compute`) and byte/s (`memory`)."""
    best, kernels = section.runs[section.runs["best"]], section.kernels
    component_peaks = {"compute": best["peak_flops"], "memory": best["peak_bandwidth"]}
    kernel_peaks = {
        bound: chain.from_iterable(kernels["peaks"][kernels["bound"] == bound]) for bound in component_peaks
    }
    return {
        bound: pd.Series([*component_peaks[bound].dropna(), *kernel_peaks[bound]], dtype=float)
        for bound in component_peaks
    }


def sum_groups(kernels: pd.DataFrame) -> pd.DataFrame:
    """Adds up kernels measured alone by group, each weighted by its time."""
    # Peaks differ from kernel to kernel with the clock: the time at the peak is what adds up.
    groups = kernels.assign(at_peak=kernels["work"] / kernels["peaks"].map(np.median)).groupby("group", sort=False)
    sums = groups[["work", "at_peak", "TVM", "torch"]].sum()
    columns = {
        "kernels": groups.size(),
        "rate": (sums["work"] / sums["TVM"]).map(giga) + " " + groups["unit"].first(),
        "of peak": sums["at_peak"] / sums["TVM"],
        "PyTorch's, of peak": sums["at_peak"] / sums["torch"],
        "PyTorch / TVM": sums["torch"] / sums["TVM"],
    }
    return pd.DataFrame(columns)


def select_slower(kernels: pd.DataFrame) -> pd.DataFrame:
    """Returns the kernels measured alone that PyTorch computes faster."""
    return kernels[kernels["torch"] < kernels["TVM"]]


def list_files(section: Section) -> pd.DataFrame:
    """Lists the files with the time of their run and the commit that they measured."""
    files = section.benchmarks.drop_duplicates("file").set_index("file")
    return files[["run", "commit"]].rename(columns={"run": "measured"})
