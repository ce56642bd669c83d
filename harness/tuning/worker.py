"""A process that calls functions, one after the other, each within a time limit: a crash or a hang ends it alone.

`harness.processes` starts a process for each call; this one stays, and starts fast because it leaves out PyTorch.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from harness.processes import child_environment
from harness.processes.threads import configure_threads
from harness.tuning.measuring import RunError

_WITH_TORCH = "with-torch"


class Worker:
    """Starts its process with the first call, and a new one after the process has died or was killed."""

    def __init__(self, torch: bool = False) -> None:
        """Make a worker.

        Args:
            torch: Whether PyTorch is for its functions to use. TVM imports it if it can, which takes two thirds of the
                time of a start.
        """
        self._torch = torch
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Connection[Any, Any] | None = None

    def run(self, function: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
        """What a function of some module returns.

        Raises:
            RunError: The process died, it took longer than `seconds` and was killed, or the function raised something.
        """
        try:
            end = self._end or self._start()
            end.send((function, arguments))
            answered = end.poll(seconds)
            value, problem = end.recv() if answered else (None, "")
        except (EOFError, OSError) as error:
            self.close()
            raise RunError("it crashed") from error
        except BaseException:  # Ctrl-C: an answer that nobody took would be the next call's
            self.close()
            raise
        if not answered:
            self.close()
            raise RunError(f"it was not done after {seconds:g} s")
        if problem:
            raise RunError(last_line(problem))
        return value

    def close(self) -> None:
        """Ends the process and all that it started."""
        process, self._process = self._process, None
        end, self._end = self._end, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if end is not None:
            end.close()

    def _start(self) -> Connection[Any, Any]:
        self._end, other = Pipe()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(other.fileno()), str(os.getpid()), _WITH_TORCH * self._torch],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(other.fileno(),),
                env=child_environment(),
                start_new_session=True,
            )
        self._end.recv()
        return self._end


def last_line(error: BaseException | str) -> str:
    """The last line of an error's message, which a traceback ends with; its type if it has no message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _serve(end: Connection[Any, Any], torch: bool) -> None:
    """What the process does until nobody holds the other end."""
    configure_threads()
    if not torch:
        # What an import of something absent finds.
        sys.modules["torch"] = None  # type: ignore[assignment]
    # Most functions need it; its import is no part of their time.
    import tvm  # noqa: F401

    end.send(None)
    while True:
        try:
            request = end.recv_bytes()
        except (EOFError, OSError):
            return
        # Answers are arrays of hundreds of megabytes: no name here keeps one until the next call.
        end.send(_answer(request))


def _answer(request: bytes) -> tuple[Any, str]:
    """What the function returned, and the traceback if it raised instead."""
    try:
        function, arguments = pickle.loads(request)
        return function(*arguments), ""
    except Exception:
        return None, traceback.format_exc()


def _end_with(parent: int) -> None:
    """Ends this process, whatever it is doing, soon after its parent has ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    _end_with(int(sys.argv[2]))
    _serve(Connection(int(sys.argv[1])), sys.argv[3] == _WITH_TORCH)
    os._exit(0)
