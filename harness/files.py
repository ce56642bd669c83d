"""Files and folders that are there as a whole or not at all, and one sentence for whoever cannot write them.

A file is written under a temporary name beside its own and then renamed, so that no reader sees half of one, and what
was there before stays if writing fails. Names of temporary files differ by process and thread.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.core.errors import HarnessError

ADVICE = "free some space or choose another folder"
"""Advice for the user where a file cannot be written and the caller knows nothing better."""
_NO_HOME = "this user has no home folder: set {} to a folder that can be written"
_TEMPORARY = "sam3-tvm-"
_SCRATCH = re.compile(rf"({_TEMPORARY}[a-z]+-)?[0-9a-f]{{32}}\.lock")


def cache_root() -> Path:
    """Returns the folder of the cache: `SAM3_TVM_CACHE`, or the user's cache folder of this platform.

    Raises:
        HarnessError: There is none, as the user has no home folder.
    """
    configured = os.environ.get("SAM3_TVM_CACHE")
    if configured:
        try:
            return Path(configured).expanduser()
        except RuntimeError:
            raise HarnessError(_NO_HOME.format("HOME, or SAM3_TVM_CACHE without ~,")) from None
    import platformdirs

    return user_folder(platformdirs.user_cache_dir, "SAM3_TVM_CACHE")


def user_folder(find: Callable[[str], str], *variables: str) -> Path:
    """Returns this project's folder among the user's.

    Args:
        find: The function of `platformdirs` that knows it.
        variables: What can be set instead of `HOME`, the home folder.

    Raises:
        HarnessError: The user has no home folder, as one without a name in a container.
    """
    with contextlib.suppress(RuntimeError):
        folder = Path(find("sam3-tvm"))
        if folder.is_absolute():
            return folder
    raise HarnessError(_NO_HOME.format(" or ".join(("HOME", *variables))))


def write_bytes(path: Path, content: bytes, *, advice: str = ADVICE, durable: bool = False) -> None:
    """Writes a file.

    Args:
        path: The file; its folder must exist.
        content: All of it.
        advice: What the user can do if it cannot be written, as the end of a sentence.
        durable: Whether to wait until the disk has it.

    Raises:
        HarnessError: It cannot be written; what was there before still is.
    """
    with unfinished(path, advice=advice) as temporary, temporary.open("wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def write_text(path: Path, text: str, *, advice: str = ADVICE, durable: bool = False) -> None:
    """Writes a file in UTF-8, with what has no encoding spelled out; see `write_bytes`."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"), advice=advice, durable=durable)


def write_json(path: Path, value: Any, *, sort_keys: bool = False, advice: str = ADVICE, durable: bool = False) -> None:
    """Writes a value as JSON; see `write_bytes`."""
    write_text(path, json_text(value, sort_keys=sort_keys), advice=advice, durable=durable)


def json_text(value: Any, *, sort_keys: bool = False) -> str:
    """Returns the text of a JSON file of the project."""
    return json.dumps(value, indent=1, ensure_ascii=False, sort_keys=sort_keys) + "\n"


def append_bytes(path: Path, content: bytes, *, advice: str = ADVICE) -> None:
    """Adds to the end of a file, all of it or nothing; the file is made if it does not exist.

    Args:
        path: The file; its folder must exist, and nobody else may write it.
        content: What to add.
        advice: What the user can do if it cannot be written, as the end of a sentence.

    Raises:
        HarnessError: It cannot be written; what was there before still is.
    """
    with writing(path, advice):
        length = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab") as file:
                file.write(content)
        except BaseException:
            with contextlib.suppress(OSError):
                os.truncate(path, length)
            raise


def write_files(folder: Path, files: Mapping[str, bytes], *, advice: str = ADVICE) -> None:
    """Writes several files of a folder, and renames them after the last of them is written.

    Args:
        folder: Is made if it does not exist.
        files: Contents by name; a name may have folders in it.
        advice: What the user can do if they cannot be written, as the end of a sentence.

    Raises:
        HarnessError: One of them cannot be written.
    """
    with contextlib.ExitStack() as stack:
        for name, content in files.items():
            path = folder / name
            with writing(path.parent, advice):
                path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(unfinished(path, advice=advice)).write_bytes(content)


@contextmanager
def unfinished(path: Path, *, advice: str = ADVICE) -> Iterator[Path]:
    """Gives a temporary name to write a file under, which then replaces the file; see `whole`.

    Raises:
        HarnessError: The file cannot be written; what was there before still is.
    """
    with writing(path, advice), whole(path) as temporary:
        yield temporary


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Gives a temporary name beside a file's; what is written there takes its place when the context ends well.

    It raises the system's own errors, for processes that have nobody to tell a sentence.

    Raises:
        OSError: The file cannot be written; what was there before still is.
    """
    temporary = temporary_name(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    """Removes a file, or a folder with all that is in it, as far as it can be, also if it is interrupted meanwhile."""

    def remove() -> None:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    try:
        remove()
    except BaseException:
        remove()
        raise


def temporary_name(path: Path) -> Path:
    """The name beside a file's under which this thread writes it."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}.tmp")


def keep_within(limit_bytes: int, paths: Iterable[Path], keep: Path | None = None) -> None:
    """Deletes the files that were not used for longest until the others are within a limit together.

    Args:
        limit_bytes: The limit.
        paths: The files; one that another process deletes meanwhile is left out.
        keep: One that stays in any case.
    """
    files = []
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= limit_bytes:
            return
        if path != keep:
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size


