"""Calls a function in an isolated process, watches it, and returns how it ended."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from harness.core.errors import HarnessError
from harness.core.files import explain_write_errors, full_disk, temporary_folder
from harness.core.outcome import CaseError
from harness.core.processes.descendants import descendants
from harness.core.processes.processes import Process, Spawned, Stopped, Template, child_environment
from harness.core.processes.threads import thread_count

DETAILS_BYTES = 8000
"""Size of the end of the child's output that an error contains."""

ROOM, _ROOM_BYTES = "room", 1 << 16
"""A file in the folder of a call. It is deleted if the disk is full, so that there is room for the error."""

OUTPUT_BYTES = 64 << 20
"""Size of the output on disk beyond which all but its end is dropped."""

_FASTEST_POLL, _SLOWEST_POLL = 0.005, 0.1


class WorkerEnd(StrEnum):
    """The way in which a call ended."""

    OK = "ok"
    FAILED = "failed"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"


@dataclass(frozen=True)
class Breadcrumb:
    """A stage of the child, and the seconds from the child's start to the stage's."""

    stage: str
    seconds: float


@dataclass(frozen=True)
class WorkerResult:
    """The result of a call.

    Attributes:
        kind: The way in which the call ended.
        value: The function's result; None unless `kind` is `ok`.
        error: The error of a call that did not end well. Its `type` is the exception's or signal's name, `ExitCode`,
            `TimeLimit` or `MemoryLimit`; its details hold the traceback or the end of the output.
        breadcrumbs: The stages entered, in order.
        seconds: Wall-clock time, including the start of the interpreter or template.
        peak_rss_bytes: Largest measured resident set of the child and its descendants together.
    """

    kind: WorkerEnd
    value: Any = None
    error: CaseError | None = None
    breadcrumbs: tuple[Breadcrumb, ...] = ()
    seconds: float = 0.0
    peak_rss_bytes: int = 0

    @property
    def stage(self) -> str:
        """The last stage entered; empty if there is none."""
        return self.breadcrumbs[-1].stage if self.breadcrumbs else ""

    def require(self, failure: str) -> Any:
        """Returns the function's result.

        Args:
            failure: Begins the sentence on a call that did not end well.

        Raises:
            HarnessError: The call did not end well.
        """
        if self.kind is WorkerEnd.OK:
            return self.value
        end = self.kind.value.replace("_", " ")
        line = self.error.message.partition("\n")[0] if self.error else end
        raise HarnessError(f"{failure}: {self.stage or 'start'} {end}: {line}")


def run_isolated(
    function: str,
    argument: Any,
    *,
    timeout: float | None = None,
    memory_limit_bytes: int | None = None,
    on_stage: Callable[[str], None] | None = None,
    template: Template | None = None,
    stop: threading.Event | None = None,
) -> WorkerResult:
    """Calls `function(argument, on_stage)` in a new process with as many threads, and returns how it ended.

    Nothing outlives the call: when it returns or raises (Ctrl-C), the child, all its descendants and their folder are
    gone.

    Args:
        function: The function as `module:name`. It takes the argument and `on_stage`, which it calls with the name of
            each stage that it enters. Its result must be picklable.
        argument: Anything picklable.
        timeout: Seconds until all processes are killed; None for no limit.
        memory_limit_bytes: Resident bytes, descendants included, above which all processes are killed; None for no
            limit.
        on_stage: Called in this process with the name of each stage, soon after the child has entered it.
        template: Process to fork, where processes can be forked; otherwise a fresh interpreter runs the call.
        stop: Event that another thread sets to end the call.

    Raises:
        HarnessError: The function raised it: the input or the environment is wrong.
        Stopped: `stop` was set before the child had ended.
    """
    with temporary_folder("worker") as name:
        folder = Path(name)
        request = {"function": function, "argument": argument, "path": sys.path}
        request |= {"environment": child_environment(), "directory": Path.cwd(), "threads": thread_count()}
        stop = stop or threading.Event()
        with explain_write_errors(folder, "free some space or let TMPDIR name another folder"):
            (folder / ROOM).write_bytes(bytes(_ROOM_BYTES))
            (folder / "request").write_bytes(pickle.dumps(request))
        process = Spawned(folder) if template is None else template.process(folder, stop)
        call = _Call(folder, process, on_stage or (lambda stage: None))
        try:
            limit_hit = call.watch(timeout, memory_limit_bytes, stop)
        finally:
            call.end()
        return _result(call, limit_hit)


