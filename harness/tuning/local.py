"""Building and running candidates here, in worker processes: a crash or a hang ends one worker and no more."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tvm
from tvm.support.popen_pool import PopenWorker

from harness.schedules import Schedule
from harness.schedules.cpu.schedule import Problem
from harness.threads import configure_threads
from harness.tuning.measuring import Array, Program, Ran, Rounds, RunError, interleaved

BUILD_SECONDS = 60.0
"""Time limit of one build; most take less than one second."""
_IDLE_SECONDS = 0.2
"""After which threads that had work sleep."""


class BuildError(Exception):
    """A candidate that could not be built; the message is one sentence."""


class Builder(Protocol):
    """Compiles candidates."""

    def build(self, problem: Problem, schedule: Schedule, library: Path) -> Program:
        """Compiles a problem alone with a schedule.

        Raises:
            BuildError: It could not be built; the builder can be used again.
        """


class Worker:
    """A process that calls functions, one at a time, within a time limit; a new one replaces one that dies."""

    def __init__(self) -> None:
        self._worker = PopenWorker(_start, (os.getpid(),), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def call(self, function: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
        """What a function of some module returns.

        Raises:
            ChildProcessError: The process died.
            TimeoutError: It took longer than `seconds`; the process was killed.
            Exception: What the function raised; its message is a traceback.
        """
        try:
            self._worker.send(function, arguments, timeout=seconds)
            return self._worker.recv()
        except KeyboardInterrupt:
            self._worker.kill()
            raise

    def run(self, function: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
        """As `call`, with one error for everything that can go wrong.

        Raises:
            RunError: The process died, it took longer than `seconds`, or the function raised something.
        """
        try:
            return self.call(function, *arguments, seconds=seconds)
        except ChildProcessError as error:
            raise RunError("it crashed") from error
        except TimeoutError as error:
            raise RunError(f"it was not done after {seconds:g} s") from error
        except Exception as error:
            raise RunError(last_line(error)) from error

    def close(self) -> None:
        """Ends the process."""
        self._worker.kill()


def last_line(error: BaseException) -> str:
    """The last line of an error's message, which a traceback ends with; its type if it has no message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _start(parent: int) -> None:
    """What a worker does first: as many threads as the user wants, and an end when its parent has ended."""
    configure_threads()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class LocalBuilder:
    """Compiles in a worker process."""

    def __init__(self, target: tvm.target.Target) -> None:
        self._target = str(target)
        self._worker = Worker()

    def build(self, problem: Problem, schedule: Schedule, library: Path) -> Program:
        """See `Builder`."""
        try:
            program: Program = self._worker.run(
                _build, problem, dict(schedule), self._target, str(library), seconds=BUILD_SECONDS
            )
        except RunError as error:
            raise BuildError(str(error)) from error
        return program

    def close(self) -> None:
        """Ends the worker."""
        self._worker.close()


def _build(problem: Problem, schedule: Schedule, target: str, library: str) -> Program:
    from harness.tuning.tasks import build

    return build(problem, schedule, tvm.target.Target(target), Path(library))


class LocalRunner:
    """Runs programs in a worker process."""

    def __init__(self, seconds: float = 30.0) -> None:
        """Make a runner.

        Args:
            seconds: Time limit of one `run`.
        """
        self._seconds = seconds
        self._worker = Worker()

    def run(self, programs: Sequence[Program], arrays: Sequence[Path], rounds: Rounds) -> list[Ran]:
        """See `harness.tuning.measuring.Runner`."""
        paths = [str(path) for path in arrays]
        ran: list[Ran] = self._worker.run(_run, list(programs), paths, rounds, seconds=self._seconds)
        return ran

    def close(self) -> None:
        """Ends the worker."""
        self._worker.close()


def _run(programs: Sequence[Program], arrays: Sequence[str], rounds: Rounds) -> list[Ran]:
    libraries = [tvm.runtime.load_module(str(program.library)) for program in programs]
    return interleaved(libraries, tvm.cpu(), programs, [np.load(path) for path in arrays], rounds)


class TorchRunner:
    """Runs the same operators in PyTorch, in a worker process."""

    def __init__(self, seconds: float = 120.0) -> None:
        """Make a runner.

        Args:
            seconds: Time limit of one `run`.
        """
        self._seconds = seconds
        self._worker = Worker()

    def run(self, problem: Problem, arrays: Sequence[Path]) -> tuple[float, Array]:
        """PyTorch's median time for a problem, seconds, and its result in float64.

        Raises:
            RunError: PyTorch cannot do it within the time.
        """
        try:
            found: tuple[float, Array] = self._worker.run(
                _torch_run, problem, [str(path) for path in arrays], Rounds(), seconds=self._seconds
            )
        except RunError as error:
            raise RunError(f"PyTorch: {error}") from error
        return found

    def close(self) -> None:
        """Ends the worker."""
        self._worker.close()


def _torch_run(problem: Problem, arrays: Sequence[str], rounds: Rounds) -> tuple[float, Array]:
    import torch

    from harness.tuning.tasks import alone

    form = alone(problem)
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
