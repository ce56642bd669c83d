"""Reads JSON files of `pytest perf … --benchmark-json=FILE` into one table, whose columns have the page's titles."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from harness.core.case import DEFAULT_FRONTEND, DEFAULT_STRATEGY, Case, Scale, Weights
from harness.core.errors import HarnessError
from harness.core.names import plural
from harness.core.outcome import VerdictKind
from harness.core.precision import DEFAULT_PRECISION

PYTORCH, UNTUNED, TUNED = "torch", "untuned", "tuned"
LABELS: Mapping[str, str] = {
    PYTORCH: "PyTorch",
    UNTUNED: "TVM untuned",
    TUNED: "TVM tuned",
    "tvm default": "TVM default",
    "tvm fp32": "TVM fp32",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "openvino f32": "OpenVINO f32",
    "torch bf16": "PyTorch bf16",
    "torch cuda": "PyTorch on the GPU",
    "torch.compile cuda": "torch.compile on the GPU",
    "torch cuda fp16": "PyTorch fp16 on the GPU",
    "torch cuda bf16": "PyTorch bf16 on the GPU",
}
"""Labels of the sides; a side without a label is shown by its key."""
UNITS = {"compute": "GFLOP/s", "memory": "GB/s"}
"""Units of rates, by the bound of a kernel."""
PERCENTILES = {"p95": (0.95, 20), "p99": (0.99, 100)}
"""Percentiles, each with the least number of rounds."""

_DEFAULT_PARTS = {
    "",
    "end_to_end",
    "llvm",
    Scale.FULL,
    Weights.SEEDED,
    DEFAULT_STRATEGY,
    DEFAULT_PRECISION,
    DEFAULT_FRONTEND,
}
"""Parts of a case that a name leaves out."""
_EMPTY_ROW: Mapping[str, Any] = {
    **dict.fromkeys(("facts", "name", "subject", "scale", "precision", "key", "error", "setting", "bound"), ""),
    **dict.fromkeys(("best", "copied", "unsound"), False),
    **dict.fromkeys(("seconds", "best_seconds", "median", "peak_flops", "peak_bandwidth", "peaks", "kernels"), np.nan),
}
"""Values of the columns that do not apply to a row."""
_ADVICE = "write it with `pytest perf/test_components.py --benchmark-json=FILE`"
_MACHINE_KEYS = ("cpu", "features", "usable_cpus", "memory_bytes")
"""Facts that identify a machine, together with the number of threads."""


def read_json(path: Path) -> dict[str, Any]:
    """Reads a file of pytest-benchmark, plain or compressed by gzip.

    Raises:
        HarnessError: The file is missing, cut off or of another kind.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise HarnessError(f"Cannot read the results {path}: {error.strerror or error}; {_ADVICE}.") from error
    try:
        data = json.loads(gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content)
    except (EOFError, OSError, RecursionError, ValueError, zlib.error) as error:
        raise HarnessError(f"{path} is cut off or not JSON ({error}); {_ADVICE}.") from error
    if not isinstance(data, dict) or not isinstance(data.get("benchmarks"), list):
        raise HarnessError(f"{path} is not a JSON file of pytest-benchmark: it has no list `benchmarks`; {_ADVICE}.")
    return data


def read_results(paths: Sequence[Path]) -> pd.DataFrame:
    """Reads all files into a table with a row for each side of each benchmark, in the order given.

    `kind` is `component`, `question` (to the whole model), `kernel` (alone, in one row) or `other`, without
    figures; `name` is the subject with the parts of its case that are no defaults. Times are seconds of one call:
    `seconds` holds the rounds, `best_seconds` those of the best of ours, and `torch` is PyTorch's median. A side that
    could not be measured has the reason in `error`. The row of the `best` of ours has a table of the kernels in it.
    Where tuning changed nothing, the tuned side is `copied` from the untuned one.

    Raises:
        HarnessError: A file cannot be read, is in another layout, mixes machines, or has the name of another file.
    """
    duplicates = [path.name for path in paths if [other.name for other in paths].count(path.name) > 1]
    if duplicates:
        raise HarnessError(f"Two results are called {duplicates[0]}: every figure names its file, so rename one.")
    return pd.concat(map(_read_file, paths), ignore_index=True)


