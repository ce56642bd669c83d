"""A folder that appears complete or not at all, and that one process at a time may make."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.core.errors import HarnessError
from harness.runtime.manifest import MANIFEST


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Gives an empty folder to fill, which takes the place of `folder` when the context ends well.

    What was there before stays until then, and for good if the context ends with an exception.

    Args:
        folder: Must not exist, or be empty, or be an artifact.

    Raises:
        HarnessError: Something else is there, another process is writing it, or there is no room or no permission.
    """
    from filelock import FileLock, Timeout

    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise HarnessError(f"{folder} is a file: give the name of a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).is_file():
        raise HarnessError(f"{folder} holds something else than a compiled model: choose another folder")
    filling = folder.with_name(f".{folder.name}.filling")
    previous = folder.with_name(f".{folder.name}.previous")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f".{folder.name}.lock"), timeout=0)
        lock.acquire()
    except Timeout:
        raise HarnessError(f"another process is writing {folder}: wait for it, or choose another folder") from None
    except OSError as error:
        raise HarnessError(f"cannot write to {folder.parent}: {error.strerror}; choose another folder") from error
    try:
        # Left by a process that was killed; nobody else holds the lock.
        shutil.rmtree(filling, ignore_errors=True)
        shutil.rmtree(previous, ignore_errors=True)
        filling.mkdir()
        yield filling
        if folder.exists():
            folder.rename(previous)
        filling.rename(folder)
        shutil.rmtree(previous, ignore_errors=True)
    except OSError as error:
        raise HarnessError(f"cannot write {folder}: {error.strerror or error}; make room or choose another") from error
    finally:
        shutil.rmtree(filling, ignore_errors=True)
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
