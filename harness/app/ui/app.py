"""Builds the web application, opens its socket and serves it."""

from __future__ import annotations

import errno
import ipaddress
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

from harness.app.ui.errors import add_error_handlers
from harness.app.ui.guard import BodyLimit, Guard, Hosts
from harness.app.ui.routes import router
from harness.app.ui.sessions import Page
from harness.core.errors import HarnessError

STATIC = Path(__file__).with_name("static")
INDEX = "index.html"


def make_app(page: Page, hosts: Hosts, token: str) -> FastAPI:
    """Makes the application.

    Args:
        page: Its state.
        hosts: Its names in URLs.
        token: The token that a browser must present.
    """
    app = FastAPI(title="sam3-tvm", openapi_url=None)
    app.state.page = page
    app.include_router(router)
    app.add_api_route("/", _index, include_in_schema=False)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_middleware(BodyLimit)
    app.add_middleware(Guard, hosts=hosts, token=token)
    add_error_handlers(app)
    return app


async def _index() -> FileResponse:
    return FileResponse(STATIC / INDEX, headers={"Cache-Control": "no-cache"})


_BACKLOG = 128
_GRACE_SECONDS = 1
"""Seconds that running requests get when the server is stopped."""


def listen(host: str, port: int) -> socket.socket:
    """Opens a socket that browsers can connect to; connections wait until `serve` runs.

    Args:
        host: An address of this machine, or a name of it.
        port: 0 for any free port.

    Raises:
        HarnessError: There is no such address here, or the port is taken or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise HarnessError(f"{host!r} is no address of this machine; give one with --host.") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            sentence = f"Port {port} of {host} is in use; give another with --port, or 0 for any that is free."
        elif error.errno == errno.EACCES:
            sentence = f"Port {port} may not be used; give one above 1023 with --port."
        else:
            reason = error.strerror or error
            sentence = f"Cannot listen at {host}: {reason}; give an address of this machine with --host."
        raise HarnessError(sentence) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Returns the address to open in a browser on this machine."""
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def serve(app: FastAPI, listener: socket.socket) -> None:
    """Serves an application until Ctrl-C or a signal with the same effect.

    Args:
        app: The application.
        listener: The socket of `listen`; closed at the end.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="critical",
        access_log=False,
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    server = uvicorn.Server(config)
    try:
        with _stop_at_hangup(server):
            server.run(sockets=[listener])
    except KeyboardInterrupt:
        pass  # the server ends its requests at a signal, and then raises the signal again
    finally:
        listener.close()


@contextmanager
def _stop_at_hangup(server: uvicorn.Server) -> Iterator[None]:
    """Stops a server at SIGHUP like at SIGTERM; an exception would leave it waiting for connections."""
    number = getattr(signal, "SIGHUP", signal.SIGTERM)
    handler = signal.getsignal(number)
    if handler is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return
    hangups: list[int] = []

    def stop(number: int, _frame: object) -> None:
        hangups.append(number)
        server.should_exit = True

    signal.signal(number, stop)
    try:
        yield
    finally:
        signal.signal(number, handler)
        if hangups:
            signal.raise_signal(number)