@dataclass
class _Call:
    """A running child, as its parent sees it."""

    folder: Path
    process: Process
    on_stage: Callable[[str], None]
    started: float = field(default_factory=time.time)
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    crumbs: list[Breadcrumb] = field(default_factory=list)
    processes: dict[int, Any] = field(default_factory=dict)
    earlier_output: bytes = b""
    breadcrumb_offset: int = 0
    exit_code: int = 0

    def watch(self, timeout: float | None, memory_limit: int | None, stop: threading.Event) -> CaseError | None:
        """Waits until the child ends; returns the limit that it broke, if any.

        Raises:
            Stopped: `stop` was set first.
        """
        clock = time.monotonic()
        pause = _FASTEST_POLL
        while True:
            has_ended = self.process.poll() is not None
            self.seconds = time.monotonic() - clock
            self._read_breadcrumbs()
            if has_ended:
                return None
            if stop.is_set():
                raise Stopped
            resident = self._resident_bytes()
            if memory_limit is not None and resident > memory_limit:
                message = f"{_size(resident)} resident, over the limit of {_size(memory_limit)}"
                return CaseError("MemoryLimit", message + self._stage_suffix())
            if timeout is not None and self.seconds >= timeout:
                return CaseError("TimeLimit", f"still running after {timeout:g} s" + self._stage_suffix())
            self._trim_output()
            remaining = float("inf") if timeout is None else timeout - self.seconds
            stop.wait(max(0.0, min(pause, remaining)))
            pause = min(pause * 1.3, _SLOWEST_POLL)

    def end(self) -> None:
        """Kills the rest of the child and its descendants, and collects the child."""
        import psutil

        self._record_descendants()
        self.exit_code = self.process.kill()
        for process in self.processes.values():  # those that left the process group
            with contextlib.suppress(psutil.Error):
                process.kill()

    def output_tail(self) -> str:
        """Returns the end of the output of the child and its descendants."""
        with (self.folder / "output").open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - DETAILS_BYTES))
            text = self.earlier_output + file.read()
        return text[-DETAILS_BYTES:].decode("utf-8", errors="replace")

    def _stage_suffix(self) -> str:
        return f", in stage {self.crumbs[-1].stage}" if self.crumbs else ""

    def _read_breadcrumbs(self) -> None:
        try:
            with (self.folder / "breadcrumbs").open("rb") as file:
                file.seek(self.breadcrumb_offset)
                new = file.read()
        except FileNotFoundError:
            return
        complete = new[: new.rfind(b"\n") + 1]
        self.breadcrumb_offset += len(complete)
        for line in complete.decode().splitlines():
            instant, _, stage = line.partition(" ")
            # A forked child may start before this process has begun to watch it.
            self.crumbs.append(Breadcrumb(stage, max(0.0, float(instant) - self.started)))
            self.on_stage(stage)

    def _record_descendants(self) -> None:
        for process in descendants(self.process.pid):
            self.processes.setdefault(process.pid, process)

    def _resident_bytes(self) -> int:
        import psutil

        self._record_descendants()
        total = 0
        with contextlib.suppress(psutil.Error):
            total += int(psutil.Process(self.process.pid).memory_info().rss)
        for process in self.processes.values():
            with contextlib.suppress(psutil.Error):
                total += int(process.memory_info().rss)
        self.peak_rss_bytes = max(self.peak_rss_bytes, total)
        return total

    def _trim_output(self) -> None:
        path = self.folder / "output"
        if path.stat().st_size > OUTPUT_BYTES:
            self.earlier_output = self.output_tail().encode()
            os.truncate(path, 0)


def _result(call: _Call, limit_hit: CaseError | None) -> WorkerResult:
    def result(kind: WorkerEnd, value: Any = None, error: CaseError | None = None, child_peak: int = 0) -> WorkerResult:
        peak = max(call.peak_rss_bytes, child_peak)
        return WorkerResult(kind, value, error, tuple(call.crumbs), call.seconds, peak)

    tail = call.output_tail()
    if limit_hit is not None:
        kind = WorkerEnd.TIMED_OUT if limit_hit.type == "TimeLimit" else WorkerEnd.OUT_OF_MEMORY
        return result(kind, error=CaseError(limit_hit.type, limit_hit.message, tail))
    try:
        answer = pickle.loads((call.folder / "answer").read_bytes())
    except FileNotFoundError:
        if sentence := full_disk(RuntimeError(tail)):  # LLVM ends the process
            raise HarnessError(sentence) from None
        return result(WorkerEnd.CRASHED, error=_crash(call.exit_code, call._stage_suffix(), tail))
    kind = WorkerEnd(answer["kind"])
    if kind is WorkerEnd.OK:
        return result(kind, answer["value"], child_peak=answer["peak_rss_bytes"])
    if answer["user_error"]:
        raise HarnessError(answer["message"])
    error = CaseError(answer["type"], answer["message"], answer["details"])
    return result(kind, error=error, child_peak=answer["peak_rss_bytes"])


def _crash(returncode: int, stage_suffix: str, tail: str) -> CaseError:
    if returncode >= 0:
        return CaseError("ExitCode", f"the process ended with exit code {returncode} and no answer{stage_suffix}", tail)
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = ": somebody killed it, perhaps the system for lack of memory" if name == "SIGKILL" else ""
    return CaseError(name, f"the process died of {name}{stage_suffix}{hint}", tail)


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
