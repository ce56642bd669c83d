"""Calls one function after the other in a long-lived process, each within a time limit.

`run_isolated` starts a process for each call. This process serves many calls, which take milliseconds and come by the
thousand when schedules are measured. A crash or a hang ends the process, and the next call starts a new one.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from harness.core.errors import HarnessError
from harness.core.files import temporary_folder
from harness.core.processes.call import kill_and_collect, start_python
from harness.core.processes.child import die_with_parent
from harness.core.processes.memory import hide_torch
from harness.core.processes.threads import configure_threads, thread_count


class CallError(Exception):
    """A call that crashed, hung or raised an error; the message is one sentence."""


class TimedCalls:
    """A process for calls, started by the first call and after each crash or hang.

    The process runs on as many threads as this one, and cannot import PyTorch: TVM would, which takes two thirds of the
    time that the process needs to start.
    """

    def __init__(self) -> None:
        """Starts no process yet."""
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None
        self._temporary = ExitStack()

    def call(self, function: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
        """Calls a module-level function and returns its result.

        Raises:
            CallError: The process died, the call took longer than `seconds` and was killed, or the function raised an
                error.
        """
        try:
            connection = self._connection or self._start()
            connection.send((function, arguments))
            ready = connection.poll(seconds)
            value, failure = connection.recv() if ready else (None, "")
        except (EOFError, OSError) as error:
            self.close()
            raise CallError("it crashed") from error
        except BaseException:  # Ctrl-C: the next call would read the unread answer
            self.close()
            raise
        if not ready:
            self.close()
            raise CallError(f"it was not done after {seconds:g} s")
        if failure:
            raise CallError(last_line(failure))
        return value

    def close(self) -> None:
        """Ends the process and everything that it started."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if process is not None:
            kill_and_collect(process)
        if connection is not None:
            connection.close()
        self._temporary.close()

    def _start(self) -> Connection[Any, Any]:
        self._connection, child_end = Pipe()
        with child_end:
            # In a folder of this process, which outlives a kill, so that nothing of the killed one is left.
            variables = {"TMPDIR": str(self._temporary.enter_context(temporary_folder("calls")))}
            arguments = (str(child_end.fileno()), str(thread_count()))
            self._process = start_python(
                __name__, *arguments, stdout=subprocess.DEVNULL, pass_fds=(child_end.fileno(),), variables=variables
            )
        self._connection.recv()
        return self._connection


def last_line(error: BaseException | str) -> str:
    """Returns the last line of an error's message, or the error's type if it has no message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _serve(connection: Connection[Any, Any], threads: int) -> None:
    """Answers requests until the other end of the connection is closed."""
    configure_threads(threads)
    hide_torch()
    # Most functions need TVM; its import must not count as their time.
    import tvm  # noqa: F401

    connection.send(None)
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            return
        # Answers are arrays of hundreds of megabytes: no variable may keep one alive until the next call.
        connection.send(_answer(request))


def _answer(request: bytes) -> tuple[Any, str]:
    """Returns the function's result, and a sentence or the traceback if it raised an error."""
    try:
        function, arguments = pickle.loads(request)
        return function(*arguments), ""
    except HarnessError as error:
        return None, str(error)
    except Exception:
        return None, traceback.format_exc()


if __name__ == "__main__":
    die_with_parent()
    _serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
    os._exit(0)
