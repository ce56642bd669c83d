"""Writes the JSON of a diagnosis, for `diagnose --json` and for the report of a diagnosed case.

    {"case": {"component", "strategy", "target", "scale", "seed", "precision", "frontend", "weights"},
     "program",
     "told": what was found, in sentences separated by newlines,
     "faulty": whether anything is wrong besides rounding,
     "boundaries": [{"position", "function", "at_load", "node", "source", "operators", "inside", "between", "shape",
                     "local": deviation, "accumulated": deviation, "own_share"}],
     "shown": positions of the boundaries that matter most,
     "outputs": {name: deviation},
     "coverage": {"compared", "covered", "skipped": {node: reason}, "unnamed": {function: calls}},
     "first": {"boundary": as above, "confidence", "reason", "others": [positions]} or null,
     "changed": [functions],
     "altered": [nodes of weights and inputs],
     "misshapen": [{"output", "shape", "expected", "node", "source"}],
     "unsteady": [functions],
     "luck": [nodes],
     "luck_of_outputs": [outputs],
     "ablation": {"cause": null if it is undecided, "reason": in words,
                  "experiments": [{"decides": a cause, "result": deviation or null, "problem", "with_before",
                                   "otherwise"}],
                  "reruns": [{"way", "result": deviation or null, "problem"}],
                  "imports": [{"way", "result": deviation or null, "problem"}], "whose": in words, or "",
                  "passes": [names]} or null,
     "failed": {output that a verification refuses: reason},
     "rewriting": {"cause", "source", "by", "result": deviation} or null,
     "budget": {kind of call: share of the squared errors}}

A deviation is {"r_rms", "r_inf", "error", "torch_error", "wrong"}. Attributes of the same names in
`harness.diagnose.diagnosis` say what these are. What is not a number is null, infinities are "inf" and "-inf".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness import files
from harness.diagnose.diagnosis import Diagnosis, budget
from harness.diagnose.table import main_boundaries, summary
from harness.report.verification.numbers import jsonable

ADVICE = "choose another file with --json"
"""Advice for the user if the file cannot be written."""


def document(diagnosis: Diagnosis) -> dict[str, Any]:
    """Returns the whole diagnosis as JSON-able data."""
    data = asdict(replace(diagnosis, reproduction=None))
    del data["reproduction"]
    for plain, boundary in zip(data["boundaries"], diagnosis.boundaries, strict=True):
        plain["own_share"] = boundary.own_share
    if diagnosis.first is not None:
        data["first"]["boundary"]["own_share"] = diagnosis.first.boundary.own_share
    if diagnosis.ablation is not None:
        data["ablation"] |= {"reason": diagnosis.ablation.reason, "whose": diagnosis.ablation.responsible}
    data["shown"] = [boundary.position for boundary in main_boundaries(diagnosis)]
    data |= {"told": summary(diagnosis), "faulty": diagnosis.faulty, "budget": budget(diagnosis)}
    plain = _plain(data)
    assert isinstance(plain, dict)
    return plain


def write_json(diagnoses: Sequence[Diagnosis], path: Path) -> None:
    """Writes the documents of diagnoses, completely or not at all.

    Raises:
        HarnessError: The file cannot be written.
    """
    files.write_json(path, {"schema": 1, "cases": [document(diagnosis) for diagnosis in diagnoses]}, advice=ADVICE)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return jsonable(value) if isinstance(value, float) else value
