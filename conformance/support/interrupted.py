"""Runs work that something ends at a chosen moment, in processes that are forked off this program:

python -m conformance.support.interrupted

It reads requests, one a line, and tells for each the exit code and how many moments the work had. A moment is right
before a file or folder is written, made, renamed, cut or removed, so that it is the same in every run. A whole command
may be the work; the moments of the processes that it starts, which are forks as well, are its own.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import mmap
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import av  # noqa: F401  # not in each fork
import PIL.ImageDraw  # noqa: F401

from conformance.support import forked
from conformance.support.known_answers import KnownSegmenter, KnownTracker
from harness.app.segment import job as segmenting
from harness.app.track import job as tracking
from harness.cli.main import app, exit_code
from harness.core.files import replace_folder, temporary_folder
from harness.runtime import Prompt

_EVENTS = ("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate")
FULL_DISK = "full disk"


def segment(pictures: Path, out: Path) -> None:
    """Segments all pictures of a folder."""
    job = segmenting.Job(sorted(pictures.glob("*.png")), [Prompt("cat")], out, 0.5)
    segmenting.run(KnownSegmenter(), job)  # type: ignore[arg-type]


def track(pictures: Path, out: Path) -> None:
    """Tracks through the pictures of a folder, and saves the session after each."""
    job = tracking.Job(pictures, ["cat"], None, None, 0, out)
    tracking.run(KnownTracker(), job, lambda total: None, lambda: None, save_every=0)  # type: ignore[arg-type]


def replace(pictures: Path, out: Path) -> None:
    """Replaces a folder by one with the pictures, as `compile` and `pack` do, with temporary files besides."""
    with (
        temporary_folder("interrupted") as temporary,
        replace_folder(out, lambda folder: (folder / "0.png").is_file(), "pictures") as filling,
    ):
        for path in sorted(pictures.glob("*.png")):
            (temporary / path.name).write_bytes(path.read_bytes())
            (filling / path.name).write_bytes((temporary / path.name).read_bytes())


WORKS: dict[str, Callable[[Path, Path], None]] = {"segment": segment, "track": track, "replace": replace}


@cache
def load_libraries() -> None:
    """Loads what commands and their processes load."""
    import harness.compiler.deployment.compiling
    import harness.tuning.search  # noqa: F401
    from harness.verify import stages

    stages.load_libraries()
    gc.collect()
    gc.freeze()  # a collection in a fork would otherwise copy every object


def _begin(request: dict[str, Any]) -> Callable[[], Any]:
    """Returns the work; of a command, in a process that is as one in which it begins."""
    if "command" not in request:
        return lambda: WORKS[request["work"]](Path(request["pictures"]), Path(request["out"]))
    folder = Path(request["out"]).parent
    os.chdir(folder)
    os.environ |= {"TMPDIR": str(folder / "temporary"), "SAM3_TVM_CACHE": str(folder / "cache")}
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")  # PyTorch makes it among temporary files otherwise
    tempfile.tempdir = None
    sys.stdout = io.StringIO()
    return lambda: app(request["command"], standalone_mode=False)


def _in_fork(request: dict[str, Any], moments: mmap.mmap, writer: int) -> int:
    """Does the work, is ended at the moment, and returns the exit code of the command."""
    sys.stderr = io.StringIO()
    work, process = _begin(request), os.getpid()
    inside = tuple(str(Path(folder)) for folder in (Path(request["out"]).parent, os.environ["TMPDIR"]))
    forked.fork_programs(writer)

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _EVENTS or (event == "open" and not _is_written(inside, *arguments)):
            return
        number = int.from_bytes(moments[:8], "little") + 1
        moments[:8] = number.to_bytes(8, "little")
        if number != request["moment"]:
            return
        if request["how"] == FULL_DISK:
            # No file can grow any more, nor a new one get anything.
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            return
        os.kill(process, signal.Signals[request["how"]])
        with contextlib.suppress(ProcessLookupError):
            while os.getpid() != process:  # the command ends this process, which is at that moment, or is gone
                os.kill(process, 0)
                time.sleep(0.01)

    sys.addaudithook(count)
    try:
        code = exit_code(work)
    except Exception:
        code = 1
        traceback.print_exc()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    os.write(writer, sys.stderr.getvalue().encode())
    return code


def _is_written(inside: tuple[str, ...], path: Any, _mode: str | None, flags: int) -> bool:
    return str(path).startswith(inside) and bool(flags & (os.O_WRONLY | os.O_RDWR))


def _answer(request: dict[str, Any]) -> tuple[int, int, str]:
    """Returns the exit code, how many moments the work had until it ended, and what it told."""
    if "command" in request:
        load_libraries()
    moments = mmap.mmap(-1, mmap.PAGESIZE)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        os._exit(_in_fork(request, moments, writer))
    os.close(writer)
    _, status = os.waitpid(child, 0)
    told = b""
    # The pipe ends with the last of its processes.
    while ready := select.select([reader], [], [], 60)[0]:
        if not (part := os.read(reader, 1 << 16)):
            break
        told += part
    os.close(reader)
    if not ready:
        return 1, 0, f"processes are left: {told.decode()}"
    return os.waitstatus_to_exitcode(status), int.from_bytes(moments[:8], "little"), told.decode()


def main() -> None:
    """Answers each request with a line of JSON."""
    tempfile.gettempdir()  # which tries a file, once in a process
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a program that is forked handles no signal
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # libraries tell of leaks
