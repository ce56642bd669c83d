"""What the `serve-device` command does with its options, and what it prints."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.core.errors import HarnessError
from harness.core.remote import Remote
from harness.execution.remote.server import Serving, serve
from harness.execution.remote.store import Store
from harness.execution.remote.tracker import connected


def default_store() -> Path:
    """The folder for what clients send, in the user's cache folder."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("sam3-tvm")) / "device"


def serve_device(
    console: Console, remote: Remote, store: Path | None, host: str, port: int, advertised: str | None
) -> None:
    """Serves this machine's devices until Ctrl-C or SIGTERM, and prints what happens.

    Raises:
        HarnessError: There is no tracker, TVM is not installed, or the port or folder cannot be used.
    """
    if find_spec("tvm") is None:
        raise HarnessError("tvm is not installed, which runs what clients send: pip install 'apache-tvm>=0.27,<0.28'")
    connected(remote.address).close()
    folder = store or default_store()
    Store(folder).trim()

    def tell(sentence: str) -> None:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def interrupt(_number: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        serve(Serving(remote, folder, host, port, advertised), tell)
    except KeyboardInterrupt:
        tell("Stopped; nobody is served any more.")
    finally:
        signal.signal(signal.SIGTERM, before)
