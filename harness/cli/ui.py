"""Defines `sam3-tvm ui`: serves a local web page for clicks and texts on photographs."""

from __future__ import annotations

import secrets
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from harness.cli import options
from harness.cli.console import print_sentence
from harness.cli.segment import FolderOption, choose_model
from harness.core.errors import HarnessError
from harness.core.files import temporary_folder

DEFAULT_PORT = 8363
LOOPBACK = "127.0.0.1"


def ui(
    model: FolderOption = None,
    images: Annotated[Path | None, typer.Option(help="Folder of images to choose from, besides uploads.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; who reaches it needs the printed token.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any.")] = DEFAULT_PORT,
    keep: Annotated[int, typer.Option(min=1, help="Encoded photographs to keep in memory, 160 MB each.")] = 4,
    threads: options.ThreadsOption = None,
) -> None:
    """Serve a page on this machine until Ctrl-C: click on a photograph or type texts, see masks, download them.

    Nothing leaves this machine, and no other machine reaches the page unless --host allows it.
    """
    if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
        raise HarnessError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed, which the page needs: "
            "pip install 'sam3-tvm[ui]'"
        )
    from harness.app.ui.app import listen, make_app, serve, url_of
    from harness.app.ui.guard import TOKEN, hosts_of
    from harness.app.ui.photographs import ImageFolder
    from harness.app.ui.sessions import make_page
    from harness.cli.loading import load_model, untrained_warning, warn_if_untrained
    from harness.core.processes.memory import hide_torch
    from harness.core.processes.threads import configure_threads
    from harness.runtime.manifest import read_any_manifest

    folder = choose_model(model)
    manifest = read_any_manifest(folder)
    choices = None if images is None else ImageFolder(images)
    configure_threads(threads)
    hide_torch()
    with listen(host, port) as listener, temporary_folder("ui") as files:
        loaded = load_model(folder)
        note = None if manifest.trained else untrained_warning(manifest)
        page = make_page(loaded, folder.resolve().name, choices, Path(files), note, keep)
        warn_if_untrained(manifest)
        if choices is not None:
            choices.check()
        token = secrets.token_hex(16)
        print_sentence(f"Open {url_of(listener)}?{TOKEN}={token} in a browser; Ctrl-C ends it.")
        serve(make_app(page, hosts_of(host), token), listener)
        page.queue.close()
    print_sentence("Stopped; nothing is served any more.")
