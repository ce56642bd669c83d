"""Writes shards of photographs, and serves files on the web."""

from __future__ import annotations

import io
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

SENT: Counter[str] = Counter()
"""How often the newest server was asked for each path, by method and path."""


def write_tar(path: Path, members: Sequence[tuple[str, bytes]]) -> Path:
    """Writes a tar, in which a name may be there twice."""
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def write_parquet(path: Path, columns: dict[str, Sequence[Any]], **settings: Any) -> Path:
    """Writes a Parquet file; the test is skipped without pyarrow."""
    pytest.importorskip("pyarrow")
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, **settings)
    return path


class Server(SimpleHTTPRequestHandler):
    """Serves files without parts of them, counts those that it sends, and refuses those that are called secret."""

    def send_head(self) -> Any:
        """Opens the file that is asked for."""
        if "secret" in self.path:
            self.send_error(403)
            return None
        SENT[f"{self.command} {self.path}"] += 1
        return super().send_head()

    def log_message(self, *arguments: Any) -> None:
        """Says nothing."""


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Gives the address of a server of a folder; the test is skipped without what reads from one."""
    pytest.importorskip("aiohttp")
    SENT.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
