"""Defines `sam3-tvm serve-device`: lends this machine's devices to other machines through SSH."""

from __future__ import annotations

import ipaddress
import platform
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.console import print_sentence
from harness.cli.options import ThreadsOption
from harness.core.errors import HarnessError
from harness.core.files import cache_root

PORT = 9090
"""Default port, as in TVM's own command."""


def serve_device(
    host: Annotated[str, typer.Option(help="Address of loopback to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = PORT,
    store: Annotated[
        Path | None, typer.Option(help="Folder for the weights and code that clients send. Default: in the cache.")
    ] = None,
    threads: ThreadsOption = None,
) -> None:
    """Let verify, segment and pytest with --remote run what they compile on this machine, until Ctrl-C.

    TVM's RPC server lets every client run any code here as this user. So it listens on loopback alone, and other
    machines reach it through an SSH tunnel, see docs/prove/remote.md.
    """
    from harness.core.processes.memory import hide_torch
    from harness.core.processes.threads import configure_threads

    tunnel = f"ssh -N -L {port}:127.0.0.1:{port} USER@{platform.node()}"
    if not is_loopback(host):
        raise HarnessError(
            f"--host {host} is not a loopback address, and everyone who connects can run any code as this user: "
            f"leave it out, and run this on the other machine: {tunnel}"
        )
    if any(find_spec(name) is None for name in ("tvm", "cloudpickle")):
        raise HarnessError("TVM's RPC server is not installed: pip install 'sam3-tvm[device]'")
    configure_threads(threads)
    hide_torch()
    from harness.compiler.execution.remote.device import serve  # TVM would import PyTorch

    print_sentence(f"From another machine: {tunnel}; then --remote 127.0.0.1:{port} there.")
    try:
        serve(host, port, store or cache_root() / "device", print_sentence)
    except KeyboardInterrupt:
        print_sentence("Stopped; nobody is served any more.")


def is_loopback(host: str) -> bool:
    """Returns whether a name or an address stands for loopback addresses alone.

    Raises:
        HarnessError: The host has no address.
    """
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise HarnessError(f"--host {host} is no address of this machine ({error.strerror}): leave it out") from error
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in infos)
