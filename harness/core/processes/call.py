"""Starts, forks and kills isolated processes, calls a function in one, watches it, and returns how it ended."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from harness.core.errors import HarnessError
from harness.core.files import explain_write_errors, full_disk, temporary_folder
from harness.core.outcome import CaseError
from harness.core.processes.threads import thread_count

LISTED = Path("/proc/thread-self/children").exists()
"""True if the system lists the children of each thread."""


def descendants(pid: int) -> list[psutil.Process]:
    """Returns the running descendants of a process.

    The system's lists of the children of each thread are read if they exist. psutil reads every process of the system,
    which takes ten times as long.
    """
    processes: list[psutil.Process] = []
    if not LISTED:
        with contextlib.suppress(psutil.Error):
            processes = psutil.Process(pid).children(recursive=True)
        return processes
    pids = _children(pid)
    while pids:
        child = pids.pop()
        pids += _children(child)
        with contextlib.suppress(psutil.Error):
            processes.append(psutil.Process(child))
    return processes


def _children(pid: int) -> list[int]:
    """Returns the process ids of the children of all threads of a Linux process; none if it has ended."""
    pids: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended, or a thread in the loop below
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                pids += map(int, (thread / "children").read_text().split())
    return pids


CAN_FORK = sys.platform == "linux"
"""True where processes can be forked; Apple's frameworks, which torch loads on a Mac, fail in a fork."""

_POLL = 0.01


class Stopped(Exception):
    """Raised if another thread ended the call."""


