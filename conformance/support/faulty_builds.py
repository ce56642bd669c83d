"""Builds kernels of which some crash, hang or are wrong; worker processes import it, without PyTorch."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm

from harness.compiler.schedules import Schedule
from harness.compiler.schedules.cpu.schedule import Workload
from harness.compiler.schedules.cpu.tile import vector_unit
from harness.tuning import kernels
from harness.tuning.search import candidates

SECONDS = 20
"""Limit of a measurement; a right one takes a second or two, also on a slow CPU."""
FAULTS = {
    "crash": (lambda _: os.abort, "it crashed"),
    "hang": (lambda _: lambda: time.sleep(600), f"it was not done after {SECONDS} s"),
    "wrong": (lambda run: lambda: _wrong(run), "its result is wrong"),
}
"""Ways to make a kernel of a right one, and what is said of it."""


def build(workload: Workload, schedule: Schedule, target: str, faults: Sequence[str] = tuple(FAULTS)) -> kernels.Run:
    """Builds kernels: the first candidates have these faults, one each; all others are right.

    The default takes some milliseconds longer than it does, so that all candidates are faster.
    """
    run = kernels.build(workload, schedule, target)
    if not schedule:
        return lambda: _late(run)
    number = candidates(workload, vector_unit(tvm.target.Target(target)), {}).index(schedule)
    return FAULTS[faults[number]][0](run) if number < len(faults) else run


def _late(run: kernels.Run) -> Any:
    time.sleep(0.005)
    return run()


def _wrong(run: kernels.Run) -> Any:
    return tvm.runtime.tensor(run().numpy() + np.float32(0.01))