def _read_file(path: Path) -> pd.DataFrame:
    data, rows = read_json(path), []
    for number, benchmark in enumerate(data["benchmarks"], 1):
        try:
            rows += _benchmark_rows(benchmark["name"], benchmark.get("extra_info", {}))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reasons = {KeyError: f"it has no {error}", ValueError: f"{error}"}
            reason = reasons.get(type(error), "a value is of another type")
            location = f"{path} is not in this version's layout, in its benchmark {number}"
            raise HarnessError(f"{location}: {reason}; {_ADVICE}.") from error
    table = pd.DataFrame(rows)
    machines = {row["facts"] for row in rows} - {""}
    if not machines:
        kinds = "perf/test_components.py, perf/test_end_to_end.py or perf/test_kernels.py"
        raise HarnessError(f"{path} holds no benchmark of {kinds}; {_ADVICE}.")
    if len(machines) > 1:
        raise HarnessError(f"{path} mixes machines or numbers of threads, and a run has one: give a file for each.")
    try:
        created, commit = pd.to_datetime(data["datetime"], utc=True), data.get("commit_info") or {}
        run = created.strftime("%Y-%m-%d %H:%M UTC")
        table["commit"] = str(commit.get("id") or "")[:12] + (" (changed)" if commit.get("dirty") else "")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise HarnessError(f"{path} does not say when it was measured, and of which commit; {_ADVICE}.") from error
    return table.assign(file=path.name, created=created, run=run)


def _benchmark_rows(benchmark: str, extra: Mapping[str, Any]) -> list[dict[str, Any]]:
    row: dict[str, Any] = {**_EMPTY_ROW, "benchmark": benchmark, "kind": "other"}
    if "bound" in extra:
        return [row | _machine_columns(extra) | _kernel_columns(extra)]
    return _side_rows(row | _machine_columns(extra), extra) if isinstance(extra.get("sides"), dict) else [row]


def _machine_columns(extra: Mapping[str, Any]) -> dict[str, Any]:
    machine, threads = extra["machine"], int(extra["threads"])
    return {
        "machine": machine | (extra.get("versions") or {}),
        "facts": repr([*map(machine.get, _MACHINE_KEYS), threads]),
        "place": ", ".join([str(machine.get("cpu")), plural(threads, "thread"), *machine.get("gpus", [])]),
    }


def _kernel_columns(extra: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kind": "kernel",
        "name": f"{extra['kernel']} {extra['shape']}",
        "group": extra["group"],
        "bound": extra["bound"],
        "unit": UNITS[extra["bound"]],
        "peaks": _positive(extra, "peaks"),
        "work": float(extra["work"]),
        "moved": float(extra["moved"]),
        "TVM": np.median(_positive(extra, "tvm_seconds")),
        "torch": np.median(_positive(extra, "torch_seconds")),
    }


