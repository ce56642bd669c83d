"""A build of kernels of which some crash, hang or are wrong; worker processes import it, without PyTorch."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import tvm

from harness.compiler.schedules import Schedule
from harness.compiler.schedules.cpu.schedule import Workload
from harness.compiler.schedules.cpu.tile import vector_unit
from harness.tuning import kernels
from harness.tuning.search import candidates


def build(workload: Workload, schedule: Schedule, target: str) -> kernels.Run:
    """The first candidate crashes, the second hangs, the third is wrong; the others and the default are right.

    The default takes some milliseconds longer than it does, so that all candidates are faster.
    """
    run = kernels.build(workload, schedule, target)
    if not schedule:
        return lambda: _late(run)
    number = candidates(workload, vector_unit(tvm.target.Target(target)), {}).index(schedule)
    return [os.abort, lambda: time.sleep(600), lambda: _wrong(run), run][min(number, 3)]


def _late(run: kernels.Run) -> Any:
    time.sleep(0.005)
    return run()


def _wrong(run: kernels.Run) -> Any:
    return tvm.runtime.tensor(run().numpy() + np.float32(0.01))
