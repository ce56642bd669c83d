"""Runs `sam3-tvm` as a user does, in forks of a program that has loaded PyTorch, TVM and SAM 3:

python -m conformance.support.commands [bare]

A fork has the folder, the environment and the exit code of a process of its own, and the processes that it starts are
forks as well. It saves the seconds that a fresh interpreter takes to load those libraries. Tests of signals, of threads
and of what is imported start interpreters. `start_python` forks what a test starts by way of `harness.core.processes`.
Forks of the program that is `bare` have what a base install has.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from conformance.support.bare import BARE, IMPORTS
from conformance.support.forked import ForkedPython, Streams, become, fork_programs
from harness.core.processes.call import CAN_FORK, child_environment
from harness.core.settings import REPOSITORY

SECONDS = 900
"""Seconds after which a command is ended."""
_SET_CHILD_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of <linux/prctl.h>."""


def run_command(
    *arguments: str,
    folder: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    bare: bool = False,
    largest_file: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder, and returns its exit code and what it printed.

    Args:
        arguments: The command's.
        folder: The folder; by default this process's.
        environment: Its variables.
        bare: Whether it has what a base install has.
        largest_file: Bytes beyond which no file can grow that it or its processes write.
    """
    code = BARE if bare else "import runpy\nrunpy.run_module('harness', run_name='__main__', alter_sys=True)"
    return run_code(code, *arguments, folder=folder, environment=environment, bare=bare, largest_file=largest_file)


def run_code(
    code: str,
    *arguments: str,
    folder: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    bare: bool = False,
    largest_file: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs Python code as `run_command` a command."""
    words = [sys.executable, "-c", code, *arguments]
    variables = {"PYTHONPATH": str(REPOSITORY)} | dict(environment)
    if not CAN_FORK:
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            cwd=folder,
            env=variables,
            timeout=SECONDS,
            check=False,
            preexec_fn=lambda: _limit_files(largest_file),
        )
    with tempfile.TemporaryDirectory(prefix="command-") as temporary:
        files = [Path(temporary) / name for name in ("stdout", "stderr")]
        request = {"code": code, "arguments": arguments, "environment": variables, "largest_file": largest_file}
        request |= {"folder": str(folder or Path.cwd()), "files": list(map(str, files))}
        exit_code = _ask(request, "bare" if bare else "")
        return subprocess.CompletedProcess(words, exit_code, *(file.read_text() for file in files))


def start_python(
    module: str, *arguments: str, stdout: int, variables: Mapping[str, str] = MappingProxyType({})
) -> ForkedPython:
    """Does what `harness.core.processes.call.start_python` does, with a fork in place of a fresh interpreter."""

    def fork(streams: Streams) -> int:
        request = {"program": [module, *arguments], "files": [f"/proc/{os.getpid()}/fd/{file}" for file in streams]}
        with _adopting():
            return _ask(request | {"folder": str(Path.cwd()), "environment": {**child_environment(), **variables}})

    return ForkedPython(fork, stdout)


@contextmanager
def _adopting() -> Iterator[None]:
    """Makes this process the parent of descendants whose parent ends."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _limit_files(largest: int | None) -> None:
    if largest is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))


@cache
def _program(kind: str) -> subprocess.Popen[str]:
    """Starts a program, once in this process; it ends with this process."""
    command = [sys.executable, "-m", "conformance.support.commands", *filter(None, [kind])]
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    atexit.register(program.communicate)
    return program


def _ask(request: dict[str, Any], kind: str = "") -> int:
    program = _program(kind)
    assert program.stdin is not None and program.stdout is not None
    program.stdin.write(f"{json.dumps(request)}\n")
    program.stdin.flush()
    return int(program.stdout.readline())


def _become(request: dict[str, Any]) -> NoReturn:
    """Runs code as the main program of this fork."""
    code: Any = 1
    try:
        signal.alarm(SECONDS)
        for descriptor, file in enumerate([os.devnull, *request["files"]]):
            opened = os.open(file, os.O_RDONLY if not descriptor else os.O_WRONLY | os.O_CREAT)
            os.dup2(opened, descriptor)
            os.close(opened)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        tempfile.tempdir = None
        _limit_files(request["largest_file"])
        fork_programs()
        sys.argv = ["sam3-tvm", *request["arguments"]]
        exec(request["code"], {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else code is not None)


def _start(request: dict[str, Any]) -> int:
    """Starts a program, whose parent becomes the process that this one is a child of, and returns its process id."""
    reader, writer = os.pipe()
    if not (between := os.fork()):
        try:
            if not os.fork():
                os.setsid()
                flags = (os.O_RDONLY, os.O_WRONLY | os.O_APPEND, os.O_WRONLY | os.O_APPEND)
                streams = tuple(map(os.open, request["files"], flags))
                os.chdir(request["folder"])
                os.environ.clear()
                os.environ.update(request["environment"])
                os.write(writer, str(os.getpid()).encode())  # whoever asked may close its ends of the streams now
                module, *arguments = request["program"]
                become(module, arguments, streams)
        finally:
            os._exit(0)
    os.waitpid(between, 0)
    os.close(writer)
    try:
        return int(os.read(reader, 32))
    finally:
        os.close(reader)


def main() -> None:
    """Answers each request with the exit code of its command, or the process id of its program."""
    if sys.argv[1:]:
        exec(IMPORTS, {})
        import harness.app.track.job
        import harness.cli.segment_display  # noqa: F401
    else:
        from harness.models.registry import models, subjects
        from harness.verify.stages import load_libraries

        load_libraries()
        for known in (models, subjects):
            known.cache_clear()  # a command may bring models of its own
    gc.collect()
    gc.freeze()  # a collection in a fork would otherwise copy every object
    for line in sys.stdin:
        request = json.loads(line)
        if "program" in request:
            print(_start(request), flush=True)
            continue
        if not (child := os.fork()):
            _become(request)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # libraries tell of leaks
