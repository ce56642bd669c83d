"""Files that a device keeps, named by their content: weights and libraries arrive once, whoever needs them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.files import check_folder, temporary_name
from harness.runtime.errors import Sam3Error

LIMIT_BYTES = 20 << 30
"""Bytes that a device keeps by default; the full model's weights are 3.5 GB."""
_RECENT_SECONDS = 3600.0
"""A file that was used within that time may be in use."""


class Store:
    """A folder of files with the SHA-256 of their content for a name.

    Attributes:
        folder: Where it is.
    """

    def __init__(self, folder: Path) -> None:
        """Opens the store in a folder, which is made if it does not exist.

        Raises:
            Sam3Error: It cannot be written.
        """
        self.folder = folder
        with self._writing():
            check_folder(folder)

    def path(self, digest: str) -> Path:
        """Returns where the file with this content is or would be."""
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise Sam3Error(f"{digest!r} is no SHA-256")
        return self.folder / digest

    def missing(self, sizes: Mapping[str, int]) -> list[str]:
        """Returns the digests of those files that are not here; the others count as just used."""
        absent = []
        for digest, size in sizes.items():
            path = self.path(digest)
            try:
                present = path.stat().st_size == size
                if present:
                    os.utime(path)
            except OSError:
                present = False
            if not present:
                absent.append(digest)
        return absent

    def receive(self, digest: str, size: int, offset: int, part: bytes) -> None:
        """Takes the next part of a file; with the last one it is checked and there.

        Raises:
            Sam3Error: Parts are missing, the content is another one, or it cannot be written.
        """
        path = self.path(digest)
        unfinished = temporary_name(path)
        with self._writing():
            with unfinished.open("ab" if offset else "wb") as file:
                if file.tell() != offset:
                    raise Sam3Error(f"{digest} goes on at byte {offset}, {file.tell()} have arrived: send it again")
                file.write(part)
            if offset + len(part) < size:
                return
            with unfinished.open("rb") as file:
                arrived = hashlib.file_digest(file, "sha256").hexdigest()
            if arrived != digest:
                unfinished.unlink()
                raise Sam3Error(f"{digest} arrived as {arrived}: send it again")
            unfinished.replace(path)

    def trim(self, limit_bytes: int = LIMIT_BYTES) -> int:
        """Removes what was not used for the longest time until the rest is within the limit; returns bytes removed.

        Files that were used within the last hour stay, whatever the limit.
        """
        files = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        excess = sum(size for _, size, _ in files) - limit_bytes
        removed = 0
        for used, size, path in sorted(files):
            if removed >= excess or time.time() - used < _RECENT_SECONDS:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                removed += size
        return removed

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Sam3Error(
                f"the device cannot write into {self.folder} ({error.strerror or error}): free some space there, or "
                "give another folder with --store"
            ) from error
