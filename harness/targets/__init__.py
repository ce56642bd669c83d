"""Targets: places to run, what this machine can do with each, and the pipelines for them, one file each."""

from __future__ import annotations

from collections.abc import Sequence

from harness.core.errors import HarnessError
from harness.targets.cuda import CUDA
from harness.targets.llvm import LLVM
from harness.targets.metal import METAL
from harness.targets.target import Target

TARGETS: dict[str, Target] = {}
"""Every target by name, in the order in which they are listed."""

HOST = LLVM
"""The target that every machine has: its own CPU."""


def register(target: Target) -> None:
    """Makes a target known by its name, to the commands and to whatever compiles.

    Raises:
        ValueError: There is another one of that name.
    """
    if TARGETS.setdefault(target.name, target) is not target:
        raise ValueError(f"there is a target {target.name} already: give this one another name")


for _target in (LLVM, CUDA, METAL):
    register(_target)


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


__all__ = ["HOST", "TARGETS", "Target", "check_precisions", "register"]
