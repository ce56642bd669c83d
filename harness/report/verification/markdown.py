"""Renders the JSON report as Markdown; everything that it shows is in the JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.core.outcome import Stage
from harness.report.template import rendered
from harness.report.verification.document import KERNEL_COLUMNS, number, read_report

_TEMPLATE = Path(__file__).parent / "templates" / "verification_report.md.j2"
_NOT_RUN = "·"
_DASH = "\u2013"


def render(json_path: Path) -> str:
    """Renders the page for a JSON report on disk.

    Raises:
        HarnessError: If the file is not a report.
    """
    return render_report(read_report(json_path))


def render_report(report: Mapping[str, Any]) -> str:
    """Renders the page for a report that is already read; `harness.report.verification.document` has the schema."""
    cases = report["cases"]
    with_seed = len({case["seed"] for case in cases}) > 1

    def title(case: Mapping[str, Any]) -> str:
        return variant(case, with_seed)

    filters = (cell, digits, count, seconds, size, mark, title, first_line, kernels)
    return rendered(
        _TEMPLATE,
        {function.__name__: function for function in filters},
        report=report,
        headline=headline(report["summary"]),
        columns=_distinct(map(title, cases)),
        rows=_matrix(cases, title),
        components={
            name: [case for case in cases if case["component"] == name]
            for name in _distinct(case["component"] for case in cases)
        },
        unexpected=[case for case in cases if case["expected"] is False],
        diagnosed=[case for case in cases if case.get("diagnosis") or case.get("not_diagnosed")],
        known=_known(cases),
        skipped=[case for case in cases if case["expected"] is None],
        seeds=sorted({case["seed"] for case in cases}),
        stages=[stage.value for stage in Stage],
        tables=[case for case in cases if case["outputs"]],
    )


def headline(summary: Mapping[str, Any]) -> str:
    """Says the verdict in one line, with the counts."""
    if not summary["cases"]:
        return "**Nothing was verified:** no case was run."
    if summary["unexpected"]:
        start = f"❌ **{summary['unexpected']} of {_plural(summary['cases'], 'case')} not as expected:**"
    elif not summary["passed"] and not summary["expected_failures"]:
        start = f"⏭ **Nothing was verified: {_plural(summary['cases'], 'case')} skipped:**"
    else:
        start = f"✅ **{_plural(summary['cases'], 'case')}, all as expected:**"
    parts = [f"{summary['passed']} passed"]
    compiled = summary.get("compiled_only", 0)
    for count, words in (
        (summary["expected_failures"], "failed as predicted"),
        (compiled, "compiled and not run"),
        (summary["unavailable"] - compiled, "not available here"),
    ):
        if count:
            parts.append(f"{count} {words}")
    if summary.get("emulated"):
        parts.append(f"{summary['emulated']} emulated on the CPU")
    if summary["outputs"]:
        strict, total = summary.get("strict_outputs", 0), summary["outputs"]
        parts.append(f"{strict} of {_plural(total, 'output')} strict")
    return f"{start} {', '.join(parts)}."


def mark(case: Mapping[str, Any]) -> str:
    """Writes a case in one cell of the matrix: a symbol and a word, never the symbol alone."""
    stopped = f"{case['status'].replace('_', ' ')} ({case['stage']})"
    if case["expected"] is None:
        return "⏭ unavailable" if case["stage"] == Stage.BUILD else "⏭ compiled"
    if not case["expected"]:
        return f"❌ {'unexpected pass' if case['status'] == 'passed' else stopped}"
    if case["status"] != "passed":
        return f"⛔ {stopped}"
    oracle = any(output["verdict"] == "oracle" for output in case["outputs"])
    passed = "🔷 oracle" if oracle else "✅ strict"
    return f"{passed}, emulated" if case.get("emulated") else passed


def kernels(case: Mapping[str, Any]) -> str:
    """Says in a line what the kernels of a GPU case use; empty for other cases."""
    parts = []
    for architecture, rows in case.get("kernels", {}).items():
        named = [dict(zip(KERNEL_COLUMNS, row, strict=True)) for row in rows]
        words = [_plural(len(named), "kernel")]
        if any(kernel["registers"] for kernel in named):
            words.append(f"at most {max(kernel['registers'] or 0 for kernel in named)} registers")
        words.append(f"{max(kernel['shared_bytes'] for kernel in named) / 1024:.3g} KiB shared memory")
        words.append(f"{max(kernel['threads'] or 0 for kernel in named)} threads")
        if any(kernel["buffers"] for kernel in named):
            words.append(f"{max(kernel['buffers'] or 0 for kernel in named)} buffers")
        if any(kernel["spill_bytes"] is not None for kernel in named):
            words.append(f"{sum(bool(kernel['spill_bytes']) for kernel in named)} spill")
        parts.append(f"{architecture}: {', '.join(words)}")
    return " · ".join(parts)


def variant(case: Mapping[str, Any], with_seed: bool = True) -> str:
    """Describes a case without its component, for headings and columns; the seed only where cases differ in it."""
    names = [case["strategy"], case["target"], case["scale"]]
    names += [case[field] for field in ("precision", "frontend") if field in case]
    return " · ".join([*names, f"seed {case['seed']}"] if with_seed else names)


def digits(value: float | str | None) -> str:
    """Writes two to three significant digits: 0.00012345 becomes 1.23e-4; NaN (does not apply) becomes a dash."""
    x = number(value)
    if math.isnan(x):
        return _DASH
    if math.isinf(x):
        return "∞" if x > 0 else "-∞"
    if x == 0:
        return "0"
    if 0.01 <= abs(x) < 999.5:  # from there on three digits would be rounded to four
        return f"{x:.3g}"
    mantissa, exponent = f"{x:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def count(value: int) -> str:
    """Writes an integer with thin spaces: 1327104 becomes 1 327 104."""
    return f"{value:,}".replace(",", "\u202f")


def seconds(value: float | str | None) -> str:
    """Writes a duration in milliseconds, seconds or minutes, whatever reads best."""
    x = number(value)
    if not math.isfinite(x):
        return _DASH
    if x < 1:
        return f"{x * 1000:.0f} ms"
    return f"{x:.1f} s" if x < 60 else f"{int(x // 60)} min {x % 60:.0f} s"


def size(value: int | None) -> str:
    """Writes bytes in binary units; None becomes a dash."""
    if not value:
        return _DASH
    x, units = float(value), ["B", "KiB", "MiB", "GiB", "TiB"]
    while x >= 1000 and len(units) > 1:
        x, units = x / 1024, units[1:]
    return f"{x:.3g} {units[0]}"


def cell(value: object) -> str:
    """Makes text that cannot break a table or a heading: one line, pipes and angle brackets escaped."""
    text = " ".join(str(value).split())
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")


def first_line(text: str, limit: int = 240) -> str:
    """Returns the first line of a message that is not empty, shortened."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _matrix(cases: Sequence[Mapping[str, Any]], title: Callable[[Mapping[str, Any]], str]) -> dict[str, list[str]]:
    """Returns the marks by component, one per column."""
    marks = {(case["component"], title(case)): mark(case) for case in cases}
    columns = _distinct(map(title, cases))
    components = _distinct(case["component"] for case in cases)
    return {name: [marks.get((name, column), _NOT_RUN) for column in columns] for name in components}


def _known(cases: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Groups the cases with known discrepancies by cause."""
    known: dict[str, list[Mapping[str, Any]]] = {}
    for case in cases:
        if case["why"]:
            known.setdefault(case["why"], []).append(case)
    return known


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _plural(number_of: int, noun: str) -> str:
    return f"{number_of} {noun}{'' if number_of == 1 else 's'}"
