"""Defines `sam3-tvm serve-device`: lends this machine's devices to other machines."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.console import console
from harness.cli.options import CpuOption, SecretFileOption, ThreadsOption
from harness.core.errors import HarnessError
from harness.core.processors import Processors
from harness.core.remote import Remote
from harness.execution.remote.secret import forget_variable, make_secret, read_secret
from harness.execution.remote.server import LOOPBACK, Serving, serve
from harness.execution.remote.store import Store
from harness.execution.remote.tracker import connected
from harness.files import user_folder


def serve_device(
    tracker: Annotated[str, typer.Option(help="HOST:PORT of the RPC tracker to register with.")],
    key: Annotated[str, typer.Option(help="What to be known by there.")],
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 lets other machines connect.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on. Default: any.")] = 0,
    advertise: Annotated[
        str | None, typer.Option(help="Address that clients are told. Default: the one that the tracker sees.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Folder for the weights and code that clients send. Default: the user's cache.")
    ] = None,
    secret_file: SecretFileOption = None,
    threads: ThreadsOption = None,
    cpu: CpuOption = None,
) -> None:
    """Let clients that know the secret run their compiled code on this machine's devices, until Ctrl-C.

    These clients can run any code here as this user. The secret is created if it does not exist, and never sent. All
    other data are sent without encryption: docs/REMOTE.md shows how to use SSH.
    """
    from harness.processes.threads import configure_threads

    configure_threads(threads)
    remote, folder = Remote(tracker, key), store or default_store()
    new_secret = make_secret(secret_file)
    secret = read_secret(secret_file)
    forget_variable()
    if new_secret is not None:
        print_sentence(f"Made a secret in {new_secret}: copy that file to the machines of those who may use this one.")
    else:
        print_sentence(f"Clients need the secret in {secret.source}.")
    serve_until_stopped(Serving(remote, folder, secret, host, port, advertise, Processors(cpu)))


def print_sentence(sentence: str) -> None:
    """Prints a sentence without markup."""
    console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def default_store() -> Path:
    """Returns the folder for files that clients send, in the user's cache folder."""
    import platformdirs

    return user_folder(platformdirs.user_cache_dir) / "device"


def serve_until_stopped(serving: Serving) -> None:
    """Serves this machine's devices until Ctrl-C, and prints events.

    Raises:
        HarnessError: There is no tracker, TVM is not installed, or the port or folder cannot be used.
    """
    if find_spec("tvm") is None:
        raise HarnessError("tvm is not installed, which runs what clients send: pip install 'apache-tvm>=0.27,<0.28'")
    connected(serving.remote.address).close()
    Store(serving.store).trim()
    try:
        serve(serving, print_sentence)
    except KeyboardInterrupt:
        print_sentence("Stopped; nobody is served any more.")
