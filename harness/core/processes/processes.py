"""Starts, forks and kills the processes of calls, on the parent's side."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

CAN_FORK = sys.platform == "linux"
"""True where processes can be forked; Apple's frameworks, which torch loads on a Mac, fail in a fork."""

_POLL = 0.01


class Stopped(Exception):
    """Raised if another thread ended the call."""


class Process(Protocol):
    """A running call.

    Attributes:
        pid: Process id, which is also the id of its process group.
    """

    pid: int

    def poll(self) -> int | None:
        """Returns the exit code, negative if a signal ended the process; None while it runs."""

    def kill(self) -> int:
        """Kills the process group, waits for the end, and returns the exit code."""


class Spawned:
    """A fresh interpreter that answers the request in a folder."""

    def __init__(self, folder: Path) -> None:
        """Starts the interpreter."""
        with (folder / "output").open("ab") as output:
            self._process = start_python("harness.core.processes.child", str(folder), stdout=output.fileno())
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Returns the exit code, or None while the interpreter runs."""
        return self._process.poll()

    def kill(self) -> int:
        """Kills the process group, and returns the exit code."""
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

    def process(self, folder: Path, stop: threading.Event) -> Process:
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
    """A fork of a template that answers the request in a folder; the template writes its exit code there."""

    def __init__(self, template: subprocess.Popen[bytes], folder: Path, pid: int, alive: int) -> None:
        """Takes the file descriptor whose end tells the fork that this process is gone."""
        self._template = template
        self._exit_file = folder / "ended"
        self._alive: int | None = alive
        self.pid = pid

    def poll(self) -> int | None:
        """Returns the exit code; a process that ends after the template is gone counts as killed."""
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
    import psutil

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
