"""Measures on other machines: TVM's RPC tracker hands out sessions on any number of servers with one key.

Every run gets a session of its own, for which the server starts a fresh process that it ends after the time limit. If a
server vanishes, its run is repeated on another server.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
from tvm import rpc

from harness.core.errors import HarnessError
from harness.execution.remote.tracker import CONNECT_SECONDS, WAIT_SECONDS, Tracker
from harness.processes.timed_calls import CallError, TimedCalls, last_line
from harness.tuning.measuring import Program, Rounds, RunError, RunResult, run_interleaved

_ATTEMPTS = 2
"""Number of lost sessions after which the program is taken to be their cause."""


@dataclass(frozen=True)
class _Unmeasured:
    """The reason why there are no times.

    Attributes:
        reason: The reason, in one sentence.
        session_ended: Whether the session ended too early.
        nobody: Whether there was no server.
    """

    reason: str
    session_ended: bool = False
    nobody: bool = False


class RemoteRunner:
    """Runs programs on the servers of a tracker; several threads may use it at once, each with another server."""

    def __init__(self, address: str, key: str, seconds: float = 60.0, wait: float = WAIT_SECONDS) -> None:
        """Makes a runner.

        Args:
            address: HOST:PORT of the tracker.
            key: Key under which the tracker knows the servers.
            seconds: Time limit of one `run`, transfers included.
            wait: Time limit of the wait for a free server.

        Raises:
            HarnessError: There is no tracker, or it knows no server with this key.
        """
        self._tracker = Tracker(address, key)
        self._seconds = seconds
        self._wait = wait
        self.workers = self._tracker.require_workers()
        # The client is a process of its own, because a connection to a machine that is switched off may wait for ever.
        self._idle: SimpleQueue[TimedCalls] = SimpleQueue()

    def run(self, programs: Sequence[Program], arrays: Sequence[Path], rounds: Rounds) -> list[RunResult]:
        """Does what `harness.tuning.measuring.Runner` says."""
        for _ in range(_ATTEMPTS):
            ran = self._run(programs, arrays, rounds)
            if not isinstance(ran, _Unmeasured):
                return ran
            if ran.nobody:
                raise HarnessError(ran.reason)
            if not ran.session_ended:
                raise RunError(ran.reason)
        raise RunError(f"it ended {_ATTEMPTS} sessions: it crashes, or the servers do")

    def _run(
        self, programs: Sequence[Program], arrays: Sequence[Path], rounds: Rounds
    ) -> list[RunResult] | _Unmeasured:
        try:
            client = self._idle.get_nowait()
        except Empty:
            client = TimedCalls()
        limit = self._wait + self._seconds + CONNECT_SECONDS
        task = (self._tracker.address, self._tracker.key, self._seconds, self._wait)
        paths = [str(path) for path in arrays]
        try:
            ran: list[RunResult] | _Unmeasured = client.call(
                _in_session, *task, list(programs), paths, rounds, seconds=limit
            )
        except CallError:
            ran = _Unmeasured("the connection does not answer", session_ended=True)
        self._idle.put(client)
        return ran

    def close(self) -> None:
        """Ends the connections."""
        while not self._idle.empty():
            self._idle.get().close()


def _in_session(
    address: str,
    key: str,
    seconds: float,
    wait: float,
    programs: Sequence[Program],
    arrays: Sequence[str],
    rounds: Rounds,
) -> list[RunResult] | _Unmeasured:
    """Runs programs in a session of their own; the client process calls this function."""
    try:
        session = Tracker(address, key).session(seconds, wait)
    except HarnessError as error:
        return _Unmeasured(str(error), nobody=True)
    start = time.monotonic()
    try:
        return _run(session, programs, [Path(path) for path in arrays], rounds)
    except Exception as error:
        if time.monotonic() - start > 0.95 * seconds:
            return _Unmeasured(f"it was not done after {seconds:g} s")
        return _Unmeasured(last_line(error), session_ended=_is_gone(session))


def _run(
    session: rpc.RPCSession, programs: Sequence[Program], arrays: Sequence[Path], rounds: Rounds
) -> list[RunResult]:
    libraries = []
    for number, program in enumerate(programs):
        name = f"{number}-{program.library.name}"
        session.upload(str(program.library), name)
        libraries.append(session.load_module(name))
    return run_interleaved(libraries, session.cpu(), programs, [np.load(path) for path in arrays], rounds)


def _is_gone(session: rpc.RPCSession) -> bool:
    """Returns whether the session's process has ended."""
    try:
        session.get_function("tvm.rpc.server.workpath")
    except Exception:
        return True
    return False
