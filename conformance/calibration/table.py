"""The confusion matrix of a calibration, and the faults that the judge let pass, as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from conformance.calibration.measuring import OUTPUTS, UNDETECTED, UNREACHED

Record = dict[str, Any]

_COLUMNS = (
    "layer",
    "drawn",
    "reached",
    "stopped",
    "wrong outputs",
    "passed",
    "the same bits",
    "below rounding",
    "diverges",
    "located",
    "cause right",
    "cut out",
)


def render(records: Sequence[Record]) -> str:
    """Returns the tables of records, one by layer, one by kind, and the list of what passed."""
    by_layer = _matrix(records, lambda record: str(record["fault"]["layer"]), "layer")
    by_kind = _matrix(records, lambda record: str(record["fault"]["kind"]), "kind")
    passed = [record for record in records if record["ended"] == UNDETECTED and not _is_below(record)]
    wrong = [record for record in records if _is_wrong(record)]
    return "\n\n".join((by_layer, by_kind, _listed("Passed, and not below rounding", passed), _misses(wrong)))


def _matrix(records: Sequence[Record], name_of: Callable[[Record], str], first: str) -> str:
    names = sorted({name_of(record) for record in records})
    groups = [(name, [record for record in records if name_of(record) == name]) for name in names]
    rows = [_row(name, group) for name, group in (*groups, ("all", records))]
    return markdown((first, *_COLUMNS[1:]), rows)


def _row(name: str, records: Iterable[Record]) -> list[str]:
    all_of_them = list(records)
    reached = [record for record in all_of_them if record["ended"] != UNREACHED]
    outputs = [record for record in reached if record["ended"] == OUTPUTS]
    passed = [record for record in reached if record["ended"] == UNDETECTED]
    return [
        name,
        str(len(all_of_them)),
        str(len(reached)),
        str(len(reached) - len(outputs) - len(passed)),
        str(len(outputs)),
        str(len(passed)),
        str(sum(_is_below(record) and not record["changed"] for record in passed)),
        str(sum(_is_below(record) and record["changed"] for record in passed)),
        _part(outputs, "faulty"),
        _part(outputs, "located"),
        _part(outputs, "right"),
        _part(reached, "reproduced"),
    ]


def _part(records: Iterable[Record], what: str) -> str:
    known = [told for record in records if (told := _told(record, what)) is not None]
    return f"{sum(known)}/{len(known)}" if known else ""


def _told(record: Record, what: str) -> bool | None:
    """Returns what a diagnosis says, False where it failed, None where there is no answer."""
    if not _diagnosis(record):
        return False if record["problem"] and record["ended"] == OUTPUTS and what != "reproduced" else None
    told: bool | None = record["diagnosis"][what]
    return told


def _diagnosis(record: Record) -> Record:
    found: Record = record.get("diagnosis") or {}
    return found


def _is_below(record: Record) -> bool:
    """Returns whether outputs are as accurate as PyTorch's, element by element, and no kernel diverges."""
    return record["ended"] == UNDETECTED and not record["hole"] and not _diagnosis(record).get("faulty")


def _is_wrong(record: Record) -> bool:
    told = (_told(record, what) for what in ("faulty", "located", "right"))
    return record["ended"] == OUTPUTS and False in told


def _listed(title: str, records: Sequence[Record]) -> str:
    columns = ("fault", "component", "layer", "kind", "where", "r_rms", "r_inf", "outputs", "diagnose names")
    rows = [
        [
            *_named(record),
            _number(record["r_rms"]),
            _number(record["r_inf"]),
            "differ" if record["changed"] else "the same",
            _diagnosis(record).get("first") or ", ".join(_diagnosis(record).get("changed", [])) or "nothing",
        ]
        for record in records
    ]
    return f"{title}: {len(records)}\n\n{markdown(columns, rows)}" if rows else f"{title}: none"


def _misses(records: Sequence[Record]) -> str:
    columns = ("fault", "component", "layer", "kind", "where", "r_rms", "diagnose names", "located", "cause")
    rows = [
        [
            *_named(record),
            _number(record["r_rms"]),
            _diagnosis(record).get("first") or record["problem"] or "nothing",
            str(_told(record, "located")),
            str(_diagnosis(record).get("cause")),
        ]
        for record in records
    ]
    title = "Wrong outputs, and another kernel or cause named"
    return f"{title}: {len(records)}\n\n{markdown(columns, rows)}" if rows else f"{title}: none"


def _named(record: Record) -> list[str]:
    fault = record["fault"]
    return [
        f"{fault['seed']}/{fault['number']}",
        fault["component"],
        fault["layer"],
        fault["kind"],
        f"`{_short(record['where'])}`",
    ]


def _short(text: str) -> str:
    return text.replace("R.Tensor", "").replace(', dtype="float32"', "").replace("|", "\\|")[:60]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
