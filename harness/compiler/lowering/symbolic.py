"""Finds the cases whose inputs may have axes with extents that are unknown at compilation."""

from __future__ import annotations

from harness.compiler.lowering.frontends import FRONTENDS
from harness.compiler.lowering.rope import STRATEGIES
from harness.compiler.lowering.route import Route
from harness.compiler.targets import TARGETS
from harness.core.case import Case


def takes_symbolic_axes(case: Case) -> bool:
    """Returns whether the target, the frontend and the strategy of a case all take symbolic axes."""
    return TARGETS[case.target].symbolic and Route.from_case(case).symbolic


def describe_symbolic_support() -> str:
    """Returns the targets, strategies and frontends that take symbolic axes, as a part of a sentence."""
    targets, strategies, frontends = (
        " or ".join(entry.name for entry in registry if entry.symbolic)
        for registry in (list(TARGETS.values()), list(STRATEGIES.values()), list(FRONTENDS.values()))
    )
    return f"the target {targets}, the strategy {strategies} and the frontend {frontends}"
