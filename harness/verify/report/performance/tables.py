"""Computes what the page and the plots show from the table that was read."""

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
"""At full scale, on two threads of the project's own kind of machine, in one interleaved run: the goal, the least and
the aim, the sides whose times are above and below the line, and which rows it is for."""
OWN = (PYTORCH, UNTUNED, TUNED)
NA = "n/a"

Write = Callable[[Any], str]


def _or_na(write: Write) -> Write:
    return lambda value: NA if pd.isna(value) else write(value)


decimals = _or_na(lambda value: f"{value:.{max(0, 2 - int(np.floor(np.log10(value))))}f}" if value > 0 else "0")
"""Writes three significant digits without an exponent: 0.0123, 4.56, 7890."""
duration = _or_na(lambda seconds: f"{decimals(seconds)} s" if seconds >= 1 else f"{decimals(seconds * 1e3)} ms")
percent = _or_na(lambda share: f"{100 * share:.{0 if share >= 0.0995 else 1}f} %")
giga = _or_na(lambda value: decimals(value / 1e9))
factor = _or_na(lambda ratio: f"{ratio:.{2 if ratio < 9.995 else 1}f}")
"""Writes a ratio: 2.41, 12.3."""
gain = _or_na(lambda ratio: f"{100 * (ratio - 1):+.1f} %".replace("-", "−"))
"""Writes a ratio as per cent above 1: +4.2 %."""
text = _or_na(str)
WRITERS: Mapping[str, Write] = {
    **dict.fromkeys(("median", "mean", "p95", "p99", "first call", "compile", "load", "time"), duration),
    **dict.fromkeys(("PyTorch", "TVM", "TVM untuned", "TVM tuned", "ours"), duration),
    **dict.fromkeys(("memory: weights", "run above them", "together"), _or_na(size)),
    **dict.fromkeys(("calls/s", "worst r_rms"), decimals),
    **dict.fromkeys(("share", "of peak", "PyTorch's, of peak"), percent),
    **dict.fromkeys(("GFLOP/s", "GB/s"), giga),
    **dict.fromkeys(("rounds", "calls", "kernels"), "{:.0f}".format),
    **dict.fromkeys(("middle half", "min–max", "PyTorch / untuned", "PyTorch / tuned", "gain of tuning"), text),
    **dict.fromkeys(("at least", "aim", "aim reached", "GFLOP/s (of peak)", "its time / ours", "rate"), text),
    "PyTorch / TVM": factor,
}
"""How numbers are written, by column; other columns are text."""


def ratios(over: pd.DataFrame, under: pd.DataFrame) -> pd.DataFrame:
    """Divides times by those of the rows of the same name in `under`.

    Returns:
        A table by name: `value` is the ratio of the medians, and between `low` and `high` are that and, as the sign
        test has it, the median of the rounds' ratios; both are NaN where rounds are too few or no pairs.
    """
    pairs, rows = over.merge(under, left_index=True, right_index=True), []
    for a, b, upper, lower in pairs[["median_x", "median_y", "seconds_x", "seconds_y"]].itertuples(index=False):
        low, high = np.nan, np.nan
        outside = int(binom.ppf((1 - CONFIDENCE) / 2, len(upper), 0.5))
        if outside and len(upper) == len(lower):
            low, high = np.sort(upper / lower)[[outside - 1, -outside]]
        rows.append((a / b, np.minimum(low, a / b), np.maximum(high, a / b)))
    return pd.DataFrame(rows, columns=["value", "low", "high"], index=pairs.index, dtype=float)


def written(found: pd.DataFrame, write: Write = factor) -> pd.Series:
    """Writes what `ratios` returns, intervals in parentheses: 2.41 (2.38–2.46)."""
    to = "–" if write is factor else " to "
    intervals = ("" if pd.isna(row.low) else f" ({write(row.low)}{to}{write(row.high)})" for row in found.itertuples())
    return pd.Series(map(str.__add__, map(write, found["value"]), intervals), index=found.index, dtype=str)


