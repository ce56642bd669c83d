"""Schedules for CPUs: how Relax operators become fast and careful loops.

`cpu_pipeline(target, schedules)` is imported on use, because it needs TVM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.compiler.schedules import UNTUNED, Schedules

if TYPE_CHECKING:
    import tvm


def cpu_pipeline(target: tvm.target.Target, schedules: Schedules = UNTUNED) -> tvm.transform.Pass:
    """Returns the pass that `harness.compiler.schedules.cpu.pipeline.cpu_pipeline` builds."""
    from harness.compiler.schedules.cpu import pipeline

    return pipeline.cpu_pipeline(target, schedules)
