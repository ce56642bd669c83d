"""Writes a diagnosis: a table and sentences for the terminal, JSON, and the folder of a reproduction.

`diagnose --json` writes the JSON, and a verification report contains it for a diagnosed case:

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
`harness.verify.diagnose.diagnosis` say what these are. What is not a number is null, infinities are "inf" and "-inf".
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness.core.errors import HarnessError
from harness.core.files import make_folder, replace_folder, write_files
from harness.core.precision import PRECISIONS
from harness.verify.diagnose.deviation import Deviation
from harness.verify.diagnose.diagnosis import Boundary, Cause, Diagnosis, Rewriting, budget
from harness.verify.report.verification.schema import jsonable

_TABLE_ROWS = 12
"""Default number of boundaries in the table: those around the first divergence, or the least accurate ones."""
_OWNERS = 5
_MAX_NAME_LENGTH = 24
"""Characters of a kernel's name in the table; names of fused loops are sentences."""


def render(diagnosis: Diagnosis, all_boundaries: bool = False) -> Any:
    """Builds a table (rich) of all boundaries, or of the most important ones."""
    from rich.table import Column, Table
    from rich.text import Text

    table = Table("call", "kernel", Column("node", overflow="fold"), highlight=False)
    for name in ("local", "accumulated", "own"):
        table.add_column(name, no_wrap=True)
    table.add_column("line", overflow="fold")
    unit = "PyTorch fp32's" if not _is_half(diagnosis) else f"PyTorch's under autocast to {diagnosis.case.precision}"
    table.title = f"{diagnosis.case.id}: error against float64 in units of {unit} (rms, largest)"
    for boundary in diagnosis.boundaries if all_boundaries else main_boundaries(diagnosis):
        wrong = boundary.local.is_fault
        table.add_row(
            str(boundary.position),
            Text(boundary.function[:_MAX_NAME_LENGTH], style="bold red" if wrong else ""),
            Text(boundary.node),
            Text(_ratio(boundary.local), style="bold red" if wrong else ""),
            _ratio(boundary.accumulated),
            "" if math.isnan(boundary.own_share) else f"{boundary.own_share:.0%}",
            Text(boundary.source.partition(" in ")[0].rpartition("/")[2]),  # file and line, without folders
        )
    return table


def summary(diagnosis: Diagnosis) -> str:
    """Returns the findings: first divergence, outputs, where errors are made, and the compared nodes."""
    lines = [_finding_sentence(diagnosis)]
    if diagnosis.first is not None and _is_half(diagnosis):
        lines.append(f"Its cause is not looked for in {diagnosis.case.precision}: see whether it diverges in fp32 too.")
    if diagnosis.rewriting is not None:
        lines.append(_rewriting_sentence(diagnosis.case.strategy, diagnosis.rewriting))
    if diagnosis.ablation is not None:
        lines.append(f"Cause: {diagnosis.ablation.cause or 'undecided'}: {diagnosis.ablation.reason}.")
    if luck := (*diagnosis.luck_of_outputs, *diagnosis.luck):
        lines.append(f"One run of autocast says nothing about so few numbers: {', '.join(luck)}.")
    if diagnosis.changed:
        lines.append(f"{diagnosis.changed[0]} does not read what was written: memory is given away too early.")
    if diagnosis.unsteady:
        lines.append(
            f"Called again with the same values, {diagnosis.unsteady[0]} makes other bits: tasks of a parallel loop "
            "disturb each other, or it reads memory that nobody wrote."
        )
    if diagnosis.altered:
        suffix = f" and {len(diagnosis.altered) - 1} more" if len(diagnosis.altered) > 1 else ""
        lines.append(f"Another weight or input than PyTorch's is in the place of {diagnosis.altered[0]}{suffix}.")
    for wrong in diagnosis.misshapen:
        shape, expected = (" × ".join(map(str, extents)) or "a number" for extents in (wrong.shape, wrong.expected))
        first = f": {wrong.node} of {wrong.source} is imported in another shape than PyTorch's" if wrong.node else ""
        lines.append(f"{wrong.output} has the shape {shape} instead of {expected}{first}.")
    outputs = ", ".join(f"{name} {_ratio(deviation)}" for name, deviation in diagnosis.outputs.items())
    lines.append(f"Outputs (r_rms, r_inf): {outputs}.")
    owners = list(budget(diagnosis).items())[:_OWNERS]
    if owners and diagnosis.first is None:
        lines.append("Errors are made by: " + ", ".join(f"{kind} {share:.0%}" for kind, share in owners) + ".")
    coverage = diagnosis.coverage
    total = coverage.compared + coverage.covered + len(coverage.skipped)
    unnamed = sum(coverage.unnamed.values())
    reasons = "".join(f"; {name}: {why}" for name, why in list(coverage.skipped.items())[:3])
    lines.append(
        f"{total} nodes: {coverage.compared} compared, {coverage.covered} covered by the kernel or output that reads "
        f"them, {len(coverage.skipped)} skipped{reasons}. {unnamed} calls return what no node is "
        "(packed weights, layouts, parts of a node), and are compared together with what reads them."
    )
    return "\n".join(lines)