def remove_unfinished(paths: Iterable[Path]) -> None:
    """Removes what processes that were killed have left while they wrote files; nobody else may be writing them."""
    names: dict[Path, set[str]] = {}
    for path in paths:
        names.setdefault(path.parent, set()).add(path.name)
    for folder, written in names.items():
        for leftover in folder.glob(".*.tmp"):
            name, *numbers = leftover.name.removeprefix(".").removesuffix(".tmp").rsplit(".", 2)
            if name in written and len(numbers) == 2 and all(number.isdecimal() for number in numbers):
                leftover.unlink(missing_ok=True)


@contextmanager
def writing(path: Path, advice: str = ADVICE) -> Iterator[None]:
    """Makes an error of the system, while a file or folder is written, the sentence that the user reads.

    Raises:
        HarnessError: There was one.
    """
    try:
        yield
    except OSError as error:
        raise HarnessError(f"cannot write {path}: {error.strerror or error}; {advice}") from error


def make_folder(folder: Path, *, advice: str = ADVICE) -> None:
    """Makes a folder, with those above it, and makes sure that it can be written: better before the work than after it.

    Raises:
        HarnessError: It cannot be.
    """
    with writing(folder, advice):
        probe(folder)


def probe(folder: Path) -> None:
    """Makes a folder and a file in it that goes at once.

    Raises:
        OSError: The folder cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def check_writable(path: Path, *, advice: str = ADVICE) -> None:
    """Makes sure that a file can be written into the folder that is there for it, before the work.

    Raises:
        HarnessError: It cannot be.
    """
    with writing(path, advice):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        tempfile.TemporaryFile(dir=path.parent).close()


@contextmanager
def replaced_folder(folder: Path, is_replaceable: Callable[[Path], bool], kind: str) -> Iterator[Path]:
    """Gives an empty folder to fill, which takes the place of `folder` when the context ends well.

    The old contents stay until then, and for good if the context ends with an exception.

    Args:
        folder: Must not exist, or be empty, or be replaceable.
        is_replaceable: Whether a folder that is not empty may be replaced.
        kind: What such a folder is, with its article.

    Raises:
        HarnessError: Something else is there, another process is writing it, or there is no room or no permission.
    """
    folder = folder.resolve()
    filling = folder.with_name(f".{folder.name}.filling")
    previous = folder.with_name(f".{folder.name}.previous")
    if folder.exists() and not folder.is_dir():
        raise HarnessError(f"{folder} is a file: give the name of a folder")
    with writing(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with only_writer(folder, folder.with_name(f".{folder.name}.lock")):
        with writing(folder):
            _recover(folder, filling, previous)
        if folder.is_dir() and any(folder.iterdir()) and not is_replaceable(folder):
            raise HarnessError(f"{folder} holds something else than {kind}: choose another folder")
        try:
            with writing(folder):
                filling.mkdir()
                yield filling
                if folder.exists():
                    folder.rename(previous)
                filling.rename(folder)
        finally:
            if previous.exists() and not folder.exists():
                previous.rename(folder)
            _remove(filling)
            _remove(previous)


def _recover(folder: Path, filling: Path, previous: Path) -> None:
    """Does what a process that was killed in `replaced_folder` had left to do; nobody else holds the lock."""
    if previous.exists() and not folder.exists():
        # It was killed between its renames, when what it had filled was whole.
        (filling if filling.exists() else previous).rename(folder)
    _remove(filling)
    _remove(previous)


@contextmanager
def only_writer(folder: Path, lock_file: Path) -> Iterator[None]:
    """Keeps other processes from writing a folder as long as the context lasts; a killed process holds no lock.

    Args:
        folder: The folder.
        lock_file: What all who write the folder lock; its own folder exists.

    Raises:
        HarnessError: Another process is writing the folder, or the lock cannot be written.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(lock_file, timeout=0)
    with writing(lock_file):
        try:
            lock.acquire()
        except Timeout:
            raise HarnessError(f"another process is writing {folder}: wait for it, or choose another folder") from None
    try:
        yield
    finally:
        _remove(lock_file)
        lock.release()


@contextmanager
def scratch_folder(parent: Path, prefix: str = "") -> Iterator[Path]:
    """Gives an empty folder that is this context's alone, and goes with it; nobody else can read it.

    What killed processes left in `parent` is removed: a lock, which the system releases when its process ends, stands
    beside each such folder.

    Args:
        parent: Is made if it does not exist; other processes may have such folders in it at the same time.
        prefix: Of the folder's name; not a path.

    Raises:
        HarnessError: It cannot be written.
    """
    from filelock import FileLock, Timeout

    make_folder(parent)
    for lock_file in parent.glob("*.lock"):
        if _SCRATCH.fullmatch(lock_file.name):
            with contextlib.suppress(Timeout, OSError), FileLock(lock_file, timeout=0):
                _remove(lock_file.with_suffix(""))
                _remove(lock_file)
    folder = parent / f"{prefix}{uuid.uuid4().hex}"
    lock_file = folder.with_suffix(".lock")
    with FileLock(lock_file, thread_local=False):  # another thread may end the context
        try:
            folder.mkdir(mode=0o700)
            yield folder
        finally:
            _remove(folder)
            _remove(lock_file)


@contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """Gives a `scratch_folder` among the system's temporary files.

    Args:
        kind: What it is for; a part of its name.

    Raises:
        HarnessError: It cannot be written.
    """
    with scratch_folder(Path(tempfile.gettempdir()), f"{_TEMPORARY}{kind}-") as folder:
        yield folder
