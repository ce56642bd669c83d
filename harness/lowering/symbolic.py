"""Which cases take inputs with axes whose extents are not known when they are compiled."""

from __future__ import annotations

from harness.core.case import Case
from harness.lowering.frontends import FRONTENDS
from harness.lowering.rope import STRATEGIES
from harness.lowering.route import Route
from harness.targets import TARGETS


def takes_symbolic_axes(case: Case) -> bool:
    """Returns whether the target, the frontend and the strategy of a case all take symbolic axes."""
    return TARGETS[case.target].symbolic and Route.of(case).symbolic


def what_takes_symbolic_axes() -> str:
    """Returns the targets, strategies and frontends that take symbolic axes, as a part of a sentence."""
    targets, strategies, frontends = (
        " or ".join(each.name for each in known if each.symbolic)
        for known in (list(TARGETS.values()), list(STRATEGIES.values()), list(FRONTENDS.values()))
    )
    return f"the target {targets}, the strategy {strategies} and the frontend {frontends}"
