"""Process isolation: run a function so that a crash, a hang or a memory hog ends one call and never the run.

The function runs in a fresh interpreter (spawned, not forked: torch and TVM do not survive a fork), in a process group
of its own. Parent and child talk through files in a private folder, because a file survives the native crash of its
writer:

    request        pickled: what to call, with which argument; there once the child's stdin says so
    breadcrumbs    one line per stage entered, written by the child at once
    output         stdout and stderr of the child and its children
    answer         pickled: what came back; absent if the child died

Memory is limited by watching the resident set of the child and its descendants. RLIMIT_AS would be sharper, but torch
and TVM reserve tens of times the address space that they use, and macOS does not enforce it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from harness.errors import HarnessError
from harness.outcome import CaseError
from harness.runtime.errors import Sam3Error

DETAILS_BYTES = 8000
"""How much of the end of the child's output goes into an error."""

OUTPUT_BYTES = 64 << 20
"""How much output is kept on disk before all but its end is dropped."""

_FASTEST_POLL, _SLOWEST_POLL = 0.005, 0.1


class WorkerEnd(StrEnum):
    """How a call ended."""

    OK = "ok"
    FAILED = "failed"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"


@dataclass(frozen=True)
class Breadcrumb:
    """A stage that the child entered, `seconds` after it was started."""

    stage: str
    seconds: float


@dataclass(frozen=True)
class WorkerResult:
    """What became of a call.

    Attributes:
        kind: How it ended.
        value: What the function returned; None unless `kind` is `ok`.
        error: Why it did not end well; its `type` is the exception's, or the signal's name, `ExitCode`, `TimeLimit`,
            `MemoryLimit`; its details hold the traceback or the end of the output.
        breadcrumbs: Every stage entered, in order.
        seconds: Wall-clock time, start of the interpreter included unless that was started ahead.
        peak_rss_bytes: Largest resident set seen of the child and its descendants together.
    """

    kind: WorkerEnd
    value: Any = None
    error: CaseError | None = None
    breadcrumbs: tuple[Breadcrumb, ...] = ()
    seconds: float = 0.0
    peak_rss_bytes: int = 0

    @property
    def stage(self) -> str:
        """The last stage entered; empty if there was none."""
        return self.breadcrumbs[-1].stage if self.breadcrumbs else ""


class Stopped(Exception):
    """A call was ended by whoever had made it."""


class Standby:
    """A child started ahead of its call, which loads what the call needs while something else runs."""

    def __init__(self, load: str) -> None:
        """Starts nothing yet. `load` is a function without arguments, as `module:name`; what it raises is ignored."""
        self._load = load
        self._child: _Child | None = None

    def start(self) -> None:
        """Starts the child, if there is none."""
        if self._child is None:
            self._child = _Child(self._load)

    def close(self) -> None:
        """Ends the child, if there is one."""
        if self._child is not None:
            child = self.take()
            child.kill()
            child.remove()

    def take(self) -> _Child:
        """The child, which is started if there is none; it is the caller's to end."""
        self.start()
        assert self._child is not None
        child, self._child = self._child, None
        return child


def run_isolated(
    function: str,
    argument: Any,
    *,
    timeout: float | None = None,
    memory_limit_bytes: int | None = None,
    breadcrumb: Callable[[str], None] | None = None,
    standby: Standby | None = None,
    stop: threading.Event | None = None,
) -> WorkerResult:
    """Call `function(argument, enter)` in a process of its own and tell how that ended.

    Nothing outlives the call: when it returns or raises (Ctrl-C), the child and all its descendants are gone, and so is
    the folder they used.

    Args:
        function: Where the function is, as `module:name`. It takes the argument and `enter`, which it calls with the
            name of each stage that it enters; what it returns must be picklable.
        argument: Anything picklable.
        timeout: Seconds until everything is killed; None for no limit.
        memory_limit_bytes: Resident bytes, descendants included, above which everything is killed; None for no limit.
        breadcrumb: Called in this process with the name of each stage, soon after the child has entered it.
        standby: Its child is used up.
        stop: Another thread sets it to end the call.

    Raises:
        HarnessError: The function raised it: the input or the environment is at fault, not what was tried.
        Stopped: `stop` was set before the child had ended.
    """
    child = _Child() if standby is None else standby.take()
    try:
        call = _Call(child, breadcrumb or (lambda stage: None))
        try:
            child.ask({"function": function, "argument": argument, "path": sys.path})
            limit_hit = call.watch(timeout, memory_limit_bytes, stop or threading.Event())
        finally:
            call.end()
        return _result(call, limit_hit)
    finally:
        child.remove()


