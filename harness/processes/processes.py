"""The processes of calls, as their parent sees them: spawned, or forked off a template that has loaded libraries."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Protocol

CAN_FORK = sys.platform == "linux"
"""Apple's frameworks, which torch loads on a Mac, do not work in a forked process."""

_POLL = 0.01


class Stopped(Exception):
    """A call was ended by whoever had made it."""


class Process(Protocol):
    """A running call.

    Attributes:
        pid: Its process id, which is also that of its process group.
    """

    pid: int

    def poll(self) -> int | None:
        """Its exit code, negative if a signal ended it; None while it runs."""

    def kill(self) -> int:
        """Kills its process group, waits for its end, and returns its exit code."""


class Spawned:
    """A fresh interpreter, which answers the request in a folder."""

    def __init__(self, folder: Path) -> None:
        """Starts it."""
        with (folder / "output").open("ab") as output:
            self._process = start_python("harness.processes.child", str(folder), stdout=output.fileno())
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Does what `Process` says."""
        return self._process.poll()

    def kill(self) -> int:
        """Does what `Process` says."""
        return kill_and_collect(self._process)


class Template:
    """A process that loads libraries once and forks for each call that needs them.

    Where processes cannot be forked, there is none, and each call gets a fresh interpreter. Several threads may use it.
    """

    def __init__(self, load: str) -> None:
        """Starts nothing yet. `load` is a function without arguments, as `module:name`; what it raises is ignored.

        It must start no threads: they would be missing in the forks.
        """
        self._load = load
        self._process: subprocess.Popen[bytes] | None = None
        self._one_at_a_time = threading.Lock()

    @property
    def runs(self) -> bool:
        """Whether there is a process to fork."""
        return self._process is not None and self._process.poll() is None

    def process(self, folder: Path, stop: threading.Event) -> Process:
        """Returns a new process that answers the request in a folder; the template is started if it does not run.

        If the template ends while it loads, that is a fresh interpreter: it will tell why.

        Args:
            folder: Folder of the call.
            stop: Another thread sets it to give up while the template loads.

        Raises:
            Stopped: `stop` was set; the template has ended.
        """
        if not CAN_FORK:
            return Spawned(folder)
        with self._one_at_a_time:
            if stop.is_set():
                raise Stopped
            if not self.runs:
                self.close()
                self._process = start_python("harness.processes.forking", self._load, stdout=subprocess.PIPE)
            assert self._process is not None
            try:
                return _forked(self._process, folder, stop) or Spawned(folder)
            except BaseException:  # interrupted: its next answer would be this call's
                self.close()
                raise

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            process, self._process = self._process, None
            kill_and_collect(process)


class _Forked:
    """A fork of a template, which answers the request in a folder and whose exit code the template leaves there."""

    def __init__(self, template: subprocess.Popen[bytes], folder: Path, pid: int, alive: int) -> None:
        """Takes the file descriptor whose end tells the process that this one is gone."""
        self._template = template
        self._ended = folder / "ended"
        self._alive: int | None = alive
        self.pid = pid

    def poll(self) -> int | None:
        """Does what `Process` says; a process that ends while the template is gone counts as killed."""
        template_runs = self._template.poll() is None
        with contextlib.suppress(FileNotFoundError):
            return int(self._ended.read_text())
        return None if template_runs else -signal.SIGKILL

    def kill(self) -> int:
        """Does what `Process` says."""
        _kill_group(self.pid)
        while (code := self.poll()) is None:
            time.sleep(_POLL)
        if self._alive is not None:
            os.close(self._alive)
            self._alive = None
        return code


def _forked(template: subprocess.Popen[bytes], folder: Path, stop: threading.Event) -> _Forked | None:
    """Returns a fork that answers the request in a folder; None if the template has ended."""
    assert template.stdin is not None and template.stdout is not None
    with (folder / "output").open("ab"):
        pass
    os.mkfifo(folder / "alive")
    # Both ways: opened for writing alone, it would wait for the reader.
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
    """This process's environment, such that another Python finds this package too."""
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def start_python(module: str, *arguments: str, stdout: int, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    """Starts a module as a program in a session of its own, where Ctrl-C does not reach it.

    It imports nothing from the current folder (`-P`), which may hold anybody's files. The end of its stdin tells it
    that this process is gone: see `harness.processes.child.die_with_parent`.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.DEVNULL if stdout == subprocess.PIPE else subprocess.STDOUT,
        bufsize=0,
        pass_fds=pass_fds,
        env=child_environment(),
        start_new_session=True,
    )


def kill_and_collect(process: subprocess.Popen[bytes]) -> int:
    """Kills a process with its group, closes the pipes to it, and gives its exit code."""
    import psutil

    # When it was collected, its number may be another's by now; what is left of its group keeps the number free.
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
