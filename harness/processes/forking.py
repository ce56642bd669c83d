"""The template's own program: load, then fork a child for each folder whose name comes in.

A name is a line of stdin, the answer to it a line of stdout with the child's process id. When a child ends, its exit
code is left in its folder, in the file `ended`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from harness.files import whole
from harness.processes.child import answer_and_end, named


def main(load: str) -> None:
    """Calls `load` (as `module:name`) to load the libraries, then forks until stdin ends.

    No GPU is seen: PyTorch asks CUDA for its random state where there is one, and its driver survives no fork.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    answers = os.dup(1)
    os.dup2(2, 1)  # what is printed while loading is no answer
    gc.disable()  # collections take a quarter of the time of imports, and find nothing
    with contextlib.suppress(Exception):  # whoever needs what is missing will say so
        named(load)()
    gc.enable()
    gc.collect()
    gc.freeze()  # a collection in a child would otherwise touch, and so copy, every object loaded here

    folders: dict[int, Path] = {}
    signal.signal(signal.SIGCHLD, lambda *_: _collect(folders))
    for folder in _lines():
        # Not before the child is known: it may end at once.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # in both processes, because each relies on it at once
        if pid == 0:
            os.close(answers)  # whose end tells the parent that the template is gone
            _become_child(Path(folder))
        folders[pid] = Path(folder)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.write(answers, f"{pid}\n".encode())


def _lines() -> Iterator[str]:
    """Yields the lines of stdin, without Python's buffer, whose contents a fork would inherit."""
    rest = b""
    while more := os.read(0, 4096):
        *lines, rest = (rest + more).split(b"\n")
        yield from (line.decode() for line in lines)


def _collect(folders: dict[int, Path]) -> None:
    """Notes how children ended; nobody waits any more for one whose folder is gone."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            folder = folders.pop(pid)
            with contextlib.suppress(FileNotFoundError), whole(folder / "ended") as unfinished:
                unfinished.write_text(str(os.waitstatus_to_exitcode(status)))


def _become_child(folder: Path) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    for name, flags, descriptors in (("alive", os.O_RDONLY, (0,)), ("output", os.O_WRONLY | os.O_APPEND, (1, 2))):
        opened = os.open(folder / name, flags)
        for descriptor in descriptors:
            os.dup2(opened, descriptor)
        os.close(opened)
    answer_and_end(folder)


if __name__ == "__main__":
    main(sys.argv[1])
