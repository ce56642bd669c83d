"""Loads libraries, then forks a child for each folder named on stdin, as the main program of a template.

Each line of stdin names a folder; the answer is a line of stdout with the child's process id. When a child ends, its
exit code is written to the file `ended` in its folder.
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

from harness.core.files import replace_file
from harness.core.processes.call import ROOM
from harness.core.processes.child import answer_and_end, import_function


def main(load: str) -> None:
    """Calls `load` (as `module:name`) to load the libraries, then forks until stdin ends.

    GPUs are hidden: PyTorch asks CUDA for its random state if there is a GPU, and CUDA's driver survives no fork.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    answers = os.dup(1)
    os.dup2(2, 1)  # output of the libraries is no answer
    gc.disable()  # collections take a quarter of the time of imports, and find nothing
    with contextlib.suppress(Exception):  # a child that needs a missing library reports it
        import_function(load)()
    gc.enable()
    gc.collect()
    gc.freeze()  # a collection in a child would otherwise touch, and so copy, every object loaded here

    folders: dict[int, Path] = {}
    signal.signal(signal.SIGCHLD, lambda *_: _collect(folders))
    for folder in _lines():
        # The child may end at once: its signal waits until the child is in `folders`.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # in both processes, because both rely on it at once
        if pid == 0:
            os.close(answers)  # its end tells the parent that the template is gone
            _become_child(Path(folder))
        folders[pid] = Path(folder)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.write(answers, f"{pid}\n".encode())


def _lines() -> Iterator[str]:
    """Yields the lines of stdin, without Python's buffer, whose contents a fork would inherit."""
    partial = b""
    while chunk := os.read(0, 4096):
        *lines, partial = (partial + chunk).split(b"\n")
        yield from (line.decode() for line in lines)


def _collect(folders: dict[int, Path]) -> None:
    """Writes how children ended, except for children whose folder is gone because nobody waits for them."""
    with contextlib.suppress(ChildProcessError):
        while (result := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = result
            folder = folders.pop(pid)
            code = str(os.waitstatus_to_exitcode(status))
            try:
                _write_exit_code(folder, code)
            except FileNotFoundError:
                continue
            except OSError:
                (folder / ROOM).unlink(missing_ok=True)
                _write_exit_code(folder, code)


def _write_exit_code(folder: Path, code: str) -> None:
    with replace_file(folder / "ended") as temporary:
        temporary.write_text(code)


def _become_child(folder: Path) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    # Opened blocking, a pipe whose other end is gone already would be waited for without end.
    alive, output = os.O_RDONLY | os.O_NONBLOCK, os.O_WRONLY | os.O_APPEND
    for name, flags, descriptors in (("alive", alive, (0,)), ("output", output, (1, 2))):
        file = os.open(folder / name, flags)
        os.set_blocking(file, True)
        for descriptor in descriptors:
            os.dup2(file, descriptor)
        os.close(file)
    answer_and_end(folder)


if __name__ == "__main__":
    main(sys.argv[1])