class Spawned:
    """A fresh interpreter that answers the request in a folder.

    Attributes:
        pid: Process id, which is also the id of its process group.
    """

    def __init__(self, folder: Path) -> None:
        """Starts the interpreter."""
        with (folder / "output").open("ab") as output:
            self._process = start_python("harness.core.processes.child", str(folder), stdout=output.fileno())
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Returns the exit code, negative if a signal ended the process; None while it runs."""
        return self._process.poll()

    def kill(self) -> int:
        """Kills the process group, waits for the end, and returns the exit code."""
        return kill_and_collect(self._process)


class Template:
    """A process that loads libraries once and is forked for each call that needs them.

    Where processes cannot be forked, each call gets a fresh interpreter instead. Several threads may use a template.
    """

    def __init__(self, load: str) -> None:
        """Starts no process yet.

        `load` is the name of a function without arguments, as `module:name`; its exceptions are ignored. It must start
        no threads, because forks would lack them.
        """
        self._load = load
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def is_running(self) -> bool:
        """Returns whether there is a process to fork."""
        return self._process is not None and self._process.poll() is None

    def process(self, folder: Path, stop: threading.Event) -> Spawned | _Forked:
        """Returns a new process that answers the request in a folder, and starts the template if needed.

        If the template ends while it loads, the process is a fresh interpreter, which will report the error.

        Args:
            folder: Folder of the call.
            stop: Event that another thread sets to give up while the template loads.

        Raises:
            Stopped: `stop` was set; the template has ended.
        """
        if not CAN_FORK:
            return Spawned(folder)
        with self._lock:
            if stop.is_set():
                raise Stopped
            if not self.is_running:
                self.close()
                self._process = start_python("harness.core.processes.template", self._load, stdout=subprocess.PIPE)
            assert self._process is not None
            try:
                return _fork(self._process, folder, stop) or Spawned(folder)
            except BaseException:  # interrupted: the template's next answer would be the one to this call
                self.close()
                raise

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            process, self._process = self._process, None
            kill_and_collect(process)


class _Forked:
    """A fork of a template that answers the request in a folder; the template writes its exit code there.

    Attributes:
        pid: Process id, which is also the id of its process group.
    """

    def __init__(self, template: subprocess.Popen[bytes], folder: Path, pid: int, alive: int) -> None:
        """Takes the file descriptor whose end tells the fork that this process is gone."""
        self._template = template
        self._exit_file = folder / "ended"
        self._alive: int | None = alive
        self.pid = pid

    def poll(self) -> int | None:
        """Returns the exit code, None while it runs; a process that ends after the template counts as killed."""
        template_runs = self._template.poll() is None
        with contextlib.suppress(FileNotFoundError):
            return int(self._exit_file.read_text())
        return None if template_runs else -signal.SIGKILL

    def kill(self) -> int:
        """Kills the process group, and returns the exit code."""
        _kill_group(self.pid)
        while (code := self.poll()) is None:
            time.sleep(_POLL)
        if self._alive is not None:
            os.close(self._alive)
            self._alive = None
        return code


def _fork(template: subprocess.Popen[bytes], folder: Path, stop: threading.Event) -> _Forked | None:
    """Returns a fork that answers the request in a folder; None if the template has ended."""
    assert template.stdin is not None and template.stdout is not None
    with (folder / "output").open("ab"):
        pass
    os.mkfifo(folder / "alive")
    # Read and write: opening a pipe for writing alone waits for a reader.
    alive = os.open(folder / "alive", os.O_RDWR)
    pid = b""
    try:
        with contextlib.suppress(BrokenPipeError):
            template.stdin.write(f"{folder}\n".encode())
            while not select.select([template.stdout], [], [], _POLL)[0]:
                if stop.is_set():
                    raise Stopped
            pid = template.stdout.readline()
        return _Forked(template, folder, int(pid), alive) if pid else None
    finally:
        if not pid:
            os.close(alive)


def child_environment() -> dict[str, str]:
    """Returns this process's environment, changed so that another Python finds this package."""
    root = str(Path(__file__).resolve().parents[3])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def start_python(
    module: str,
    *arguments: str,
    stdout: int,
    pass_fds: tuple[int, ...] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.Popen[bytes]:
    """Starts a module as a program in its own session, where Ctrl-C does not reach it.

    The program imports nothing from the current folder (`-P`), which may hold anybody's files. The end of its stdin
    tells it that this process is gone; see `harness.core.processes.child.die_with_parent`. `variables` are added to its
    environment.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.DEVNULL if stdout == subprocess.PIPE else subprocess.STDOUT,
        bufsize=0,
        pass_fds=pass_fds,
        env={**child_environment(), **variables},
        start_new_session=True,
    )


def kill_and_collect(process: subprocess.Popen[bytes]) -> int:
    """Kills a process with its group, closes the pipes to it, and returns its exit code."""
    # A collected process's id may belong to another process by now, unless members of its group still reserve it.
    if process.returncode is None or not psutil.pid_exists(process.pid):
        _kill_group(process.pid)
    code = process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    return code


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


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
    *arguments: Any,
    timeout: float | None = None,
    memory_limit_bytes: int | None = None,
    on_stage: Callable[[str], None] | None = None,
    template: Template | None = None,
    stop: threading.Event | None = None,
) -> WorkerResult:
    """Calls `function(*arguments, on_stage)` in a new process with as many threads, and returns how it ended.

    Nothing outlives the call: when it returns or raises (Ctrl-C), the child, all its descendants and their folder are
    gone.

    Args:
        function: The function as `module:name`. It takes the arguments and `on_stage`, which it calls with the name of
            each stage that it enters. Its result must be picklable.
        arguments: Anything picklable.
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
        request: dict[str, Any] = {"function": function, "arguments": arguments, "path": sys.path}
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
    process: Spawned | _Forked
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
    tail = call.output_tail()
    if limit_hit is not None:
        kind = WorkerEnd.TIMED_OUT if limit_hit.type == "TimeLimit" else WorkerEnd.OUT_OF_MEMORY
        answer = WorkerResult(kind, error=replace(limit_hit, details=tail))
    else:
        try:
            answer = pickle.loads((call.folder / "answer").read_bytes())
        except FileNotFoundError:
            if sentence := full_disk(RuntimeError(tail)):  # LLVM ends the process
                raise HarnessError(sentence) from None
            answer = WorkerResult(WorkerEnd.CRASHED, error=_crash(call.exit_code, call._stage_suffix(), tail))
    if isinstance(answer, HarnessError):
        raise answer
    peak = max(call.peak_rss_bytes, answer.peak_rss_bytes)
    return replace(answer, breadcrumbs=tuple(call.crumbs), seconds=call.seconds, peak_rss_bytes=peak)


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
