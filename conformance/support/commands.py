"""Runs `sam3-tvm` as a user does, in forks of a program that has loaded PyTorch, TVM and SAM 3:

python -m conformance.support.commands

A fork has the folder, the environment and the exit code of a process of its own, and the processes that it starts are
forks as well. It saves the seconds that a fresh interpreter takes to load those libraries. Tests of signals, of threads
and of what is imported start interpreters.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from conformance.support.forked import fork_programs
from harness.core.processes.call import CAN_FORK
from harness.core.settings import REPOSITORY

SECONDS = 900
"""Seconds after which a command is ended."""


def run_command(
    *arguments: str, folder: Path | None = None, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder, and returns its exit code and what it printed."""
    words = [sys.executable, "-m", "harness", *arguments]
    variables = {"PYTHONPATH": str(REPOSITORY)} | dict(environment)
    if not CAN_FORK:
        return subprocess.run(
            words, capture_output=True, text=True, cwd=folder, env=variables, timeout=SECONDS, check=False
        )
    with tempfile.TemporaryDirectory(prefix="command-") as temporary:
        files = [Path(temporary) / name for name in ("stdout", "stderr")]
        request = {"arguments": arguments, "folder": str(folder or Path.cwd()), "files": list(map(str, files))}
        code = _ask(request | {"environment": variables})
        return subprocess.CompletedProcess(words, code, *(file.read_text() for file in files))


@cache
def _program() -> subprocess.Popen[str]:
    """Starts the program, once in this process; it ends with this process."""
    command = [sys.executable, "-m", "conformance.support.commands"]
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    atexit.register(program.communicate)
    return program


def _ask(request: dict[str, Any]) -> int:
    program = _program()
    assert program.stdin is not None and program.stdout is not None
    program.stdin.write(f"{json.dumps(request)}\n")
    program.stdin.flush()
    return int(program.stdout.readline())


def _become(request: dict[str, Any]) -> NoReturn:
    """Runs a command as the main program of this fork."""
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
        fork_programs()
        sys.argv = ["sam3-tvm", *request["arguments"]]
        runpy.run_module("harness", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else code is not None)


def main() -> None:
    """Answers each request with the exit code of its command."""
    from harness.models.registry import models, subjects
    from harness.verify.stages import load_libraries

    load_libraries()
    for known in (models, subjects):
        known.cache_clear()  # a command may bring models of its own
    gc.collect()
    gc.freeze()  # a collection in a fork would otherwise copy every object
    for line in sys.stdin:
        if not (child := os.fork()):
            _become(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # libraries tell of leaks
