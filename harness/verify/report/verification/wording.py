"""Formats the words and numbers of a report, equally on every page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.compiler.targets import HOST
from harness.core.names import plural
from harness.core.outcome import Stage, VerdictKind
from harness.parity.verdict import MAX_R_RMS, ORACLE_R_RMS
from harness.verify.report.verification.document import KERNEL_COLUMNS
from harness.verify.report.verification.schema import number

NOT_RUN = "·"
"""Text of a matrix cell whose case was not run."""
DASH = "\u2013"
"""Text for a number that does not apply."""
_LONGEST_LINE = 240


@dataclass(frozen=True)
class Headline:
    """The verdict on a run in one line.

    Attributes:
        sign: A symbol; empty if nothing was verified.
        verdict: The verdict in words.
        counts: The counts that the verdict follows from.
    """

    sign: str
    verdict: str
    counts: str


def headline(summary: Mapping[str, Any]) -> Headline:
    """Returns the verdict, with the counts."""
    if not summary["cases"]:
        return Headline("", "Nothing was verified", "no case was run")
    cases = plural(summary["cases"], "case")
    if summary["unexpected"]:
        sign, verdict = "❌", f"{summary['unexpected']} of {cases} not as expected"
    elif not summary["passed"] and not summary["expected_failures"]:
        sign, verdict = "⏭", f"Nothing was verified: {cases} skipped"
    else:
        sign, verdict = "✅", f"{cases}, all as expected"
    compiled = summary.get("compiled_only", 0)
    amounts = {
        "failed as predicted": summary["expected_failures"],
        "compiled and not run": compiled,
        "not available here": summary["unavailable"] - compiled,
        "emulated on the CPU": summary.get("emulated", 0),
    }
    parts = [f"{summary['passed']} passed", *(f"{amount} {label}" for label, amount in amounts.items() if amount)]
    if summary["outputs"]:
        strict, total = summary.get("strict_outputs", 0), summary["outputs"]
        parts.append(f"{strict} of {plural(total, 'output')} strict")
    return Headline(sign, verdict, ", ".join(parts))


def mark(case: Mapping[str, Any]) -> str:
    """Formats a case for one cell of the matrix: a symbol and a word, never the symbol alone."""
    stopped = f"{case['status'].replace('_', ' ')} ({case['stage']})"
    if case["expected"] is None:
        return "⏭ unavailable" if case["stage"] == Stage.BUILD else "⏭ compiled"
    if not case["expected"]:
        return f"❌ unexpected {'pass' if case['status'] == 'passed' else stopped}"
    if case["status"] != "passed":
        return f"⛔ {stopped}"
    oracle = any(output["verdict"] == "oracle" for output in case["outputs"])
    passed = "🔷 oracle" if oracle else "✅ strict"
    return f"{passed}, emulated" if case.get("emulated") else passed


def meaning(case: Mapping[str, Any]) -> str:
    """Returns the meaning of `mark`, for people who do not see its symbol."""
    meanings = {
        "⏭ unavailable": "unavailable: not even compiled",
        "⏭ compiled": "compiled, nothing here runs it",
        "❌": "not as expected",
        "⛔": "failed as predicted",
        "🔷": "passed, some outputs on the float64 oracle",
        "✅": "passed, every output strict",
    }
    return next(text for start, text in meanings.items() if mark(case).startswith(start))


@dataclass(frozen=True)
class WorstRatio:
    """The largest error of a case's outputs against float64, in units of PyTorch's.

    Attributes:
        value: The largest r_rms.
        share: The r_rms that is nearest to the limit of its verdict, divided by that limit.
    """

    value: float
    share: float


def worst_ratio(case: Mapping[str, Any]) -> WorstRatio | None:
    """Returns the worst r_rms of a case; None if no output has one."""
    ratios = [(number(output["r_rms"]), output["verdict"]) for output in case["outputs"]]
    limits = {VerdictKind.ORACLE.value: ORACLE_R_RMS}
    shares = [ratio / limits.get(verdict, MAX_R_RMS) for ratio, verdict in ratios if not math.isnan(ratio)]
    return WorstRatio(worst(case, "r_rms"), max(shares)) if shares else None


def worst(case: Mapping[str, Any], metric: str) -> float:
    """Returns the largest value of a metric among a case's outputs; NaN if no output has one."""
    values = [number(output[metric]) for output in case["outputs"]]
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def kernels(case: Mapping[str, Any]) -> str:
    """Returns the resources of a GPU case's kernels in one line; empty for other cases."""
    parts = []
    for architecture, rows in case.get("kernels", {}).items():
        properties = [dict(zip(KERNEL_COLUMNS, row, strict=True)) for row in rows]
        words = [plural(len(properties), "kernel")]
        if any(kernel["registers"] for kernel in properties):
            words.append(f"at most {max(kernel['registers'] or 0 for kernel in properties)} registers")
        words.append(f"{max(kernel['shared_bytes'] for kernel in properties) / 1024:.3g} KiB shared memory")
        words.append(f"{max(kernel['threads'] or 0 for kernel in properties)} threads")
        if any(kernel["buffers"] for kernel in properties):
            words.append(f"{max(kernel['buffers'] or 0 for kernel in properties)} buffers")
        if any(kernel["spill_bytes"] is not None for kernel in properties):
            words.append(f"{sum(bool(kernel['spill_bytes']) for kernel in properties)} spill")
        parts.append(f"{architecture}: {', '.join(words)}")
    return " · ".join(parts)


def variant(case: Mapping[str, Any], with_seed: bool = True) -> str:
    """Returns a description of a case without its component, for headings and columns, optionally with its seed."""
    names = [case["strategy"], case["target"], case["scale"]]
    names += [case[field] for field in ("precision", "frontend", "weights") if field in case]
    return " · ".join([*names, f"seed {case['seed']}"] if with_seed else names)


