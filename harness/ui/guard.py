"""Refuses requests that did not come from this server's own page.

Any web site may send requests to an address of this machine, and with a domain name of its own that points here (DNS
rebinding) it could read the answers too. A browser tells such requests by their headers `Host` and `Origin`.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

FORBIDDEN = 403
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

    def __init__(self, app: ASGIApp, hosts: Hosts) -> None:
        """Guard an application."""
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        sentence = refusal(self._hosts, headers.get("host"), headers.get("origin"))
        if sentence is not None:
            await PlainTextResponse(f"{sentence}\n", FORBIDDEN)(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)
