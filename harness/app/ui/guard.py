"""Refuses requests that are too large, or do not come from this server's own page, opened by who started the server.

Any web site may send requests to an address of this machine. With a domain name of its own that points here (DNS
rebinding) it could read the answers too. The headers `Host` and `Origin` identify such requests. Other users of this
machine may send requests as well; therefore the printed address has a token, which the browser then gets as a cookie.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse

from harness.app.ui.photographs import LARGEST_UPLOAD

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


FORBIDDEN = 403
TOKEN = "token"
"""The parameter of the printed address that has the token."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class Hosts:
    """The names of this server in URLs.

    Attributes:
        names: Host names, in lower case.
        addresses: Whether all IP addresses are accepted, which is safe because no domain name can imitate one.
    """

    names: frozenset[str]
    addresses: bool

    def has(self, name: str) -> bool:
        """Returns whether a host name, in lower case, is this server's."""
        if name in self.names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.addresses or address.is_loopback


def hosts_of(address: str) -> Hosts:
    """Returns the names of a server that listens at an address.

    Args:
        address: The value of `--host`: this machine's loopback address, another one, or a name.
    """
    try:
        loopback = ipaddress.ip_address(address).is_loopback
    except ValueError:
        loopback = address.casefold() == "localhost"
    names = {"localhost", address.casefold()}
    if not loopback:
        hostname = socket.gethostname().casefold()
        names |= {hostname, f"{hostname}.local", socket.getfqdn().casefold()}
    return Hosts(frozenset(names), addresses=not loopback)


def refusal(hosts: Hosts, host: str | None, origin: str | None) -> str | None:
    """Returns why a request is refused, or None.

    Args:
        hosts: The names of this server.
        host: The request's header `Host`.
        origin: Its header `Origin`; None where it has none, like requests of programs and a page's plain requests.
    """
    name = _host_name(host)
    if name is None or not hosts.has(name):
        return f"Refused: {host or 'no host'!r} is no name of this server; open it by the address that it printed."
    if origin is not None and origin.partition("://")[2].casefold() != (host or "").casefold():
        return f"Refused: the request comes from another page, {origin!r}."
    return None


def _host_name(host: str | None) -> str | None:
    """Returns the host of a header `Host` without its port, in lower case; None if the header is invalid."""
    try:
        return urlsplit(f"//{host}").hostname if host else None
    except ValueError:
        return None


class Guard:
    """Refuses requests with one line, and sets headers by which browsers protect the answers."""

    def __init__(self, app: ASGIApp, hosts: Hosts, token: str) -> None:
        """Guards an application with a token of letters and digits."""
        self._app = app
        self._hosts = hosts
        self._token = token
        # Cookies belong to all ports of a host, and there may be a server at each.
        self._cookie = f"sam3-tvm-{hashlib.sha256(token.encode()).hexdigest()[:8]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = HTTPConnection(scope)
        sentence = refusal(self._hosts, request.headers.get("host"), request.headers.get("origin"))
        is_first = self._is_token(request.query_params.get(TOKEN))
        if sentence is None and not is_first and not self._is_token(request.cookies.get(self._cookie)):
            sentence = "Refused: open the page by the address that `sam3-tvm ui` printed, which has a token."
        if sentence is not None:
            await PlainTextResponse(f"{sentence}\n", FORBIDDEN)(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                if is_first:
                    headers.append("Set-Cookie", f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict")
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _is_token(self, candidate: str | None) -> bool:
        """Returns whether a string is the token, in a time that does not depend on the first difference."""
        return candidate is not None and secrets.compare_digest(
            candidate.encode("utf-8", "replace"), self._token.encode()
        )


LARGEST_QUESTION = 2**20
"""Maximum size of a JSON body in bytes."""
TOO_LARGE = 413


class BodyLimit:
    """Limits the body of a request to the size of a question, or, by PUT, of a photograph."""

    def __init__(self, app: ASGIApp, question: int = LARGEST_QUESTION) -> None:
        """Limits the bodies that an application reads; those of questions to so many bytes."""
        self._app = app
        self._question = question

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request."""
        limit = LARGEST_UPLOAD if scope.get("method") == "PUT" else self._question
        length = 0

        async def receive_bounded() -> Message:
            nonlocal length
            message = await receive()
            length += len(message.get("body", b""))
            if length > limit:
                raise HTTPException(TOO_LARGE, f"The request has more than {limit // 2**20} MB; send less")
            return message

        await self._app(scope, receive_bounded, send)
