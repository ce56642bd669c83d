"""Who may connect: every connection proves itself in a thread of its own, so that none waits for another.

A connection has `handshake.SECONDS`. Where too many wait, the oldest of the address with the most of them goes.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from harness.execution.remote.handshake import SECONDS, Granted, RefusedError, admit
from harness.execution.remote.secret import Secret
from harness.execution.remote.wire import MAGIC, MISMATCH, keep_alive, limit_wait, receive, receive_number, send_number

_AT_ONCE = 64
"""Connections that have not proved themselves yet."""
_AGAIN_SECONDS = 0.1
"""After an error of the listener, for instance too many open files."""
_LONGEST_NAME_BYTES = 1024


@dataclass(frozen=True)
class Client:
    """A client that has proved itself and begun the session that it was promised.

    Attributes:
        connection: Its own.
        seconds: Time limit that it set; None for none.
    """

    connection: socket.socket
    seconds: float | None


class Admission:
    """Takes connections, whatever else the server does, and keeps those that may come in until they are asked for.

    `select` tells when a client is there.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: Secret,
        key: str,
        is_own: Callable[[str, int, socket.socket], bool],
        tell: Callable[[str], None],
    ) -> None:
        """Begins.

        Args:
            listener: Where clients connect.
            secret: The shared one.
            key: What the server is known by.
            is_own: Whether an address is that at which a connection arrived.
            tell: Called with a sentence for each connection that is refused, in any thread.
        """
        self._listener = listener
        self._secret = secret
        self._key = key
        self._is_own = is_own
        self._tell = tell
        self._lock = threading.Lock()
        self._promised: str | None = None
        self._unproved: dict[socket.socket, str] = {}
        self._clients: queue.SimpleQueue[Client] = queue.SimpleQueue()
        self._told, self._telling = socket.socketpair()
        threading.Thread(target=self._accept, daemon=True).start()

    def fileno(self) -> int:
        """Returns what becomes readable when a client is there."""
        return self._told.fileno()

    def promise(self, session: str | None) -> None:
        """Lets the client come in that the tracker gives this session to, and no other; None for nobody."""
        with self._lock:
            self._promised = session

    def client(self) -> Client:
        """Returns the client that is there."""
        self._told.recv(1)
        return self._clients.get_nowait()

    def _claim(self, session: str) -> bool:
        with self._lock:
            claimed = session == self._promised
            if claimed:
                self._promised = None
            return claimed

    def _accept(self) -> None:
        while self._listener.fileno() != -1:
            try:
                connection, address = self._listener.accept()
            except OSError:
                time.sleep(_AGAIN_SECONDS)
                continue
            with self._lock:
                if len(self._unproved) >= _AT_ONCE:
                    self._make_room()
                self._unproved[connection] = str(address[0])
            peer = f"{address[0]}, port {address[1]}"
            threading.Thread(target=self._admit, args=(connection, peer), daemon=True).start()

    def _make_room(self) -> None:
        ((busiest, _),) = Counter(self._unproved.values()).most_common(1)
        oldest = next(connection for connection, address in self._unproved.items() if address == busiest)
        del self._unproved[oldest]
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def _admit(self, connection: socket.socket, peer: str) -> None:
        deadline = time.monotonic() + SECONDS
        try:
            granted = admit(
                connection,
                self._secret,
                lambda host, port: self._is_own(host, port, connection),
                self._claim,
                deadline,
            )
            seconds = self._greet(connection, granted, deadline) if granted.session else None
        except (RefusedError, OSError, ValueError) as error:
            why = f"it did not prove itself in {SECONDS:g} s" if isinstance(error, TimeoutError) else str(error)
            self._tell(f"Refused {peer}: {why}.")
            _close_read(connection, deadline)
            return
        finally:
            with self._lock:
                self._unproved.pop(connection, None)
        if not granted.session:
            connection.close()
            return
        connection.settimeout(None)
        keep_alive(connection)
        self._clients.put(Client(connection, seconds))
        self._telling.send(b".")

    def _greet(self, connection: socket.socket, granted: Granted, deadline: float) -> float | None:
        """TVM's own handshake; returns the seconds that the client wants at most, None for no limit.

        Raises:
            OSError, ValueError: It does not go on with what it was granted.
        """
        if receive_number(connection, deadline) != MAGIC:
            raise OSError("it proved itself and then spoke another protocol")
        size = receive_number(connection, deadline)
        if not 0 < size <= _LONGEST_NAME_BYTES:
            raise OSError("it proved itself and then spoke another protocol")
        said, *options = receive(connection, size, deadline).decode().split()
        if not hmac.compare_digest(said.encode(), f"client:{granted.ticket}".encode()):
            send_number(connection, MISMATCH)
            raise OSError("it proved itself and then wanted another session")
        own = f"server:{self._key}".encode()
        send_number(connection, MAGIC)
        send_number(connection, len(own))
        connection.sendall(own)
        limits = [float(option.removeprefix("-timeout=")) for option in options if option.startswith("-timeout=")]
        return limits[0] if limits else None


def _close_read(connection: socket.socket, deadline: float) -> None:
    """Closes a connection after all that its client sends, for a client that still sends would lose what it was told.

    RFC 1122, 4.2.2.13: what closes with unread data resets the connection.
    """
    with connection, contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        while True:
            limit_wait(connection, deadline)
            if not connection.recv(_LONGEST_NAME_BYTES):
                return
