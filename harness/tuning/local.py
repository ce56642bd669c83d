"""Builds and runs candidates in other processes of this machine; a crash or a hang ends one process and no more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tvm

from harness.processes.timed_calls import CallError, TimedCalls
from harness.runtime.loading import open_library
from harness.schedules import Schedule
from harness.schedules.cpu.schedule import Workload
from harness.tuning.measuring import Array, Program, Rounds, RunError, RunResult, run_interleaved

BUILD_SECONDS = 60.0
"""Time limit of one build; most builds take less than one second."""
_IDLE_SECONDS = 0.2
"""Time after which idle threads sleep."""


class BuildError(Exception):
    """A candidate that could not be built; the message is one sentence."""


class Builder(Protocol):
    """Compiles candidates."""

    def build(self, workload: Workload, schedule: Schedule, library: Path) -> Program:
        """Compiles a workload as a program of its own, with a schedule.

        Raises:
            BuildError: The program could not be built; the builder can be used again.
        """


class LocalBuilder:
    """Compiles in another process."""

    def __init__(self, target: tvm.target.Target) -> None:
        self._target = str(target)
        self._calls = TimedCalls()

    def build(self, workload: Workload, schedule: Schedule, library: Path) -> Program:
        """Does what `Builder` says."""
        try:
            program: Program = self._calls.call(
                _build, workload, dict(schedule), self._target, str(library), seconds=BUILD_SECONDS
            )
        except CallError as error:
            raise BuildError(str(error)) from error
        return program

    def close(self) -> None:
        """Ends the process."""
        self._calls.close()


def _build(workload: Workload, schedule: Schedule, target: str, library: str) -> Program:
    from harness.tuning.tasks import build

    return build(workload, schedule, tvm.target.Target(target), Path(library))


class LocalRunner:
    """Runs programs in another process."""

    def __init__(self, seconds: float = 30.0) -> None:
        """Makes a runner.

        Args:
            seconds: Time limit of one `run`.
        """
        self._seconds = seconds
        self._calls = TimedCalls()

    def run(self, programs: Sequence[Program], arrays: Sequence[Path], rounds: Rounds) -> list[RunResult]:
        """Does what `harness.tuning.measuring.Runner` says."""
        paths = [str(path) for path in arrays]
        try:
            ran: list[RunResult] = self._calls.call(_run, list(programs), paths, rounds, seconds=self._seconds)
        except CallError as error:
            raise RunError(str(error)) from error
        return ran

    def close(self) -> None:
        """Ends the process."""
        self._calls.close()


def _run(programs: Sequence[Program], arrays: Sequence[str], rounds: Rounds) -> list[RunResult]:
    libraries = [open_library(program.library) for program in programs]
    return run_interleaved(libraries, tvm.cpu(), programs, [np.load(path) for path in arrays], rounds)


class TorchRunner:
    """Runs the same operators in PyTorch, in another process."""

    def __init__(self, seconds: float = 120.0) -> None:
        """Makes a runner.

        Args:
            seconds: Time limit of one `run`.
        """
        self._seconds = seconds
        self._calls = TimedCalls(torch=True)

    def run(self, workload: Workload, arrays: Sequence[Path]) -> tuple[float, Array]:
        """Returns PyTorch's median time for a workload, in seconds, and its result in float64.

        Raises:
            RunError: PyTorch cannot compute it within the time limit.
        """
        try:
            found: tuple[float, Array] = self._calls.call(
                _torch_run, workload, [str(path) for path in arrays], Rounds(), seconds=self._seconds
            )
        except CallError as error:
            raise RunError(f"PyTorch: {error}") from error
        return found

    def close(self) -> None:
        """Ends the process."""
        self._calls.close()


def _torch_run(workload: Workload, arrays: Sequence[str], rounds: Rounds) -> tuple[float, Array]:
    import torch

    from harness.tuning.tasks import isolated

    form = isolated(workload)
    tensors = [torch.from_numpy(np.load(path)) for path in arrays]
    with torch.inference_mode():
        # TVM's idle threads spin for a while after their last loop, and PyTorch's take a while to start.
        time.sleep(_IDLE_SECONDS)
        deadline = time.perf_counter() + _IDLE_SECONDS
        form.torch(*tensors)
        while time.perf_counter() < deadline:
            form.torch(*tensors)
        start = time.perf_counter()
        form.torch(*tensors)
        number = max(1, int(rounds.least_seconds / max(time.perf_counter() - start, 1e-6)))
        times = []
        for _ in range(rounds.count):
            start = time.perf_counter()
            for _ in range(number):
                form.torch(*tensors)
            times.append((time.perf_counter() - start) / number)
        exact = form.torch(*(t.double() if t.is_floating_point() else t for t in tensors)).numpy()
    return float(np.median(times)), np.ascontiguousarray(exact)
