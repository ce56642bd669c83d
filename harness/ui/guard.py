"""Refuses requests that did not come from this server's own page, opened by whoever started the server.

Any web site may send requests to an address of this machine, and with a domain name of its own that points here (DNS
rebinding) it could read the answers too. A browser tells such requests by their headers `Host` and `Origin`. Any user
of this machine may send them as well: the printed address has a token, which the browser then gets as a cookie.
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
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

FORBIDDEN = 403
TOKEN = "token"
"""The parameter of the printed address."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class Hosts:
    """What this server may be called in a URL.

    Attributes:
        names: Host names, in small letters.
        addresses: Whether any IP address will do: no domain name can be made to look like one.
    """

    names: frozenset[str]
    addresses: bool

    def has(self, name: str) -> bool:
        """Whether a host's name, in small letters, is this server's."""
        if name in self.names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.addresses or address.is_loopback


def hosts_of(address: str) -> Hosts:
    """What a server that listens at an address may be called.

    Args:
        address: What `--host` says: this machine's loopback address, another one, or a name.
    """
    try:
        loopback = ipaddress.ip_address(address).is_loopback
    except ValueError:
        loopback = address.casefold() == "localhost"
    names = {"localhost", address.casefold()}
    if not loopback:
        own = socket.gethostname().casefold()
        names |= {own, f"{own}.local", socket.getfqdn().casefold()}
    return Hosts(frozenset(names), addresses=not loopback)


def refusal(hosts: Hosts, host: str | None, origin: str | None) -> str | None:
    """Says why a request is refused, or None.

    Args:
        hosts: What this server may be called.
        host: The request's header `Host`.
        origin: Its header `Origin`; None where it has none, as programs' and a page's own plain requests.
    """
    name = _host_name(host)
    if name is None or not hosts.has(name):
        return f"Refused: {host or 'no host'!r} is no name of this server; open it by the address that it printed."
    if origin is not None and origin.partition("://")[2].casefold() != (host or "").casefold():
        return f"Refused: the request comes from another page, {origin!r}."
    return None


def _host_name(host: str | None) -> str | None:
    """A header `Host` without its port, in small letters; None if it is none."""
    try:
        return urlsplit(f"//{host}").hostname if host else None
    except ValueError:
        return None


class Guard:
    """Answers requests that are refused in one line, and tells browsers to let nobody else use the answers."""

    def __init__(self, app: ASGIApp, hosts: Hosts, token: str) -> None:
        """Guard an application: only who knows the token, letters and digits, uses it."""
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

    def _is_token(self, given: str | None) -> bool:
        """Whether that is the token, told in a time that does not depend on where it differs."""
        return given is not None and secrets.compare_digest(given.encode("utf-8", "replace"), self._token.encode())
