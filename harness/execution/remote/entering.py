"""The client's way into a device: it proves itself, and TVM's client then begins its session on that connection.

TVM's client makes its own connection and cannot prove anything. It is given one to this process, from which a thread
passes on how the session begins; then the proved connection takes its place, and nobody stands between any more.

A thread could not pass on everything: TVM tells the device that an object is gone while it holds Python's lock.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from harness.execution.remote.handshake import SECONDS, Granted, enter
from harness.execution.remote.secret import Secret
from harness.execution.remote.tracker import CONNECT_SECONDS
from harness.execution.remote.wire import keep_alive

_HERE = "127.0.0.1"
_PART_BYTES = 1 << 16

T = TypeVar("T")


def begun(host: str, port: int, promised: str, secret: Secret, connect: Callable[[str, int, str], T]) -> T:
    """Returns a session on a device that has proved itself.

    Args:
        host: Of the device.
        port: Of the device.
        promised: What the tracker promised.
        secret: The shared one.
        connect: TVM's client: takes host, port and key, and lets other threads run while it waits.

    Raises:
        RefusedError: One of the two does not know the secret of the other.
        TakenError: Another client has the session.
        OSError: The device does not answer.
        Exception: `connect` raised it.
    """
    far, granted = _proved(host, port, promised, secret)
    with far, _Between(far) as between:
        session = connect(_HERE, between.port, granted.ticket)
        between.step_aside()
        return session


def require_proof(host: str, port: int, secret: Secret) -> None:
    """Makes sure that a device is there which shares the secret; no session begins.

    Raises:
        RefusedError: One of the two does not know the secret of the other.
        OSError: The device does not answer.
    """
    _proved(host, port, "", secret)[0].close()


def _proved(host: str, port: int, promised: str, secret: Secret) -> tuple[socket.socket, Granted]:
    connection = socket.create_connection((host, port), CONNECT_SECONDS)
    try:
        granted = enter(connection, secret, promised, time.monotonic() + SECONDS)
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    keep_alive(connection)
    return connection, granted


class _Between:
    """Passes on what the first connection to a port of this process says; use it in a `with` block.

    Attributes:
        port: The port. Another process that connects first does not know the key, and is sent away by the device.
    """

    def __init__(self, far: socket.socket) -> None:
        self._far = far
        self._ends: object = None
        self._listener = socket.create_server((_HERE, 0), backlog=1)
        self._listener.settimeout(CONNECT_SECONDS)
        self.port = int(self._listener.getsockname()[1])
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._pass_on, daemon=True)

    def __enter__(self) -> _Between:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._end()
        self._stop.close()
        self._stopped.close()

    def step_aside(self) -> None:
        """Puts the far connection in the place of the near one, when neither end waits for anything.

        Raises:
            OSError: Another process was connected.
        """
        self._end()
        for descriptor in [int(path.name) for path in Path("/dev/fd").iterdir()]:
            if _is_connection(descriptor, self._ends):
                os.dup2(self._far.fileno(), descriptor, inheritable=False)
                return
        raise OSError("another process took the connection")

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._stop.send(b".")
        self._thread.join()

    def _pass_on(self) -> None:
        with self._listener:
            try:
                near, address = self._listener.accept()
            except OSError:  # nobody came
                return
        self._ends = (address, near.getsockname())
        near.settimeout(None)
        other = {near: self._far, self._far: near}
        with near, contextlib.suppress(OSError):
            while self._stopped not in (ready := select.select([near, self._far, self._stopped], [], [])[0]):
                for source in ready:
                    part = source.recv(_PART_BYTES)
                    if not part:  # closing it tells the other end
                        return
                    other[source].sendall(part)


def _is_connection(descriptor: int, ends: object) -> bool:
    """Whether a file descriptor of this process is the connection between these addresses, its own and the other.

    Its own alone tells nothing: connections to different places may have the same port here.
    """
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as found:
            return bool((found.getsockname(), found.getpeername()) == ends)
    except OSError:
        return False
