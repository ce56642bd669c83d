"""Registers the targets: devices, this machine's abilities with each, and their pipelines, one file each."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compiler.targets.cuda import CUDA
from harness.compiler.targets.llvm import LLVM
from harness.compiler.targets.metal import METAL
from harness.compiler.targets.target import Target
from harness.core.errors import HarnessError

TARGETS: dict[str, Target] = {}
"""Every target by name, in the order of listings."""

HOST = LLVM
"""The target of every machine's own CPU."""


def register(target: Target) -> None:
    """Registers a target by its name, for the commands and for all code that compiles.

    Raises:
        ValueError: Another target has the same name.
    """
    if TARGETS.setdefault(target.name, target) is not target:
        raise ValueError(f"there is a target {target.name} already: give this one another name")


for _target in (LLVM, CUDA, METAL):
    register(_target)


def check_precisions(target: str, precisions: Sequence[str]) -> None:
    """Refuses a target that compiles in none of the precisions.

    Raises:
        HarnessError: The message names the target's precisions, and the targets that compile in all requested
            precisions.
    """
    supported = TARGETS[target].precisions
    if set(supported).isdisjoint(precisions):
        alternatives = [name for name, candidate in TARGETS.items() if set(precisions) <= set(candidate.precisions)]
        raise HarnessError(
            f"Target {target} compiles in {', '.join(supported)} only, not in {', '.join(precisions)}: "
            f"give --target {' or '.join(alternatives)}, or another --precision."
        )


__all__ = ["HOST", "TARGETS", "Target", "check_precisions", "register"]
