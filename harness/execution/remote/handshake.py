"""What is said before TVM's protocol: both ends of a connection prove that they know the secret, and neither says it.

    server → client   the version, and a random number
    client → server   its own random number, the session that the tracker promised it, the address that it reached, and
                      the proof of these and of the server's number
    server → client   the proof of the same for the other direction, or why it refuses

A message is JSON after its length, and shorter than `LONGEST_BYTES`. A proof counts for one connection, because of the
two numbers, and for one address: a server in between that passes both on is at another one. The key with which the
client then begins TVM's session follows from the secret too, and is never sent before.

What follows is neither encrypted nor signed: who can change what is sent on the way can take a session over.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness.core.errors import HarnessError
from harness.execution.remote.description import PROTOCOL
from harness.execution.remote.secret import Secret
from harness.execution.remote.wire import MAGIC, limit_wait, receive, receive_number, send_json

SECONDS = 5.0
"""Time limit of the handshake, as a whole."""
LONGEST_BYTES = 1024
"""Of a message."""
_NONCE_BYTES = 32

_BUSY, _SECRET, _ADDRESS = "busy", "secret", "address"


class RefusedError(HarnessError):
    """One end does not let the other in; the sentence says why."""


class TakenError(Exception):
    """The session that the tracker promised was given to another client, or offered again since."""


@dataclass(frozen=True)
class Granted:
    """What both ends agree on.

    Attributes:
        session: The session that the tracker promised; empty if the client wanted to know the server only.
        ticket: The key with which the client begins TVM's session.
    """

    session: str
    ticket: str


def admit(
    connection: socket.socket,
    secret: Secret,
    is_own: Callable[[str, int], bool],
    claim: Callable[[str], bool],
    deadline: float,
) -> Granted:
    """The server's end: returns what the client is granted.

    Args:
        connection: Of a client, before anything was received.
        secret: The shared one.
        is_own: Whether an address is this server's.
        claim: Called with the session that a client which knows the secret wants; whether it gets it.
        deadline: When to give up, as `time.monotonic` counts.

    Raises:
        RefusedError: The client does not prove itself, and why, as the end of a sentence.
        OSError: It left, or was too slow.
    """
    nonce = secrets.token_hex(_NONCE_BYTES)
    _send(connection, {"sam3_tvm": PROTOCOL, "nonce": nonce}, deadline)
    said = _said(connection, deadline)
    session, host, port, theirs = said.get("session"), said.get("host"), said.get("port"), said.get("nonce")
    if not (isinstance(session, str) and isinstance(host, str) and isinstance(port, int) and isinstance(theirs, str)):
        raise RefusedError("it speaks another protocol")
    facts: list[str | int] = [nonce, theirs, session, host, port]
    if not _proves(said, secret.proof("client", facts)):
        _send(connection, {"refused": _SECRET}, deadline)
        raise RefusedError("it does not know the secret")
    if not is_own(host, port):
        _send(connection, {"refused": _ADDRESS}, deadline)
        raise RefusedError(
            f"it wanted {host}, port {port}, which is not here: somebody passes connections on, or --advertise lacks"
        )
    if session and not claim(session):
        _send(connection, {"refused": _BUSY}, deadline)
        raise RefusedError("the session that it was promised is another client's")
    _send(connection, {"proof": secret.proof("server", facts)}, deadline)
    return Granted(session, secret.proof("ticket", facts))


def enter(connection: socket.socket, secret: Secret, session: str, deadline: float) -> Granted:
    """The client's end: returns what it is granted by a server that has proved itself.

    Args:
        connection: To a server, before anything was sent.
        secret: The shared one.
        session: What the tracker promised; empty to know the server only.
        deadline: When to give up, as `time.monotonic` counts.

    Raises:
        RefusedError: One of the two does not know the secret of the other.
        TakenError: Another client has the session.
        OSError: The server left, or was too slow.
    """
    host, port = address_of(connection.getpeername())
    place = f"{host}, port {port},"
    try:
        asked = _said(connection, deadline)
    except RefusedError as error:
        raise RefusedError(f"what answers at {place} is no `sam3-tvm serve-device`: {error}") from error
    if asked.get("sam3_tvm") != PROTOCOL or not isinstance(asked.get("nonce"), str):
        raise RefusedError(f"the server at {place} is `sam3-tvm serve-device` of another version: install the same")
    nonce = secrets.token_hex(_NONCE_BYTES)
    facts = [asked["nonce"], nonce, session, host, port]
    proof = secret.proof("client", facts)
    _send(connection, {"nonce": nonce, "session": session, "host": host, "port": port, "proof": proof}, deadline)
    answer = _said(connection, deadline)
    if answer.get("refused") == _BUSY:
        raise TakenError
    if answer.get("refused") == _SECRET:
        raise RefusedError(
            f"the device at {place} has another secret than the one in {secret.source}: copy the device's, see "
            "docs/REMOTE.md"
        )
    if answer.get("refused") == _ADDRESS:
        raise RefusedError(
            f"the device says that {place} is not its address: start its serve-device with --advertise {host} and "
            f"--port {port} if it is, otherwise somebody passes connections on"
        )
    if not _proves(answer, secret.proof("server", facts)):
        raise RefusedError(
            f"what answers at {place} does not prove that it knows the secret in {secret.source}, so that nothing was "
            "sent: find out who registered it at the tracker"
        )
    return Granted(session, secret.proof("ticket", facts))


def address_of(name: tuple[Any, ...]) -> tuple[str, int]:
    """Returns host and port of an end of a connection, as numbers, such that both ends write them alike."""
    return str(name[0]).partition("%")[0], int(name[1])


def _proves(said: dict[str, Any], expected: str) -> bool:
    proof = said.get("proof")
    return isinstance(proof, str) and proof.isascii() and hmac.compare_digest(proof, expected)


def _send(connection: socket.socket, message: dict[str, Any], deadline: float) -> None:
    limit_wait(connection, deadline)
    send_json(connection, message)


def _said(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """The other end's next message.

    Raises:
        RefusedError: It is none.
        OSError: The other end left, or was too slow.
    """
    size = receive_number(connection, deadline)
    if size == MAGIC:
        raise RefusedError("it speaks TVM's protocol without knowing the secret, as TVM and older versions do")
    if not 0 < size <= LONGEST_BYTES:
        raise RefusedError("it speaks another protocol")
    try:
        message = json.loads(receive(connection, size, deadline))
    except (ValueError, RecursionError) as error:
        raise RefusedError("it speaks another protocol") from error
    if not isinstance(message, dict):
        raise RefusedError("it speaks another protocol")
    return message
