"""Runs work that something ends at a chosen moment, in processes that are forked off this program:

python -m conformance.support.interrupted

It reads requests, one a line, and tells for each the exit code and how many moments the work had. A moment is right
before a file or folder is opened, made, renamed, cut or removed, so that it is the same in every run.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av  # noqa: F401  # not in each fork
import PIL.ImageDraw  # noqa: F401

from conformance.support.known_answers import KnownSegmenter, KnownTracker
from harness.app.segment import job as segmenting
from harness.app.track import job as tracking
from harness.cli.main import exit_code
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


def _in_fork(request: dict[str, Any]) -> int:
    """Does the work, is ended at the moment, and returns the exit code of the command."""
    out, moments = Path(request["out"]), 0
    sys.stderr = io.StringIO()
    inside = tuple(str(Path(folder)) for folder in (out.parent, os.environ["TMPDIR"]))

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal moments
        if event not in _EVENTS or (event == "open" and not str(arguments[0]).startswith(inside)):
            return
        moments += 1
        if moments != request["moment"]:
            return
        if request["how"] == FULL_DISK:
            # No file can grow any more, nor a new one get anything.
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        else:
            os.kill(os.getpid(), signal.Signals[request["how"]])

    sys.addaudithook(count)
    code = exit_code(lambda: WORKS[request["work"]](Path(request["pictures"]), out))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    os.write(1, json.dumps([moments, sys.stderr.getvalue()]).encode())
    return code


def main() -> None:
    """Answers each request with a line of JSON: exit code, moments of the work (0 if it was killed), what it told."""
    tempfile.gettempdir()  # which tries a file, once in a process
    for line in sys.stdin:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.dup2(writer, 1)
            os._exit(_in_fork(json.loads(line)))
        os.close(writer)
        with open(reader) as told:  # noqa: PTH123
            answer = json.loads(told.read() or '[0, ""]')
        _, status = os.waitpid(child, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), *answer]), flush=True)


if __name__ == "__main__":
    main()