def _side_rows(row: Mapping[str, Any], extra: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each side of a benchmark, with the columns of all of them."""
    if not isinstance(extra["case"], dict):
        raise ValueError("its `case` is no object with the fields of a case")
    case, sides, question = Case.from_json(extra["case"]), extra["sides"], str(extra.get("what", ""))
    details = [question and case.component, case.strategy, case.target, case.scale, case.precision, case.frontend]
    details += [case.weights, f"seed {case.seed}" if case.seed else "", str(extra.get("sample", ""))]
    detail, subject = " · ".join(part for part in details if part not in _DEFAULT_PARTS), question or case.component
    best = next((key for key in (TUNED, UNTUNED) if "seconds" in sides.get(key, {})), None)
    if best is None or "seconds" not in sides.get(PYTORCH, {}):
        raise ValueError(f"it lacks the side `{PYTORCH}` or both `{UNTUNED}` and `{TUNED}`")
    common = {
        **row,
        "kind": "question" if question else "component",
        "name": f"{subject} ({detail})" if detail else subject,
        "subject": subject,
        "scale": str(case.scale),
        "precision": case.precision,
        **{key: _number(extra, key) for key in ("flop", "peak_flops", "peak_bandwidth")},
        "torch": np.median(_positive(sides[PYTORCH], "seconds")),
        "best_seconds": _positive(sides[best], "seconds"),
        "profiled": best,
    }
    rows = {key: common | _side_columns(key, side) for key, side in sides.items()}
    rows[best] |= {"best": True, "kernels": _kernel_table(extra)}
    if extra.get("note") and TUNED not in rows:
        tuned = rows[UNTUNED] | {"key": TUNED, "side": LABELS[TUNED], "copied": True}
        rows[UNTUNED]["best"] = False
        return [rows.pop(PYTORCH), rows.pop(UNTUNED), tuned, *rows.values()]
    return list(rows.values())


def _side_columns(key: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"key": key, "side": LABELS.get(key, key)}
    precision_note = f"it computed in {figures['computes_in']}" if "computes_in" in figures else ""
    row["setting"] = "; ".join(filter(None, (figures.get("setting"), precision_note)))
    if "error" in figures:
        return row | {"error": str(figures["error"])}
    seconds, memory = _positive(figures, "seconds"), figures.get("memory") or {}
    for name, (share, least_rounds) in PERCENTILES.items():
        row[name] = np.quantile(seconds, share, method="inverted_cdf") if len(seconds) >= least_rounds else np.nan
    return row | {
        "seconds": seconds,
        **{"rounds": len(seconds), "median": np.median(seconds), "mean": seconds.mean(), "calls/s": 1 / seconds.mean()},
        "first call": _number(figures, "first_call"),
        "compile": _number(figures, "compile_seconds"),
        "load": _number(figures, "load_seconds"),
        "memory: weights": _number(memory, "weights_bytes"),
        "run above them": _number(memory, "run_bytes"),
        "together": _number(memory, "peak_bytes"),
        "verdict": figures.get("verdict") or "n/a",
        "unsound": figures.get("verdict") in (VerdictKind.FAILED, VerdictKind.NOT_JUDGEABLE),
        "reason": figures.get("reason") or figures.get("verdict") or "",
        "worst r_rms": _number(figures, "worst_r_rms"),
    }


def _kernel_table(extra: Mapping[str, Any]) -> pd.DataFrame:
    """Returns the kernels of a component, longest first; those of one name are added up."""
    columns = {"name": "str", "size": "str", "calls": int, "seconds": float, "flop": float, "bytes": float}
    calls = pd.DataFrame(extra.get("kernels") or [], columns=list(columns)).fillna({"size": ""}).astype(columns)
    table = calls.groupby("name").agg({"size": "first", "calls": "sum", "seconds": "sum"}).rename_axis("kernel")
    amounts = calls.groupby("name")[["flop", "bytes"]].sum(skipna=False).replace(0, np.nan)
    table = table.rename(columns={"seconds": "time"})
    table["share"] = table["time"] / table["time"].sum()
    table["GFLOP/s"] = amounts["flop"] / table["time"]
    table["of peak"] = table["GFLOP/s"] / _number(extra, "peak_flops")
    table["GB/s"] = amounts["bytes"] / table["time"]
    return table.sort_values("time", ascending=False, kind="stable")


def _positive(values_by_key: Mapping[str, Any], key: str) -> np.ndarray[Any, Any]:
    values = np.asarray(values_by_key[key], float)
    if values.ndim != 1 or not len(values) or not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"its `{key}` are not positive numbers")
    return values


def _number(values_by_key: Mapping[str, Any], key: str) -> float:
    value = values_by_key.get(key)
    return np.nan if value in (None, "n/a") else float(value)
