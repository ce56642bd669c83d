"""Targets: places to run, what this machine can do with each, and the pipelines for them, one file each."""

from __future__ import annotations

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

__all__ = ["TARGETS", "Target"]
