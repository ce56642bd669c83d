"""Measuring on other machines: TVM's RPC tracker hands out sessions on any number of servers with one key.

Every run gets a session of its own: the server starts a fresh process for it, and ends it after the time limit. A
server that vanishes takes nothing with it: what it was doing is done again elsewhere.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from tvm import rpc
from tvm.rpc import base

from harness.errors import HarnessError
from harness.tuning.local import Worker
from harness.tuning.measuring import Program, Ran, Rounds, RunError, interleaved

CONNECT_SECONDS = 5.0
"""How long to wait for a tracker to answer."""
WAIT_SECONDS = 60.0
"""How long to wait until a server is free, or back."""
_ATTEMPTS = 2
"""Sessions that a program may lose before it is taken to be what ends them."""


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`.

    Raises:
        HarnessError: It is none.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise HarnessError(f"--remote {address}: not an address, give HOST:PORT of an RPC tracker")
    return host.strip("[]"), int(port)


class Tracker:
    """What an RPC tracker can be asked, with a time limit on every answer."""

    def __init__(self, address: str, key: str) -> None:
        """Connects nowhere yet.

        Args:
            address: HOST:PORT.
            key: What the servers are known by.

        Raises:
            HarnessError: The address is none, or the key is empty.
        """
        self._host, self._port = split_address(address)
        self.address = address
        self.key = key
        if not key:
            raise HarnessError(f"--remote {address} needs --key: what the servers are known by at the tracker")

    def workers(self) -> int:
        """Number of servers with this key that are registered, busy or free.

        Raises:
            HarnessError: There is no tracker at the address.
        """
        return self._keys().count(self.key)

    def require_workers(self) -> int:
        """The number of servers with this key, at least one.

        Raises:
            HarnessError: There is no tracker at the address, or no server with this key.
        """
        keys = self._keys()
        if self.key not in keys:
            known = f"the keys there are {', '.join(sorted(set(keys)))}" if keys else "there are no servers at all"
            raise HarnessError(
                f"no server with key {self.key!r} at the tracker {self.address}, {known}: start one with "
                f"python -m tvm.exec.rpc_server --tracker {self.address} --key {self.key}"
            )
        return keys.count(self.key)

    def session(self, seconds: float, wait: float = WAIT_SECONDS) -> rpc.RPCSession:
        """A new session on a free server.

        Args:
            seconds: When the server ends it.
            wait: How long to wait for a free server.

        Raises:
            HarnessError: No server was free in time, or the tracker is gone.
        """
        deadline = time.monotonic() + wait
        while True:
            with self._asked([base.TrackerCode.REQUEST, self.key, "", 1], deadline - time.monotonic()) as answer:
                host, port, match_key = answer[1]
            try:
                # The tracker may not know yet that a server is gone.
                return rpc.connect(host, port, match_key, session_timeout=seconds)
            except Exception as error:
                if time.monotonic() >= deadline:
                    raise HarnessError(self._nobody()) from error
                time.sleep(0.2)

    def _keys(self) -> list[str]:
        with self._asked([base.TrackerCode.SUMMARY], CONNECT_SECONDS) as answer:
            return [str(server["key"]).partition(":")[2] for server in answer[1]["server_info"]]

    @contextlib.contextmanager
    def _asked(self, question: list[Any], seconds: float) -> Iterator[Any]:
        """The tracker's answer; the connection ends after the block."""
        try:
            connection = socket.create_connection((self._host, self._port), CONNECT_SECONDS)
        except OSError as error:
            raise HarnessError(
                f"no RPC tracker answers at {self.address} ({error.strerror or error}): start one with "
                f"python -m tvm.exec.rpc_tracker --port {self._port}, or correct --remote"
            ) from error
        with connection:
            try:
                connection.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
                (magic,) = struct.unpack("<i", base.recvall(connection, 4))
                if magic != base.RPC_TRACKER_MAGIC:
                    raise OSError("another protocol")
            except OSError as error:
                raise HarnessError(f"what answers at {self.address} is no RPC tracker: correct --remote") from error
            try:
                connection.settimeout(max(0.1, seconds))
                base.sendjson(connection, question)
                answer = base.recvjson(connection)
            except OSError as error:
                raise HarnessError(self._nobody()) from error
            if answer[0] != base.TrackerCode.SUCCESS:
                raise HarnessError(f"the tracker {self.address} refuses a session with key {self.key!r}: {answer}")
            yield answer

    def _nobody(self) -> str:
        return (
            f"no server with key {self.key!r} is left at the tracker {self.address}, or none is ever free: "
            "start one, then tune again to resume"
        )


@dataclass(frozen=True)
class _Unmeasured:
    """Why there are no times: the program's fault, or a session that ended too early, or no server at all."""

    reason: str
    session_ended: bool = False
    nobody: bool = False


class RemoteRunner:
    """Runs programs on the servers of a tracker; several threads may do so at once, each on another server."""

    def __init__(self, address: str, key: str, seconds: float = 60.0, wait: float = WAIT_SECONDS) -> None:
        """Make a runner.

        Args:
            address: HOST:PORT of the tracker.
            key: What the servers are known by.
            seconds: Time limit of one `run`, transfers included.
            wait: How long to wait until a server is free, or back.

        Raises:
            HarnessError: There is no tracker, or no server with this key.
        """
        self._tracker = Tracker(address, key)
        self._seconds = seconds
        self._wait = wait
        self.workers = self._tracker.require_workers()
        # The client is a process of its own: a connection to a machine that is switched off may wait for ever.
        self._idle: SimpleQueue[Worker] = SimpleQueue()

    def run(self, programs: Sequence[Program], arrays: Sequence[Path], rounds: Rounds) -> list[Ran]:
        """See `harness.tuning.measuring.Runner`."""
        for _ in range(_ATTEMPTS):
            ran = self._run(programs, arrays, rounds)
            if not isinstance(ran, _Unmeasured):
                return ran
            if ran.nobody:
                raise HarnessError(ran.reason)
            if not ran.session_ended:
                raise RunError(ran.reason)
        raise RunError(f"it ended {_ATTEMPTS} sessions: it crashes, or the servers do")

    def _run(self, programs: Sequence[Program], arrays: Sequence[Path], rounds: Rounds) -> list[Ran] | _Unmeasured:
        try:
            client = self._idle.get_nowait()
        except Empty:
            client = Worker()
        limit = self._wait + self._seconds + CONNECT_SECONDS
        task = (self._tracker.address, self._tracker.key, self._seconds, self._wait)
        paths = [str(path) for path in arrays]
        try:
            ran: list[Ran] | _Unmeasured = client.call(_in_session, *task, list(programs), paths, rounds, seconds=limit)
        except (ChildProcessError, TimeoutError):
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
) -> list[Ran] | _Unmeasured:
    """What the client process does for one run."""
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
        return _Unmeasured(_last_line(error), session_ended=_is_gone(session))


def _run(session: rpc.RPCSession, programs: Sequence[Program], arrays: Sequence[Path], rounds: Rounds) -> list[Ran]:
    libraries = []
    for number, program in enumerate(programs):
        name = f"{number}-{program.library.name}"
        session.upload(str(program.library), name)
        libraries.append(session.load_module(name))
    return interleaved(libraries, session.cpu(), programs, [np.load(path) for path in arrays], rounds)


def _is_gone(session: rpc.RPCSession) -> bool:
    """Whether the other end has ended."""
    try:
        session.get_function("tvm.rpc.server.workpath")
    except Exception:
        return True
    return False


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