class _Child:
    """An interpreter that waits for its request, and the folder that it shares with this process."""

    def __init__(self, load: str = "") -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="sam3-tvm-worker-")
        self.folder = Path(self._temporary.name)
        with (self.folder / "output").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "harness.worker", str(self.folder), load],
                stdin=subprocess.PIPE,  # a byte says that the request is there, the end that this process is gone
                stdout=output,
                stderr=output,
                bufsize=0,
                env=child_environment(),
                start_new_session=True,
            )

    def ask(self, request: dict[str, Any]) -> None:
        """Hand over what to do."""
        (self.folder / "request").write_bytes(pickle.dumps(request))
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died while it loaded: waiting for it will tell
            self.process.stdin.write(b"\n")

    def kill(self) -> None:
        """Kill the child and its process group, and collect the child."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def remove(self) -> None:
        """Remove the folder."""
        self._temporary.cleanup()


def child_environment() -> dict[str, str]:
    """This process's environment, such that another Python finds this package too."""
    root = str(Path(__file__).resolve().parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


@dataclass
class _Call:
    """A running child, seen from the parent."""

    child: _Child
    breadcrumb: Callable[[str], None]
    started: float = field(default_factory=time.time)
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    crumbs: list[Breadcrumb] = field(default_factory=list)
    family: dict[int, Any] = field(default_factory=dict)
    kept_output: bytes = b""
    read_until: int = 0

    def watch(self, timeout: float | None, memory_limit: int | None, stop: threading.Event) -> CaseError | None:
        """Wait until the child ends; returns the limit that it broke, if it did.

        Raises:
            Stopped: `stop` was set first.
        """
        clock = time.monotonic()
        pause = _FASTEST_POLL
        while True:
            ended = self.child.process.poll() is not None
            self.seconds = time.monotonic() - clock
            self._read_breadcrumbs()
            if ended:
                return None
            if stop.is_set():
                raise Stopped
            resident = self._resident_bytes()
            if memory_limit is not None and resident > memory_limit:
                message = f"{_size(resident)} resident, over the limit of {_size(memory_limit)}"
                return CaseError("MemoryLimit", message + self._where())
            if timeout is not None and self.seconds >= timeout:
                return CaseError("TimeLimit", f"still running after {timeout:g} s" + self._where())
            self._trim_output()
            left = float("inf") if timeout is None else timeout - self.seconds
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.process.wait(max(0.0, min(pause, left)))
            pause = min(pause * 1.3, _SLOWEST_POLL)

    def end(self) -> None:
        """Kill whatever is left of the child and its descendants, and collect the child."""
        import psutil

        self._note_family()
        self.child.kill()
        for process in self.family.values():  # those that left the process group
            with contextlib.suppress(psutil.Error):
                process.kill()

    def output_tail(self) -> str:
        """The end of what the child and its descendants printed."""
        with (self.child.folder / "output").open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - DETAILS_BYTES))
            text = self.kept_output + file.read()
        return text[-DETAILS_BYTES:].decode("utf-8", errors="replace")

    def _where(self) -> str:
        return f", in stage {self.crumbs[-1].stage}" if self.crumbs else ""

    def _read_breadcrumbs(self) -> None:
        try:
            with (self.child.folder / "breadcrumbs").open("rb") as file:
                file.seek(self.read_until)
                new = file.read()
        except FileNotFoundError:
            return
        complete = new[: new.rfind(b"\n") + 1]
        self.read_until += len(complete)
        for line in complete.decode().splitlines():
            instant, _, stage = line.partition(" ")
            self.crumbs.append(Breadcrumb(stage, float(instant) - self.started))
            self.breadcrumb(stage)

    def _note_family(self) -> None:
        import psutil

        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.child.process.pid).children(recursive=True):
                self.family.setdefault(process.pid, process)

    def _resident_bytes(self) -> int:
        import psutil

        self._note_family()
        total = 0
        with contextlib.suppress(psutil.Error):
            total += int(psutil.Process(self.child.process.pid).memory_info().rss)
        for process in self.family.values():
            with contextlib.suppress(psutil.Error):
                total += int(process.memory_info().rss)
        self.peak_rss_bytes = max(self.peak_rss_bytes, total)
        return total

    def _trim_output(self) -> None:
        path = self.child.folder / "output"
        if path.stat().st_size > OUTPUT_BYTES:
            self.kept_output = self.output_tail().encode()
            os.truncate(path, 0)


