"""The wire format: the handshakes of TVM's RPC (`tvm.rpc.base`, `tvm.rpc.tracker`), without loading TVM.

Numbers are 32-bit, little-endian; messages to a tracker are JSON after their length.
"""

from __future__ import annotations

import json
import socket
import struct
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


def receive_number(connection: socket.socket) -> int:
    """Receives a number.

    Raises:
        OSError: The connection ended.
    """
    (number,) = struct.unpack("<i", receive(connection, 4))
    return int(number)


def receive(connection: socket.socket, size: int) -> bytes:
    """Receives so many bytes.

    Raises:
        OSError: The connection ended, or nobody sends messages of that size.
    """
    if not 0 <= size <= _LONGEST:
        raise OSError(f"a message of {size} bytes")
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise OSError("the connection ended")
        parts += part
    return bytes(parts)


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
    except ValueError as error:
        raise OSError("what came is no answer") from error


def greet_tracker(connection: socket.socket) -> None:
    """Begins a connection to a tracker.

    Raises:
        OSError: It ended, or another kind of server answers.
    """
    send_number(connection, TRACKER_MAGIC)
    if receive_number(connection) != TRACKER_MAGIC:
        raise OSError("another protocol")
