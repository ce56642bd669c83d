"""Measures on another machine, where `sam3-tvm serve-device` serves.

Every run gets a session of its own, for which the server forks a fresh process that it ends after the time limit. If a
session ends too early, its run is repeated.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tvm import rpc

from harness.core.errors import HarnessError
from harness.core.remote import Remote
from harness.execution.remote.client import WAIT_SECONDS, DeviceLostError, DeviceSession, describe_remote
from harness.processes.timed_calls import CallError, TimedCalls, last_line
from harness.runtime.errors import Sam3Error
from harness.tuning.measuring import Program, Rounds, RunError, RunResult, run_interleaved

_ATTEMPTS = 2
"""Number of lost sessions after which the program is taken to be their cause."""


@dataclass(frozen=True)
class _Unmeasured:
    """The reason why there are no times.

    Attributes:
        reason: The reason, in one sentence.
        session_ended: Whether the session ended too early.
        nobody: Whether there was no device.
    """

    reason: str
    session_ended: bool = False
    nobody: bool = False


class RemoteRunner:
    """Runs programs on a device."""

    def __init__(self, remote: Remote, seconds: float = 60.0, wait: float = WAIT_SECONDS) -> None:
        """Makes a runner.

        Args:
            remote: The device.
            seconds: Time limit of one `run`, transfers included.
            wait: Seconds to go on trying while nobody listens there.

        Raises:
            DeviceLostError: Nobody listens.
            HarnessError: It is no device of this version.
        """
        describe_remote(remote)
        self._remote = replace(remote, seconds=seconds)
        self._wait = wait
        # The client is a process of its own, because a connection to a machine that is switched off may wait for ever.
        self._calls = TimedCalls()

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
        raise RunError(f"it ended {_ATTEMPTS} sessions: it crashes, or the device does")

    def _run(
        self, programs: Sequence[Program], arrays: Sequence[Path], rounds: Rounds
    ) -> list[RunResult] | _Unmeasured:
        limit = self._wait + self._remote.seconds
        task = (self._remote, self._wait, list(programs), [str(path) for path in arrays], rounds)
        try:
            ran: list[RunResult] | _Unmeasured = self._calls.call(_in_session, *task, seconds=limit)
        except CallError:
            ran = _Unmeasured("the device does not answer", session_ended=True)
        return ran

    def close(self) -> None:
        """Ends the connection."""
        self._calls.close()


def _in_session(
    remote: Remote, wait: float, programs: Sequence[Program], arrays: Sequence[str], rounds: Rounds
) -> list[RunResult] | _Unmeasured:
    """Runs programs in a session of their own; the client process calls this function."""
    try:
        session = DeviceSession(remote, wait)
    except (HarnessError, Sam3Error) as error:
        return _Unmeasured(str(error), nobody=True)
    start = time.monotonic()
    try:
        with closing(session), session.calling() as connection:
            return _run(connection, programs, [Path(path) for path in arrays], rounds)
    except Exception as error:
        if time.monotonic() - start > 0.95 * remote.seconds:
            return _Unmeasured(f"it was not done after {remote.seconds:g} s")
        return _Unmeasured(last_line(error), session_ended=isinstance(error, DeviceLostError))


def _run(
    session: rpc.RPCSession, programs: Sequence[Program], arrays: Sequence[Path], rounds: Rounds
) -> list[RunResult]:
    libraries = []
    for number, program in enumerate(programs):
        name = f"{number}-{program.library.name}"
        session.upload(str(program.library), name)
        libraries.append(session.get_function("sam3_tvm.open_library")(name))
    return run_interleaved(libraries, session.cpu(), programs, [np.load(path) for path in arrays], rounds)