@dataclass(frozen=True)
class Section:
    """Everything that one machine measured with one number of threads; where two files have a figure, the newer one.

    Attributes:
        place: CPU, threads and GPUs.
        machine: Facts about the machine and the installed packages; where two files differ, those of the newer one.
        runs: Rows of the sides of components, then of questions, by name.
        absent: Rows of those that could not be measured.
        kernels: Rows of kernels alone, by their names.
        benchmarks: A row of each benchmark that is shown.
        superseded: A row of each of which another file has a newer run.
    """

    place: str
    machine: Mapping[str, Any]
    runs: pd.DataFrame
    absent: pd.DataFrame
    kernels: pd.DataFrame
    benchmarks: pd.DataFrame
    superseded: pd.DataFrame


def sections(results: pd.DataFrame, order: Sequence[str]) -> list[Section]:
    """Divides what was read by machine and number of threads, in the order in which they appear.

    Args:
        results: From `read_results`.
        order: Names of components that come first, in this order.
    """
    figures = results[results["kind"] != "other"]
    return [_section(found, list(order)) for _, found in figures.groupby("facts", sort=False)]


def _section(found: pd.DataFrame, order: list[str]) -> Section:
    every = found.drop_duplicates(["file", "benchmark"])
    newest = every.loc[every.groupby("name", sort=False)["created"].idxmax()]
    shown = newest[["file", "benchmark"]].merge(found).set_index("name")
    shown["rank"] = [order.index(subject) if subject in order else len(order) for subject in shown["subject"]]
    runs = shown[shown["kind"] != "kernel"].sort_values(["kind", "rank"], kind="stable")
    machine: dict[str, Any] = {}
    for known in newest.sort_values("created", kind="stable")["machine"]:
        machine |= known
    return Section(
        newest.loc[newest["created"].idxmax(), "place"],
        machine,
        runs[runs["error"] == ""],
        runs[runs["error"] != ""],
        shown[shown["kind"] == "kernel"].rename_axis("kernel"),
        newest,
        every.drop(newest.index),
    )


def of_side(runs: pd.DataFrame, key: str) -> pd.DataFrame:
    """Returns the rows of one side."""
    return runs[runs["key"] == key]


