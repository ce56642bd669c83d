"""The process of a call: answer the request that is in a folder, and end."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from harness.core.errors import HarnessError
from harness.files import whole
from harness.processes.call import DETAILS_BYTES, WorkerEnd
from harness.processes.threads import configure_threads
from harness.runtime.errors import Sam3Error

_STARTED_WITH = dict(os.environ)
"""The environment of this process, or of the template that it was forked off, before anything was loaded."""


def answer_and_end(folder: Path) -> NoReturn:
    """Answers the request in `folder` and ends, without the teardown of native libraries."""
    faulthandler.enable()
    die_with_parent()
    try:
        answer = pickle.dumps(_answer(folder))
    except Exception as error:
        answer = pickle.dumps(_failure(error))
    with whole(folder / "answer") as unfinished:
        unfinished.write_bytes(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def named(function: str) -> Callable[..., Any]:
    """Imports the function that `module:name` names."""
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _answer(folder: Path) -> dict[str, Any]:
    crumbs = os.open(folder / "breadcrumbs", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def on_stage(stage: str) -> None:
        os.write(crumbs, f"{time.time()} {' '.join(stage.splitlines())}\n".encode())

    try:
        request = pickle.loads((folder / "request").read_bytes())
        sys.path[:] = request["path"]
        os.chdir(request["directory"])
        _take_environment(request["environment"])
        configure_threads(request["threads"])
        _keep_files_in(folder)
        value = named(request["function"])(request["argument"], on_stage)
    except Exception as error:
        return _failure(error)
    return {"kind": WorkerEnd.OK.value, "value": value, "peak_rss_bytes": _own_peak()}


def _take_environment(environment: dict[str, str]) -> None:
    """Makes the environment the caller's; what libraries have set while they were loaded stays."""
    for name in _STARTED_WITH.keys() - environment.keys():
        os.environ.pop(name, None)
    os.environ.update(environment)


def _keep_files_in(folder: Path) -> None:
    """Makes temporary files, those of programs that are started too, go with the call, however it ends."""
    own = folder / "temporary"
    own.mkdir()
    os.environ["TMPDIR"] = str(own)
    tempfile.tempdir = None  # where they were before a fork


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
    """Returns the largest resident set of this process since it was started, 0 where the system does not tell.

    Not getrusage: Linux lets its maximum start at the parent's resident set.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    lines = [line.split() for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(lines[0][1]) * 1024 if lines else 0


def die_with_parent() -> None:
    """Kills this process group once stdin ends, whose other end the parent holds."""
    parent = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def listen() -> None:
        os.read(parent, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=listen, name="die-with-parent", daemon=True).start()


if __name__ == "__main__":
    gc.set_threshold(50_000)  # instead of 700: collections while libraries are imported take a seventh of that time
    answer_and_end(Path(sys.argv[1]))
