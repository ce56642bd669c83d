"""Reads the diagnosis of a case from JSON as reports show it; `harness.verify.diagnose.report` defines its schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.verify.report.verification.numbers import has_form, number

_DEVIATION = {"r_rms": float, "r_inf": float}
_BOUNDARY = {
    "position": int,
    "function": str,
    "node": str,
    "source": str,
    "operators": [str],
    "between": [str],
    "local": _DEVIATION,
    "accumulated": _DEVIATION,
    "own_share": float,
}
_FORM = {
    "program": str,
    "told": str,
    "boundaries": [_BOUNDARY],
    "shown": [int],
    "first": (None, {"boundary": _BOUNDARY, "confidence": str, "reason": str, "others": [int]}),
    "ablation": (
        None,
        {
            "cause": (str, None),
            "reason": str,
            "experiments": [{"decides": str, "result": (None, _DEVIATION), "problem": str}],
        },
    ),
    "budget": dict,
}


@dataclass(frozen=True)
class Call:
    """One call of a compiled function.

    Attributes:
        position: Index of the call.
        function: Name of the function.
        node: Node of the exported program whose value the call returns.
        operators: Description of its operators.
        place: File and line of the model's source, relative to the package's folder.
        code: The function at this place, and the line itself.
        local, accumulated: r_rms and r_inf of its own error and of the accumulated error in the run.
        own_share: Share of its own error in the accumulated squared error; NaN without an error.
        diverges: Whether its own error exceeds rounding.
    """

    position: int
    function: str
    node: str
    operators: str
    place: str
    code: str
    local: tuple[float, float]
    accumulated: tuple[float, float]
    own_share: float
    diverges: bool


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of one program of a case.

    Attributes:
        program: Name of the program.
        sentences: The findings, one or two sentences each.
        calls: Every compared call, in order.
        first: Position of the first call that diverges; None if none does.
        experiments: Experiments on the cause: what each decides, and its r_rms or why it failed.
        budget: Kinds of calls with their shares of the squared error, largest first.
    """

    program: str
    sentences: tuple[str, ...]
    calls: tuple[Call, ...]
    first: int | None
    experiments: tuple[tuple[str, str | float], ...]
    budget: tuple[tuple[str, float], ...]


def problem(data: Any) -> str:
    """Returns which part of the data does not have the required form; empty if all parts have it."""
    if not isinstance(data, dict):
        return "the whole"
    invalid = [key for key, form in _FORM.items() if not has_form(data, {key: form})]
    if not invalid and not all(has_form(share, float) for share in data["budget"].values()):
        invalid = ["budget"]
    return f"`{invalid[0]}`" if invalid else ""


def read_diagnosis(data: Mapping[str, Any]) -> Diagnosis:
    """Reads a diagnosis that `problem` accepts."""
    first, ablation = data["first"], data["ablation"]
    diverging = {first["boundary"]["position"], *first["others"]} if first else set()
    return Diagnosis(
        program=data["program"],
        sentences=tuple(line for line in data["told"].splitlines() if line.strip()),
        calls=tuple(_call(boundary, diverging) for boundary in data["boundaries"]),
        first=first["boundary"]["position"] if first else None,
        experiments=tuple(
            (
                experiment["decides"],
                experiment["problem"] if experiment["result"] is None else number(experiment["result"]["r_rms"]),
            )
            for experiment in (ablation["experiments"] if ablation else ())
        ),
        budget=tuple((kind, number(share)) for kind, share in data["budget"].items()),
    )


def place_and_code(source: str) -> tuple[str, str]:
    """Splits a source reference, `file:line in function: code`, with the file relative to the package's folder."""
    place, _, code = source.partition(" in ")
    return place.rpartition("site-packages/")[2], code


def _call(boundary: Mapping[str, Any], diverging: set[int]) -> Call:
    """Reads a boundary; its call diverges if its position is among these."""
    place, code = place_and_code(boundary["source"])
    local, accumulated = (
        (number(boundary[name]["r_rms"]), number(boundary[name]["r_inf"])) for name in ("local", "accumulated")
    )
    suffix = f" (with {', '.join(boundary['between'])})" if boundary["between"] else ""
    return Call(
        position=boundary["position"],
        function=boundary["function"],
        node=boundary["node"],
        operators=", ".join(boundary["operators"]) + suffix,
        place=place,
        code=code,
        local=local,
        accumulated=accumulated,
        own_share=number(boundary["own_share"]),
        diverges=boundary["position"] in diverging,
    )