def _finding_sentence(diagnosis: Diagnosis) -> str:
    first = diagnosis.first
    if first is None and diagnosis.wrong_outputs:
        causes = diagnosis.changed, diagnosis.altered, diagnosis.misshapen, diagnosis.unsteady, diagnosis.rewriting
        unknown = "" if any(causes) else ", and no cause was found: errors may grow from kernel to kernel"
        refused = [
            f"; {name}: {diagnosis.failed[name]}" for name in diagnosis.wrong_outputs if name in diagnosis.failed
        ]
        reason, wrong = "".join(refused[:1]), ", ".join(diagnosis.wrong_outputs)
        return f"No kernel diverges by itself, but errors of {wrong} are beyond the limits{unknown}{reason}."
    if first is None:
        return "No kernel diverges: each rounds like PyTorch or better when it is given PyTorch's own values."
    boundary = first.boundary
    suffix = f" {len(first.others)} later calls diverge by themselves, too." if first.others else ""
    return (
        f"First divergent kernel ({first.confidence}): call {boundary.position}, {boundary.function}, which computes "
        f"{boundary.node} ({', '.join(boundary.operators)}) of {boundary.source}: {first.reason}.{suffix}"
    )


def _rewriting_sentence(strategy: str, rewriting: Rewriting) -> str:
    ratios = f"r_rms, r_inf {_ratio(rewriting.result)}"
    wrong = f"PyTorch's outputs of the program that is compiled are not the model's ({ratios})"
    if rewriting.cause is Cause.EXPORT:
        first = f"; the first value that is not the model's is made by {rewriting.source}" if rewriting.source else ""
        return f"Cause: {rewriting.cause}: {wrong}, and without the strategy they are not either{first}."
    model = f", which computes {rewriting.source}" if rewriting.source else ""
    replacement = f" by {rewriting.by}" if rewriting.by else ""
    return f"Cause: {rewriting.cause}: {wrong}: {strategy} replaces the model{model}{replacement}."


def main_boundaries(diagnosis: Diagnosis) -> list[Boundary]:
    """Returns the most important boundaries: those around the first divergence, or the least accurate ones."""
    boundaries = diagnosis.boundaries
    if diagnosis.first is not None:
        index = boundaries.index(diagnosis.first.boundary)
        start = max(0, index - _TABLE_ROWS // 2)
        return list(boundaries[start : start + _TABLE_ROWS])
    worst = sorted(boundaries, key=lambda boundary: -boundary.local.excess)[:_TABLE_ROWS]
    return sorted(worst, key=lambda boundary: boundary.position)


def _is_half(diagnosis: Diagnosis) -> bool:
    return PRECISIONS[diagnosis.case.precision].is_half


def _ratio(deviation: Deviation) -> str:
    return f"{deviation.r_rms:.3g}, {deviation.r_inf:.3g}"


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


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return jsonable(value) if isinstance(value, float) else value


ADVICE_ON_FOLDER = "choose another folder with --reproduce"
"""Advice for the user if the folder cannot be written."""


def check_folder(folder: Path, cases: int) -> None:
    """Checks before the work that a reproduction can be written.

    Raises:
        HarnessError: The folder exists, it cannot be written, or there is not exactly one case.
    """
    if cases != 1:
        raise HarnessError(f"--reproduce takes one case, and {cases} were asked for: name one with --component")
    if folder.exists():
        raise HarnessError(f"{folder} exists: {ADVICE_ON_FOLDER}")
    make_folder(folder.resolve().parent, advice=ADVICE_ON_FOLDER)


def write_folder(diagnosis: Diagnosis, folder: Path) -> str:
    """Writes the folder of a reproduction, if there is one, and returns a sentence on the outcome.

    Raises:
        HarnessError: The folder cannot be written.
    """
    reproduction = diagnosis.reproduction
    if reproduction is None:
        return "Nothing to reproduce: no kernel diverges by itself."
    if not reproduction.files:
        return f"No reproduction was written: {reproduction.description}."
    with replace_folder(folder, lambda existing: False, "a reproduction") as new_folder:
        write_files(new_folder, reproduction.files, advice=ADVICE_ON_FOLDER)
    return f"Reproduction: {folder}: {reproduction.description}."
