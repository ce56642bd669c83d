"""The diagnosis of a case as reports show it: `harness.diagnose.document` has the form that it has in the JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.report.verification.numbers import fits, number

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
        position: Its number.
        function: Name of the function.
        node: The node of the exported program whose value it returns.
        operators: What it computes, in words.
        place: File and line of the model's source, from the package's folder on.
        code: The function there, and the line itself.
        local, accumulated: r_rms and r_inf of its own error and of that in the run.
        own_share: Its part of the squared error there; NaN where there is no error.
        diverges: Whether its own error is not rounding.
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
    """What was found about one program of a case.

    Attributes:
        program: Name of the program.
        told: What was found, a sentence or two each.
        calls: Every call that was compared, in order.
        first: Position of the first call that diverges; None if none does.
        experiments: What was tried to find the cause: what it decides, and r_rms or why it could not be made.
        budget: Kinds of calls with their shares of the squared errors, the largest first.
    """

    program: str
    told: tuple[str, ...]
    calls: tuple[Call, ...]
    first: int | None
    experiments: tuple[tuple[str, str | float], ...]
    budget: tuple[tuple[str, float], ...]


def problem(data: Any) -> str:
    """Returns which part of the data has not the promised form; empty if each has."""
    if not isinstance(data, dict):
        return "the whole"
    wrong = [key for key, form in _FORM.items() if not fits(data, {key: form})]
    if not wrong and not all(fits(share, float) for share in data["budget"].values()):
        wrong = ["budget"]
    return f"`{wrong[0]}`" if wrong else ""


def read(data: Mapping[str, Any]) -> Diagnosis:
    """Reads a diagnosis about which `problem` says nothing."""
    first, ablation = data["first"], data["ablation"]
    diverging = {first["boundary"]["position"], *first["others"]} if first else set()
    return Diagnosis(
        program=data["program"],
        told=tuple(line for line in data["told"].splitlines() if line.strip()),
        calls=tuple(_call(boundary, diverging) for boundary in data["boundaries"]),
        first=first["boundary"]["position"] if first else None,
        experiments=tuple(
            (made["decides"], made["problem"] if made["result"] is None else number(made["result"]["r_rms"]))
            for made in (ablation["experiments"] if ablation else ())
        ),
        budget=tuple((kind, number(share)) for kind, share in data["budget"].items()),
    )


def place_and_code(source: str) -> tuple[str, str]:
    """Splits a line of source, `file:line in function: code`; the file is told from the package's folder on."""
    place, _, code = source.partition(" in ")
    return place.rpartition("site-packages/")[2], code


def _call(boundary: Mapping[str, Any], diverging: set[int]) -> Call:
    place, code = place_and_code(boundary["source"])
    local, accumulated = (
        (number(boundary[name]["r_rms"]), number(boundary[name]["r_inf"])) for name in ("local", "accumulated")
    )
    together = f" (with {', '.join(boundary['between'])})" if boundary["between"] else ""
    return Call(
        position=boundary["position"],
        function=boundary["function"],
        node=boundary["node"],
        operators=", ".join(boundary["operators"]) + together,
        place=place,
        code=code,
        local=local,
        accumulated=accumulated,
        own_share=number(boundary["own_share"]),
        diverges=boundary["position"] in diverging,
    )
