"""The diagnosis of a case for the terminal."""

from __future__ import annotations

import math
from typing import Any

from harness.core.precision import PRECISIONS
from harness.diagnose.deviation import Deviation
from harness.diagnose.diagnosis import Boundary, Cause, Diagnosis, Rewriting, budget

_SHOWN = 12
"""Boundaries in the table unless all are asked for: those around the first divergence, or the least accurate ones."""
_OWNERS = 5
_LONGEST = 24
"""Letters of a kernel's name in the table; names of fused loops are sentences."""


def render(diagnosis: Diagnosis, every: bool = False) -> Any:
    """Makes a table (rich) of the boundaries: all of them, or those that matter most."""
    from rich.table import Column, Table
    from rich.text import Text

    table = Table("call", "kernel", Column("node", overflow="fold"), highlight=False)
    for name in ("local", "accumulated", "own"):
        table.add_column(name, no_wrap=True)
    table.add_column("line", overflow="fold")
    unit = "PyTorch fp32's" if not _is_half(diagnosis) else f"PyTorch's under autocast to {diagnosis.case.precision}"
    table.title = f"{diagnosis.case.id}: error against float64 in units of {unit} (rms, largest)"
    for boundary in diagnosis.boundaries if every else shown(diagnosis):
        wrong = boundary.local.excess > 1
        table.add_row(
            str(boundary.position),
            Text(boundary.function[:_LONGEST], style="bold red" if wrong else ""),
            Text(boundary.node),
            Text(_ratio(boundary.local), style="bold red" if wrong else ""),
            _ratio(boundary.accumulated),
            "" if math.isnan(boundary.own_share) else f"{boundary.own_share:.0%}",
            Text(_short(boundary.source)),
        )
    return table


def summary(diagnosis: Diagnosis) -> str:
    """Says what was found: the first divergence, the outputs, where errors are made, and what was compared."""
    lines = [_finding(diagnosis)]
    if diagnosis.first is not None and _is_half(diagnosis):
        lines.append(f"Its cause is not looked for in {diagnosis.case.precision}: see whether it diverges in fp32 too.")
    if diagnosis.rewriting is not None:
        lines.append(_rewritten(diagnosis.case.strategy, diagnosis.rewriting))
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
        others = f" and {len(diagnosis.altered) - 1} more" if len(diagnosis.altered) > 1 else ""
        lines.append(f"Another weight or input than PyTorch's is in the place of {diagnosis.altered[0]}{others}.")
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
    lines.append(
        f"{total} nodes: {coverage.compared} compared, {coverage.covered} covered by the kernel or output that reads "
        f"them, {len(coverage.skipped)} skipped{_skipped(coverage.skipped)}. {unnamed} calls return what no node is "
        "(packed weights, layouts, parts of a node), and are compared together with what reads them."
    )
    return "\n".join(lines)


def _finding(diagnosis: Diagnosis) -> str:
    first = diagnosis.first
    if first is None and diagnosis.beyond:
        causes = diagnosis.changed, diagnosis.altered, diagnosis.misshapen, diagnosis.unsteady, diagnosis.rewriting
        unknown = "" if any(causes) else ", and no cause was found: errors may grow from kernel to kernel"
        refused = [f"; {name}: {diagnosis.failed[name]}" for name in diagnosis.beyond if name in diagnosis.failed]
        reason, wrong = "".join(refused[:1]), ", ".join(diagnosis.beyond)
        return f"No kernel diverges by itself, but errors of {wrong} are beyond the limits{unknown}{reason}."
    if first is None:
        return "No kernel diverges: each rounds like PyTorch or better when it is given PyTorch's own values."
    boundary = first.boundary
    others = f" {len(first.others)} later calls diverge by themselves, too." if first.others else ""
    return (
        f"First divergent kernel ({first.confidence}): call {boundary.position}, {boundary.function}, which computes "
        f"{boundary.node} ({', '.join(boundary.operators)}) of {boundary.source}: {first.reason}.{others}"
    )


def _rewritten(strategy: str, found: Rewriting) -> str:
    far = f"r_rms, r_inf {_ratio(found.result)}"
    wrong = f"PyTorch's outputs of the program that is compiled are not the model's ({far})"
    if found.cause is Cause.EXPORT:
        return f"Cause: {found.cause}: {wrong}, and without the strategy they are not either."
    model = f", which computes {found.source}" if found.source else ""
    by = f" by {found.by}" if found.by else ""
    return f"Cause: {found.cause}: {wrong}: {strategy} replaces the model{model}{by}."


def shown(diagnosis: Diagnosis) -> list[Boundary]:
    """Returns the boundaries that matter most: those around the first divergence, or the least accurate ones."""
    boundaries = diagnosis.boundaries
    if diagnosis.first is not None:
        at = boundaries.index(diagnosis.first.boundary)
        start = max(0, at - _SHOWN // 2)
        return list(boundaries[start : start + _SHOWN])
    worst = sorted(boundaries, key=lambda boundary: -boundary.local.excess)[:_SHOWN]
    return sorted(worst, key=lambda boundary: boundary.position)


def _is_half(diagnosis: Diagnosis) -> bool:
    return PRECISIONS[diagnosis.case.precision].is_half


def _ratio(deviation: Deviation) -> str:
    return f"{deviation.r_rms:.3g}, {deviation.r_inf:.3g}"


def _short(source: str) -> str:
    """Returns the file and line of a line of source, without folders."""
    return source.partition(" in ")[0].rpartition("/")[2]


def _skipped(skipped: dict[str, str]) -> str:
    return "".join(f"; {name}: {why}" for name, why in list(skipped.items())[:3])
