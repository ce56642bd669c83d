"""Defines `sam3-tvm serve`: answers questions about images over HTTP, with Ray Serve."""

from __future__ import annotations

import threading
from contextlib import suppress
from importlib.util import find_spec
from typing import Annotated

import typer

from harness.cli import options
from harness.cli.console import print_sentence
from harness.cli.segment import FolderOption, choose_model
from harness.cli.ui import LOOPBACK
from harness.core.errors import HarnessError

DEFAULT_PORT = 8364


def serve(
    model: FolderOption = None,
    host: Annotated[str, typer.Option(help="Address to listen at; who reaches it is answered.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any.")] = DEFAULT_PORT,
    replicas: Annotated[int, typer.Option(min=1, help="Processes that load the model, on --threads CPUs each.")] = 1,
    keep: Annotated[int, typer.Option(min=1, help="Encoded images to keep in a replica's memory, 160 MB each.")] = 4,
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are refused with 429.")] = 64,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for an answer; later ones become a 504.")] = 300,
    threads: options.ThreadsOption = None,
    ray_address: options.RayAddressOption = None,
) -> None:
    """Serve a compiled model over HTTP until Ctrl-C: images and prompts in, data sets in COCO's format out.

    Nobody is asked for a password: --host is for networks that you trust.
    """
    if find_spec("ray") is None or find_spec("fastapi") is None:
        raise HarnessError("Ray Serve is not installed; pip install 'sam3-tvm[serve]'.")
    from harness.app.serve.deployment import Limits, deploy
    from harness.app.ui.app import listen
    from harness.cli.loading import warn_if_untrained
    from harness.core.cluster import connect
    from harness.core.processes.memory import hide_torch
    from harness.core.processes.threads import choose_threads, thread_count
    from harness.runtime.manifest import read_any_manifest

    folder = choose_model(model)
    manifest = read_any_manifest(folder)
    choose_threads(threads)
    hide_torch()
    with listen(host, port) as listener:  # Ray Serve would try a port that is taken again and again
        port = listener.getsockname()[1]
    description = {
        "folder": folder.resolve().name,
        "scale": manifest.scale,
        "target": manifest.target,
        "precision": manifest.precision,
        "weights": manifest.weights,
    }
    limits = Limits(keep, queue, timeout)
    with connect(ray_address), deploy(folder, description, replicas, thread_count(), limits, host, port):
        warn_if_untrained(manifest)
        print_sentence(f"Serving {folder} at http://{host}:{port}/, described at /docs; Ctrl-C ends it.")
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
    print_sentence("Stopped; nothing is served any more.")
