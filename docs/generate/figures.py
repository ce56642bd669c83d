"""Fills the figures that are marked in the front page and the guides, and finds those that are not.

A mark names a table of docs/evidence/performance, a row, a side of it and a column; a table ends with the number of its
machine on the page:

    <!-- figure: latency-1; photo and text; TVM untuned; median -->12.8 s<!-- end -->

The table `verification` is of the verification report, and `cases` counts those that a command runs:

    <!-- figure: verification; strict_outputs; value -->835<!-- end -->
    <!-- figure: cases; make verify; value -->34<!-- end -->

A figure without a mark is allowed in a section that says `measured on DATE on MACHINE`, with DATE as 2026-11-26,
and on a line with `<!-- no measurement -->`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from harness.models.registry import subjects
from harness.models.selection import select
from harness.verify.report.verification.document import read_report

DOCS = Path(__file__).resolve().parents[1]
FRONT_PAGE = DOCS.parent / "README.md"
TABLES = DOCS / "evidence" / "performance"
VERIFICATION = DOCS / "evidence" / "verification_report.json"
GENERATED = ("evidence", "reference")
"""Folders whose pages are data themselves, or a log."""

_MARK = re.compile(r"<!-- figure: (?P<key>[^>]*?) -->(?P<value>.*?)<!-- end -->", re.DOTALL)
_FIGURE = re.compile(
    r"(?<![\w.])\d[\d.,]*[ \u00a0]?(?:ms|s|minutes|hours|MB|MiB|GB|GiB|GB/s|GFLOP/s|TFLOP/s|[x×](?! ?\d))(?![\w/])"
)
_MEASURED = re.compile(r"measured (?:on|at) \d{4}-\d{2}-\d{2} on ", re.IGNORECASE)
CODE = re.compile(r"^```.*?^```$|^ {4}.*?$|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def guides() -> list[Path]:
    """Returns the pages that people write."""
    pages = [path for path in sorted(DOCS.rglob("*.md")) if path.relative_to(DOCS).parts[0] not in GENERATED]
    return [FRONT_PAGE, *pages]


def filled(text: str) -> str:
    """Returns a page with the figures that its marks name.

    Raises:
        LookupError: A mark names no figure.
    """
    return _MARK.sub(lambda mark: f"<!-- figure: {mark['key']} -->{_value(mark['key'])}<!-- end -->", text)


def unmarked(text: str) -> Iterator[str]:
    """Yields the figures of a page that have no mark, in sections that do not say when and where they were measured."""
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        if _MEASURED.search(" ".join(section.split())):
            continue
        for line in CODE.sub("", _MARK.sub("", section)).splitlines():
            if "<!-- no measurement -->" not in line:
                yield from _FIGURE.findall(line)


def _value(key: str) -> str:
    table, *names, column = (part.strip() for part in key.split(";"))
    rows = [row for row in _rows(table) if list(row.values())[: len(names)] == names]
    if len(rows) != 1 or column not in rows[0]:
        raise LookupError(f"the mark {key!r} names {len(rows)} rows of {table}: write TABLE; ROW; SIDE; COLUMN")
    return rows[0][column]


@cache
def _rows(table: str) -> list[dict[str, str]]:
    if table in _COUNTED:
        return [{"name": name, "value": value} for name, value in _COUNTED[table]().items()]
    path = TABLES / f"{table}.csv"
    if not path.exists():
        raise LookupError(f"there is no table {table} in {TABLES}")
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _verification() -> dict[str, str]:
    report = read_report(VERIFICATION)
    memory = max(case["peak_rss_bytes"] or 0 for case in report["cases"])
    return {
        **{name: f"{count:,}" for name, count in report["summary"].items()},
        "date": report["created"][:10],
        "peak memory": f"{memory / 2**30:.1f} GiB",
    }


def _cases() -> dict[str, str]:
    names = [name for name, subject in subjects().items() if not subject.long]
    strategies = {"make verify": ("none", "real"), "sam3-tvm verify": ()}
    return {command: str(len(select(names, chosen, ["llvm"]))) for command, chosen in strategies.items()}


_COUNTED = {"verification": _verification, "cases": _cases}
"""Tables that are computed, by name."""
