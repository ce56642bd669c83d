"""The client of TVM's RPC tracker, which hands out sessions on any number of servers with one key."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from harness.core.errors import HarnessError
from harness.core.remote import Remote, split_address
from harness.execution.remote.wire import Code, greet_tracker, receive_json, send_json

CONNECT_SECONDS = 5.0
"""How long to wait for a tracker to answer."""
WAIT_SECONDS = 60.0
"""How long to wait until a server is free, or back."""


class NobodyFreeError(HarnessError):
    """No server was free in time."""


class Tracker:
    """A client of an RPC tracker, with a time limit on every answer."""

    def __init__(self, address: str, key: str) -> None:
        """Connects nowhere yet.

        Args:
            address: HOST:PORT.
            key: What the servers are known by.

        Raises:
            HarnessError: The address is none, or the key is empty.
        """
        self.remote = Remote(address, key)
        self.address = address
        self.key = key

    def servers(self) -> list[Mapping[str, Any]]:
        """Returns what each server with this key, busy or free, told the tracker about itself.

        Raises:
            HarnessError: There is no tracker at the address.
        """
        return [server for server in self._summary() if _key_of(server) == self.key]

    def workers(self) -> int:
        """Returns the number of servers with this key that are registered, busy or free.

        Raises:
            HarnessError: There is no tracker at the address.
        """
        return len(self.servers())

    def require_workers(self) -> int:
        """Returns the number of servers with this key, at least one.

        Raises:
            HarnessError: There is no tracker at the address, or no server with this key.
        """
        keys = [_key_of(server) for server in self._summary()]
        if self.key not in keys:
            known = f"the keys there are {', '.join(sorted(set(keys)))}" if keys else "there are no servers at all"
            raise HarnessError(
                f"no server with key {self.key!r} at the tracker {self.address}, {known}: start one with "
                f"sam3-tvm serve-device --tracker {self.address} --key {self.key}"
            )
        return keys.count(self.key)

    def request(self, seconds: float) -> tuple[str, int, str]:
        """Returns the host, port and match key of a server that is free, which keeps itself free for whoever asked.

        Args:
            seconds: How long to wait for one.

        Raises:
            NobodyFreeError: None was free in time.
            HarnessError: The tracker is gone.
        """
        with self._asked([Code.REQUEST, self.key, "", 1], seconds) as answer:
            match answer:
                case [_, [host, port, str(match_key)]] if place := place_of([host, port]):
                    return *place, match_key
        raise self._no_answer()

    def _summary(self) -> list[Mapping[str, Any]]:
        with self._asked([Code.SUMMARY], CONNECT_SECONDS) as answer:
            match answer:
                case [_, {"server_info": [*servers]}]:  # anybody may register anything there
                    return [server for server in servers if _has_key(server)]
        raise self._no_answer()

    def _no_answer(self) -> HarnessError:
        return HarnessError(f"what answers at {self.address} is no RPC tracker: correct the address")

    @contextlib.contextmanager
    def _asked(self, question: list[Any], seconds: float) -> Iterator[Any]:
        """Yields the tracker's answer; the connection ends after the block."""
        with connected(self.address) as connection:
            try:
                connection.settimeout(max(0.1, seconds))
                send_json(connection, question)
                answer = receive_json(connection)
            except OSError as error:
                raise NobodyFreeError(self.nobody()) from error
            if not isinstance(answer, list) or not answer:
                raise self._no_answer()
            if answer[0] != Code.SUCCESS:
                raise HarnessError(f"the tracker {self.address} refuses a session with key {self.key!r}: {answer}")
            yield answer

    def nobody(self) -> str:
        """Returns the sentence for a server that is not there, or never free."""
        return (
            f"no server with key {self.key!r} is left at the tracker {self.address}, or none is ever free: "
            "start one with sam3-tvm serve-device, then run this again"
        )


def connected(address: str) -> socket.socket:
    """Returns a connection to a tracker, with a time limit of `CONNECT_SECONDS` on what is sent and received.

    Raises:
        HarnessError: There is no tracker at the address.
    """
    host, port = split_address(address)
    try:
        connection = socket.create_connection((host, port), CONNECT_SECONDS)
    except OSError as error:
        raise HarnessError(
            f"no RPC tracker answers at {address} ({error.strerror or error}): start one with "
            f"python -m tvm.exec.rpc_tracker --port {port}, or correct the address"
        ) from error
    try:
        greet_tracker(connection)
    except OSError as error:
        connection.close()
        raise HarnessError(f"what answers at {address} is no RPC tracker: correct the address") from error
    return connection


def place_of(address: Any) -> tuple[str, int] | None:
    """Returns the host and port that a tracker tells, which anybody may have told it; None if it is no address."""
    match address:
        case [str(host), int(port)] if host.isprintable() and 0 < port < 1 << 16:
            with contextlib.suppress(UnicodeError):
                host.encode("idna")  # as connecting to it does
                return host, port
    return None


def _has_key(server: Any) -> bool:
    return isinstance(server, Mapping) and isinstance(server.get("key"), str)


def _key_of(server: Mapping[str, Any]) -> str:
    return str(server["key"]).partition(":")[2]
