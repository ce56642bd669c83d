"""`sam3-tvm serve-device`: this machine's devices for other machines, through SSH."""

from __future__ import annotations

import ipaddress
import platform
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.console import console
from harness.cli.options import ThreadsOption
from harness.core.errors import HarnessError
from harness.files import cache_root

PORT = 9090
"""The default of TVM's own command."""


def serve_device(
    host: Annotated[str, typer.Option(help="Address of loopback to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = PORT,
    store: Annotated[
        Path | None, typer.Option(help="Folder for the weights and code that clients send. Default: in the cache.")
    ] = None,
    threads: ThreadsOption = None,
) -> None:
    """Let verify, segment, tune and pytest with --remote run what they compile on this machine, until Ctrl-C.

    It is TVM's RPC server: who connects can run any code here as this user. So it listens on loopback alone, and other
    machines reach it through an SSH tunnel, see docs/REMOTE.md.
    """
    from harness.processes.threads import configure_threads
    from harness.processes.torch_free import leave_torch_out

    tunnel = f"ssh -N -L {port}:127.0.0.1:{port} USER@{platform.node()}"
    if not is_loopback(host):
        raise HarnessError(
            f"--host {host} is no address of loopback, and who connects can run any code as this user: leave it out, "
            f"and reach this machine from another one with {tunnel}"
        )
    if any(find_spec(name) is None for name in ("tvm", "cloudpickle")):
        raise HarnessError("TVM's RPC server is not installed: pip install 'sam3-tvm[device]'")
    from harness.execution.remote.device import serve

    configure_threads(threads)
    leave_torch_out()
    tell(f"From another machine: {tunnel}; then --remote 127.0.0.1:{port} there.")
    try:
        serve(host, port, store or cache_root() / "device", tell)
    except KeyboardInterrupt:
        tell("Stopped; nobody is served any more.")


def is_loopback(host: str) -> bool:
    """Returns whether a name or an address stands for addresses of loopback alone.

    Raises:
        HarnessError: It stands for none.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise HarnessError(f"--host {host} is no address of this machine ({error.strerror}): leave it out") from error
    return all(ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback for *_, place in found)


def tell(sentence: str) -> None:
    """Prints a sentence as it is."""
    console.print(sentence, markup=False, highlight=False, soft_wrap=True)
