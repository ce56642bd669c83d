"""Runs the call whose request is in a folder, as the main program of an isolated process."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import shutil
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
from harness.core.files import full_disk, replace_file
from harness.core.outcome import CaseError
from harness.core.processes.call import DETAILS_BYTES, ROOM, WorkerEnd, WorkerResult
from harness.core.processes.threads import configure_threads
from harness.runtime.errors import ModelError

_TEMPORARY = "temporary"
_INITIAL_ENVIRONMENT = dict(os.environ)
"""The environment of this process, or of its template, before any library was loaded."""


def answer_and_end(folder: Path) -> NoReturn:
    """Runs the request in `folder` and exits without the teardown of native libraries."""
    faulthandler.enable()
    die_with_parent()
    try:
        answer = pickle.dumps(_answer(folder))
    except Exception as error:
        answer = pickle.dumps(_failure(error))
    try:
        _write_answer(folder, answer)
    except OSError as error:
        (folder / ROOM).unlink(missing_ok=True)
        shutil.rmtree(folder / _TEMPORARY, ignore_errors=True)
        _write_answer(folder, pickle.dumps(_failure(error)))
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _write_answer(folder: Path, answer: bytes) -> None:
    with replace_file(folder / "answer") as temporary:
        temporary.write_bytes(answer)


def import_function(function: str) -> Callable[..., Any]:
    """Imports the function with the name `module:name`."""
    module, _, name = function.partition(":")
    imported: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return imported


def _answer(folder: Path) -> WorkerResult | HarnessError:
    """Returns what the function returned or how it failed, or the sentence for the user."""
    breadcrumbs = os.open(folder / "breadcrumbs", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def on_stage(stage: str) -> None:
        os.write(breadcrumbs, f"{time.time()} {' '.join(stage.splitlines())}\n".encode())

    try:
        request = pickle.loads((folder / "request").read_bytes())
        sys.path[:] = request["path"]
        os.chdir(request["directory"])
        _apply_environment(request["environment"])
        configure_threads(request["threads"])
        _redirect_temporary_files(folder)
        value = import_function(request["function"])(*request["arguments"], on_stage)
    except Exception as error:
        return _failure(error)
    return WorkerResult(WorkerEnd.OK, value, peak_rss_bytes=_peak_rss_bytes())


def _apply_environment(environment: dict[str, str]) -> None:
    """Makes the environment the caller's, but keeps what libraries have set while they were loaded."""
    for name in _INITIAL_ENVIRONMENT.keys() - environment.keys():
        os.environ.pop(name, None)
    os.environ.update(environment)


def _redirect_temporary_files(folder: Path) -> None:
    """Puts temporary files, including those of started programs, into the folder of the call."""
    temporary = folder / _TEMPORARY
    temporary.mkdir()
    os.environ["TMPDIR"] = str(temporary)
    tempfile.tempdir = None  # it may be set from before a fork


def _failure(error: Exception) -> WorkerResult | HarnessError:
    sentence = str(error) if isinstance(error, HarnessError | ModelError) else full_disk(error)
    if sentence is not None:
        return HarnessError(sentence)
    # torch's CPU allocator raises a plain RuntimeError
    is_memory_error = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
    kind = WorkerEnd.OUT_OF_MEMORY if is_memory_error else WorkerEnd.FAILED
    details = "".join(traceback.format_exception(error))[-DETAILS_BYTES:]
    case_error = CaseError(type(error).__name__, str(error), details)
    return WorkerResult(kind, error=case_error, peak_rss_bytes=_peak_rss_bytes())


def _peak_rss_bytes() -> int:
    """Returns the largest resident set of this process since its start, in bytes; 0 if the system does not tell.

    getrusage does not serve: on Linux its maximum starts at the parent's resident set.
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
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def wait_for_parent() -> None:
        os.read(parent, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait_for_parent, name="die-with-parent", daemon=True).start()


if __name__ == "__main__":
    gc.set_threshold(50_000)  # instead of 700: collections while libraries are imported take a seventh of that time
    answer_and_end(Path(sys.argv[1]))
