"""Starts programs as forks of this process, which has loaded their libraries, in place of fresh interpreters."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NoReturn

from harness.core.processes import call, timed_calls

Streams = tuple[int, int, int]
"""File descriptors of a program's stdin, stdout and stderr."""


class ForkedPython:
    """A fork that runs a module as a program, with the part of `subprocess.Popen` that the project uses.

    Attributes:
        pid: Process id, which is also the id of its session.
        stdin: The pipe to its stdin.
        stdout: The pipe from its stdout, if there is one.
        returncode: Its exit code, None while it runs as far as is known.
    """

    def __init__(self, fork: Callable[[Streams], int], stdout: int) -> None:
        """Calls `fork`, which starts the program with these streams and returns its process id."""
        given, to_child = os.pipe()
        from_child, output = os.pipe() if stdout == subprocess.PIPE else (None, stdout)
        errors = os.open(os.devnull, os.O_WRONLY)
        if stdout == subprocess.DEVNULL:
            output = errors
        self.pid = fork((given, output, errors if stdout == subprocess.PIPE else output))
        self.returncode: int | None = None
        self.stdin: BinaryIO | None = os.fdopen(to_child, "wb", 0)
        self.stdout: BinaryIO | None = None if from_child is None else os.fdopen(from_child, "rb", 0)
        for descriptor in {given, errors, *([output] if from_child is not None else [])}:
            os.close(descriptor)

    def poll(self) -> int | None:
        """Returns the exit code, None while it runs."""
        return self._collect(os.WNOHANG)

    def wait(self) -> int | None:
        """Waits for the end, and returns the exit code."""
        return self._collect(0)

    def _collect(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _fork(module: str, arguments: Iterable[str], inherited: Iterable[int], streams: Streams) -> int:
    if not (pid := os.fork()):
        os.setsid()
        become(module, arguments, streams, inherited)
    return pid


def become(module: str, arguments: Iterable[str], streams: Streams, inherited: Iterable[int] = ()) -> NoReturn:
    """Runs a module as a program that has begun: it handles no signals, and has these files and no others open."""
    try:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        for descriptor, stream in enumerate(streams):
            os.dup2(stream, descriptor)
        for descriptor in {int(path.name) for path in Path("/proc/self/fd").iterdir()} - {0, 1, 2, *inherited}:
            with contextlib.suppress(OSError):  # that of the folder, which is closed
                os.close(descriptor)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        tempfile.tempdir = None
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        os._exit(1)


def fork_programs(*inherited: int) -> None:
    """Makes the project fork its processes from this one, with these files open as well."""

    def fork_python(
        module: str,
        *arguments: str,
        stdout: int,
        pass_fds: tuple[int, ...] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> ForkedPython:
        known = dict(os.environ)
        os.environ.update(variables)
        try:
            return ForkedPython(partial(_fork, module, arguments, (*inherited, *pass_fds)), stdout)
        finally:
            os.environ.clear()
            os.environ.update(known)

    call.start_python = timed_calls.start_python = fork_python  # type: ignore[assignment]