def _result(call: _Call, limit_hit: CaseError | None) -> WorkerResult:
    def ended(kind: WorkerEnd, value: Any = None, error: CaseError | None = None, own_peak: int = 0) -> WorkerResult:
        peak = max(call.peak_rss_bytes, own_peak)
        return WorkerResult(kind, value, error, tuple(call.crumbs), call.seconds, peak)

    tail = call.output_tail()
    if limit_hit is not None:
        kind = WorkerEnd.TIMED_OUT if limit_hit.type == "TimeLimit" else WorkerEnd.OUT_OF_MEMORY
        return ended(kind, error=CaseError(limit_hit.type, limit_hit.message, tail))
    try:
        answer = pickle.loads((call.child.folder / "answer").read_bytes())
    except FileNotFoundError:
        return ended(WorkerEnd.CRASHED, error=_crash(call.child.process.returncode, call._where(), tail))
    kind = WorkerEnd(answer["kind"])
    if kind is WorkerEnd.OK:
        return ended(kind, answer["value"], own_peak=answer["peak_rss_bytes"])
    if answer["user_error"]:
        raise HarnessError(answer["message"])
    error = CaseError(answer["type"], answer["message"], answer["details"])
    return ended(kind, error=error, own_peak=answer["peak_rss_bytes"])


def _crash(returncode: int, where: str, tail: str) -> CaseError:
    if returncode >= 0:
        return CaseError("ExitCode", f"the process ended with exit code {returncode} and no answer{where}", tail)
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = ": somebody killed it, perhaps the system for lack of memory" if name == "SIGKILL" else ""
    return CaseError(name, f"the process died of {name}{where}{hint}", tail)


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def main(folder: Path, load: str) -> None:
    """The child: load, wait, answer the request in `folder` and end, without the teardown of native libraries."""
    import faulthandler

    faulthandler.enable()
    asked = _asked_by_parent()
    if load:
        with contextlib.suppress(Exception):  # whoever needs what is missing will say so
            _named(load)()
    asked.wait()
    try:
        answer = pickle.dumps(_answer(folder))
    except Exception as error:
        answer = pickle.dumps(_failure(error))
    unfinished = folder / "answer.unfinished"
    unfinished.write_bytes(answer)
    os.replace(unfinished, folder / "answer")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _answer(folder: Path) -> dict[str, Any]:
    crumbs = os.open(folder / "breadcrumbs", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def enter(stage: str) -> None:
        os.write(crumbs, f"{time.time()} {' '.join(stage.splitlines())}\n".encode())

    try:
        request = pickle.loads((folder / "request").read_bytes())
        sys.path[:] = request["path"]
        value = _named(request["function"])(request["argument"], enter)
    except Exception as error:
        return _failure(error)
    return {"kind": WorkerEnd.OK.value, "value": value, "peak_rss_bytes": _own_peak()}


def _named(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _failure(error: Exception) -> dict[str, Any]:
    kind = WorkerEnd.OUT_OF_MEMORY if _lacks_memory(error) else WorkerEnd.FAILED
    return {
        "kind": kind.value,
        "type": type(error).__name__,
        "message": str(error),
        "details": "".join(traceback.format_exception(error))[-DETAILS_BYTES:],
        "user_error": isinstance(error, HarnessError | Sam3Error),
        "peak_rss_bytes": _own_peak(),
    }


def _lacks_memory(error: Exception) -> bool:
    # torch's CPU allocator raises a plain RuntimeError
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def _own_peak() -> int:
    """Largest resident set of this process since it was started, 0 where the system does not tell.

    Not getrusage: Linux lets its maximum start at the parent's resident set.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    lines = [line.split() for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(lines[0][1]) * 1024 if lines else 0


def _asked_by_parent() -> threading.Event:
    """Set by a byte on stdin, whose other end the parent holds; once that ends, this process group is killed."""
    parent = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    asked = threading.Event()

    def listen() -> None:
        while os.read(parent, 1):
            asked.set()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=listen, name="die-with-parent", daemon=True).start()
    return asked


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
