"""Schedules for CPUs: how Relax operators become fast and careful loops.

`cpu_pipeline(target)` is imported on use, because it needs TVM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tvm


def cpu_pipeline(target: tvm.target.Target) -> tvm.transform.Pass:
    """See `harness.schedules.cpu.pipeline.cpu_pipeline`."""
    from harness.schedules.cpu import pipeline

    return pipeline.cpu_pipeline(target)