def own(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of PyTorch and ours, with the spread of their rounds."""
    found = runs[runs["key"].isin(OWN) & ~runs["copied"]]
    spread = [[duration(point) for point in np.quantile(seconds, (0.25, 0.75, 0, 1))] for seconds in found["seconds"]]
    texts = {"middle half": [f"{a} – {b}" for a, b, _, _ in spread], "min–max": [f"{a} – {b}" for _, _, a, b in spread]}
    return found.assign(**texts)


def peers(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of what else could run the model, beside the best of ours."""
    found, best = runs[~runs["key"].isin(OWN)], runs[runs["best"]]
    return found.assign(**{"ours": best["median"][found.index].array, "its time / ours": written(ratios(found, best))})


def profiled(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of ours whose kernels were timed."""
    best = runs[runs["best"]]
    return best[[len(kernels) > 0 for kernels in best["kernels"]]]


def goals(section: Section) -> pd.DataFrame:
    """Holds what was measured to the goals."""
    full, rows = section.runs[section.runs["scale"] == "full"], {}
    for goal, least, aim, over, under, query in GOALS:
        runs = (full if len(full) else section.runs).query(query)
        found = ratios(of_side(runs, over), of_side(runs, under))
        write, bar = (gain, gain) if over == UNTUNED else (factor, "{:g}".format)
        noisy = (found["low"] < least) & (found["high"] >= least)
        below = (found["value"] < least) & ~(noisy & (write is gain))
        aimed, texts = found["value"] >= aim, found.index + " " + written(found, write)
        signs = {"⏭ not measured": found.empty, "❌ not reached": below.any(), "❔ within the noise": noisy.any()}
        rows[goal] = {
            **{"at least": bar(least), "aim": bar(aim)},
            "": next((sign for sign, holds in signs.items() if holds), "✅ reached"),
            "aim reached": f"{aimed.sum()} of {len(found)}",
            "the least": "" if found.empty else texts.iloc[found["value"].argmin()],
            "below": ", ".join(texts[below]),
            "within the noise": ", ".join(texts[noisy]),
            "not measured": ", ".join(runs.index.unique().difference(found.index, sort=False)),
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("goal")


def speedups(runs: pd.DataFrame) -> pd.DataFrame:
    """Sets components, or questions, beside PyTorch and what ours computes in a second beside the peak."""
    torch, untuned, tuned = (of_side(runs, key) for key in OWN)
    best = runs[runs["best"]]
    rate = best["flop"] / best["median"]
    share = rate / best["peak_flops"]
    gained = written(ratios(untuned, tuned), gain).mask(tuned["copied"], "nothing found")
    columns = {
        **{LABELS[key]: side["median"] for key, side in zip(OWN, (torch, untuned, tuned), strict=True)},
        "PyTorch / untuned": written(ratios(torch, untuned)),
        "PyTorch / tuned": written(ratios(torch, tuned)),
        "gain of tuning": gained,
        "GFLOP/s (of peak)": rate.map(giga) + (" (" + share.map(percent) + ")").where(share.notna(), ""),
        "worst r_rms": best["worst r_rms"],
    }
    return pd.DataFrame(columns, index=best.index).rename_axis(best["kind"].iloc[0])


def peaks(section: Section) -> dict[str, pd.Series]:
    """Returns all that was probed beside the figures, FLOP/s (`compute`) and byte/s (`memory`)."""
    best, kernels = section.runs[section.runs["best"]], section.kernels
    probed = {"compute": best["peak_flops"], "memory": best["peak_bandwidth"]}
    alone = {bound: chain.from_iterable(kernels["peaks"][kernels["bound"] == bound]) for bound in probed}
    return {bound: pd.Series([*probed[bound].dropna(), *alone[bound]], dtype=float) for bound in probed}


def groups(kernels: pd.DataFrame) -> pd.DataFrame:
    """Adds up kernels alone by group, each counted by its time."""
    # Peaks differ from kernel to kernel with the clock: the time at the peak is what adds up.
    timed = kernels.assign(at_peak=kernels["work"] / kernels["peaks"].map(np.median)).groupby("group", sort=False)
    sums = timed[["work", "at_peak", "TVM", "torch"]].sum()
    columns = {
        "kernels": timed.size(),
        "rate": (sums["work"] / sums["TVM"]).map(giga) + " " + timed["unit"].first(),
        "of peak": sums["at_peak"] / sums["TVM"],
        "PyTorch's, of peak": sums["at_peak"] / sums["torch"],
        "PyTorch / TVM": sums["torch"] / sums["TVM"],
    }
    return pd.DataFrame(columns)


def slower(kernels: pd.DataFrame) -> pd.DataFrame:
    """Returns the kernels alone that PyTorch does faster, the worst first."""
    found = kernels.rename(columns={"torch": "PyTorch"})
    found["PyTorch / TVM"] = found["PyTorch"] / found["TVM"]
    return found[found["PyTorch / TVM"] < 1].sort_values("PyTorch / TVM")


def facts(section: Section) -> pd.DataFrame:
    """Lists what is known of machine, packages and commits."""
    rows = {
        key: size(value) if key.endswith("_bytes") else " ".join(map(str, value)) if isinstance(value, list) else value
        for key, value in section.machine.items()
    }
    commits = section.benchmarks.drop_duplicates("file").set_index("file")["commit"]
    rows |= {f"commit of {file}": commit for file, commit in commits.items() if commit}
    return pd.DataFrame({"": rows}).rename_axis("")
