"""The wire format: the handshakes of TVM's RPC (`tvm.rpc.base`, `tvm.rpc.tracker`), without loading TVM.

Numbers are 32-bit, little-endian; messages to a tracker are JSON after their length.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from enum import IntEnum
from typing import Any

MAGIC = 0xFF271
"""Begins a session; also the answer of a server that takes it."""
TRACKER_MAGIC = 0x2F271
"""Begins a connection to a tracker, which answers with it."""
MISMATCH = MAGIC + 2
"""The answer of a server that did not offer this session."""
_LONGEST = 1 << 24
"""Bytes of a message; a tracker takes 2^20 and its answers describe all its servers."""


class Code(IntEnum):
    """The requests that a tracker understands."""

    SUCCESS = 0
    PUT = 3
    REQUEST = 4
    UPDATE_INFO = 5
    SUMMARY = 6
    GET_PENDING_MATCHKEYS = 7


def send_number(connection: socket.socket, number: int) -> None:
    """Sends a number."""
    connection.sendall(struct.pack("<i", number))


def receive_number(connection: socket.socket, deadline: float | None = None) -> int:
    """Receives a number; see `receive`."""
    (number,) = struct.unpack("<i", receive(connection, 4, deadline))
    return int(number)


def receive(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """Receives so many bytes.

    Args:
        connection: Whence.
        size: How many.
        deadline: When all must have arrived, as `time.monotonic` counts; None for the time limit of the connection.

    Raises:
        OSError: The connection ended, it took too long, or nobody sends messages of that size.
    """
    if not 0 <= size <= _LONGEST:
        raise OSError(f"a message of {size} bytes")
    parts = bytearray()
    while len(parts) < size:
        if deadline is not None:
            limit_wait(connection, deadline)
        part = connection.recv(size - len(parts))
        if not part:
            raise OSError("the connection ended")
        parts += part
    return bytes(parts)


def limit_wait(connection: socket.socket, deadline: float) -> None:
    """Lets the next call on a connection wait until a deadline, as `time.monotonic` counts.

    Raises:
        TimeoutError: It has passed.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    connection.settimeout(left)


def keep_alive(connection: socket.socket) -> None:
    """Notices within minutes that the machine at the other end is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPALIVE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def send_json(connection: socket.socket, value: Any) -> None:
    """Sends a message to a tracker."""
    text = json.dumps(value).encode()
    connection.sendall(struct.pack("<i", len(text)) + text)


def receive_json(connection: socket.socket) -> Any:
    """Receives an answer of a tracker.

    Raises:
        OSError: The connection ended, or what came is no answer.
    """
    text = receive(connection, receive_number(connection))
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OSError("what came is no answer") from error


def greet_tracker(connection: socket.socket) -> None:
    """Begins a connection to a tracker.

    Raises:
        OSError: It ended, or another kind of server answers.
    """
    send_number(connection, TRACKER_MAGIC)
    if receive_number(connection) != TRACKER_MAGIC:
        raise OSError("another protocol")
