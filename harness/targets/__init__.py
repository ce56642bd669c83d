"""Targets: places to run, what this machine can do with each, and the pipelines for them, one file each."""

from __future__ import annotations

from collections.abc import Sequence

from harness.core.errors import HarnessError
from harness.targets.cuda import CUDA
from harness.targets.llvm import LLVM
from harness.targets.metal import METAL
from harness.targets.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        LLVM,
        CUDA,
        METAL,
    )
}
"""Every target by name, in the order in which they are listed; a new one is one file and one line here."""



def check_precisions(target: str, precisions: Sequence[str]) -> None:
    """Refuses a target that compiles in none of the precisions.

    Raises:
        HarnessError: It says what the target compiles in, and which target compiles in all that was asked for.
    """
    known = TARGETS[target].precisions
    if set(known).isdisjoint(precisions):
        others = [name for name, other in TARGETS.items() if set(precisions) <= set(other.precisions)]
        raise HarnessError(
            f"Target {target} compiles in {', '.join(known)} only, not in {', '.join(precisions)}: "
            f"give --target {' or '.join(others)}, or another --precision."
        )


__all__ = ["TARGETS", "Target", "check_precisions"]