def titles(cases: Sequence[Mapping[str, Any]]) -> Callable[[Mapping[str, Any]], str]:
    """Returns the function that describes a case among these, without its component; with seeds if they differ."""
    with_seed = len({case["seed"] for case in cases}) > 1
    return lambda case: variant(case, with_seed)


def digits(value: float | str | None) -> str:
    """Formats two to three significant digits: 0.00012345 becomes 1.23e-4; NaN (does not apply) becomes a dash."""
    x = number(value)
    if math.isnan(x):
        return DASH
    if math.isinf(x):
        return "∞" if x > 0 else "-∞"
    if x == 0:
        return "0"
    if 0.01 <= abs(x) < 999.5:  # larger numbers would be rounded to four digits
        return f"{x:.3g}"
    mantissa, exponent = f"{x:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def count(value: int) -> str:
    """Formats an integer with thin spaces: 1327104 becomes 1 327 104."""
    return f"{value:,}".replace(",", "\u202f")


def seconds(value: float | str | None) -> str:
    """Formats a duration in milliseconds, seconds or minutes, whichever reads best."""
    x = number(value)
    if not math.isfinite(x):
        return DASH
    if x < 1:
        return f"{x * 1000:.0f} ms"
    return f"{x:.1f} s" if x < 60 else f"{int(x // 60)} min {x % 60:.0f} s"


def size(value: int | None) -> str:
    """Formats bytes in binary units; None becomes a dash."""
    if not value:
        return DASH
    x, units = float(value), ["B", "KiB", "MiB", "GiB", "TiB"]
    while x >= 1000 and len(units) > 1:
        x, units = x / 1024, units[1:]
    return f"{x:.3g} {units[0]}"


def first_line(text: str) -> str:
    """Returns the first non-empty line of a message, shortened."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 1]}…"


def fact(key: str, value: Any) -> tuple[str, str]:
    """Formats a fact about the machine: its name in words, and its value."""
    name = key.removesuffix("_bytes").replace("_", " ")
    if key.endswith("bytes"):
        return name, size(value)
    if value is None:
        return name, "no limit" if key == "cgroup_cpus" else "not known"
    return name, " ".join(map(str, value)) if isinstance(value, list) else str(value)


def total_seconds(case: Mapping[str, Any]) -> float:
    """Returns the total time of a case's stages; NaN if none is finished."""
    durations = [number(value) for value in case["seconds"].values()]
    return math.fsum(value for value in durations if math.isfinite(value)) if durations else math.nan


def known_causes(cases: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Groups the cases with known discrepancies by cause."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for case in cases:
        if case["why"]:
            groups.setdefault(case["why"], []).append(case)
    return groups


def place_and_code(source: str) -> tuple[str, str]:
    """Splits a source reference, `file:line in function: code`, with the file relative to the package's folder."""
    place, _, code = source.partition(" in ")
    return place.rpartition("site-packages/")[2], code


def cell(value: object) -> str:
    """Returns text that cannot break a table or a heading of Markdown: one line, with its signs escaped."""
    text = " ".join(str(value).split())
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")


def distinct(names: Iterable[str]) -> list[str]:
    """Returns each name once, in the order of first occurrence."""
    return list(dict.fromkeys(names))


def provenance(report: Mapping[str, Any]) -> str:
    """Returns when and where the report was made, with which versions, in one line."""
    machine, versions = report["machine"], report["versions"]
    place = str(machine.get("cpu") or "")
    place += f", {digits(machine['usable_cpus'])} CPUs" if machine.get("usable_cpus") else ""
    place += f", {size(machine['usable_memory_bytes'])}" if machine.get("usable_memory_bytes") else ""
    place = ", ".join(filter(None, [place, *machine.get("gpus", ())]))
    packages = (("apache-tvm", "TVM"), ("torch", "PyTorch"), ("sam3", "sam3"))
    parts = [report["created"], place.removeprefix(", ")]
    parts += [f"{name} {versions[package]}" for package, name in packages if versions.get(package)]
    seeds = {case["seed"] for case in report["cases"]}
    parts += [f"seed {seed}" for seed in seeds if len(seeds) == 1]
    return " · ".join(part for part in parts if part)


def notes(case: Mapping[str, Any]) -> list[str]:
    """Returns further notes on how a case ran, one or two sentences each."""
    sentences = []
    if device := case.get("device"):
        sent = size(device["sent_bytes"]) if device["sent_bytes"] else "nothing"
        sentences.append(f"Ran on {device['told']}; {sent} had to be sent.")
    if case.get("emulated"):
        sentences.append(
            "Emulated: a program carried out the instructions of AMX one by one, and no matrix unit did."
            if case["target"] == HOST.name
            else "Emulated on the CPU: the GPU's kernels were run and judged here, and no GPU ran them."
        )
    if "precision" in case:
        sentences.append(
            "In half precision: judged by the oracle, and errors are told against upstream under autocast in "
            f"{case['precision']}."
        )
    elif "weights" in case:
        sentences.append(
            "Weights with the outliers of trained ones: strict, or judged by the oracle where PyTorch itself leaves "
            "the strict gate against float64. What one run fails is judged by the usual errors of 17 runs of PyTorch "
            "and, if it still fails, of 17 runs of compiled code as well; the reason says so (docs/weights.md)."
        )
    if usage := kernels(case):
        sentences.append(usage)
    return sentences


FILTERS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(cell, count, digits, first_line, mark, meaning, notes),
        *(number, place_and_code, seconds, size, total_seconds, worst, worst_ratio),
    )
}
"""Functions by name that the templates call to format values."""
