"""Measures on other machines: TVM's RPC tracker hands out sessions on any number of servers with one key.

Every run gets a session of its own, for which the server starts a fresh process that it ends after the time limit. If a
server vanishes, its run is repeated on another server.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
from tvm import rpc

from harness.core.errors import HarnessError
from harness.core.remote import Remote
from harness.execution.remote.client import registered
from harness.execution.remote.entering import begun
from harness.execution.remote.handshake import RefusedError
from harness.execution.remote.secret import read_secret
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

    def __init__(self, remote: Remote, seconds: float = 60.0, wait: float = WAIT_SECONDS) -> None:
        """Makes a runner.

        Args:
            remote: Where the servers are found.
            seconds: Time limit of one `run`, transfers included.
            wait: Time limit of the wait for a free server.

        Raises:
            RefusedError: The servers do not share the secret of this user.
            HarnessError: There is no secret, no tracker, or no server of `sam3-tvm serve-device` with this key.
        """
        self._remote = remote
        self._seconds = seconds
        self._wait = wait
        registered(remote)
        self.workers = Tracker(remote.address, remote.key).workers()
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
        task = (self._remote, self._seconds, self._wait)
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
    remote: Remote,
    seconds: float,
    wait: float,
    programs: Sequence[Program],
    arrays: Sequence[str],
    rounds: Rounds,
) -> list[RunResult] | _Unmeasured:
    """Runs programs in a session of their own; the client process calls this function."""
    try:
        session = new_session(remote, seconds, wait)
    except HarnessError as error:
        return _Unmeasured(str(error), nobody=True)
    start = time.monotonic()
    try:
        return _run(session, programs, [Path(path) for path in arrays], rounds)
    except Exception as error:
        if time.monotonic() - start > 0.95 * seconds:
            return _Unmeasured(f"it was not done after {seconds:g} s")
        return _Unmeasured(last_line(error), session_ended=_is_gone(session))


def new_session(remote: Remote, seconds: float, wait: float) -> rpc.RPCSession:
    """Returns a new session on a free server.

    Args:
        remote: Where the servers are found.
        seconds: When the server ends it.
        wait: How long to wait for a free server.

    Raises:
        RefusedError: The server does not share the secret of this user.
        HarnessError: No server was free in time, or the tracker is gone.
    """
    secret = read_secret(remote.secret_file)
    tracker = Tracker(remote.address, remote.key)
    deadline = time.monotonic() + wait
    while True:
        host, port, match_key = tracker.request(deadline - time.monotonic())
        try:
            # The tracker may not know yet that a server is gone.
            return begun(host, port, match_key, secret, partial(rpc.connect, session_timeout=seconds))
        except RefusedError:
            raise
        except Exception as error:
            if time.monotonic() >= deadline:
                raise HarnessError(tracker.nobody()) from error
            time.sleep(0.2)


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
