"""Writes files and folders completely or not at all, and reports write errors in one sentence.

A file is written under a temporary name next to its own and then renamed. No reader sees half a file, and the previous
contents stay if writing fails. Names of temporary files differ by process and thread.
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

CACHE_VARIABLE = "SAM3_TVM_CACHE"
"""The environment variable with the folder of the cache; the default is the user's cache folder of the platform."""
ADVICE = "free some space or choose another folder"
"""Default advice for the user if a file cannot be written."""
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_HOME = "this user has no home folder: set {} to a folder that can be written"
_TEMPORARY = "sam3-tvm-"
_SCRATCH = re.compile(rf"({_TEMPORARY}[a-z]+-)?[0-9a-f]{{32}}\.lock")


def cache_root() -> Path:
    """Returns the folder of the cache: `SAM3_TVM_CACHE`, or the user's cache folder of this platform.

    Raises:
        HarnessError: There is no such folder, because the user has no home folder.
    """
    configured = os.environ.get(CACHE_VARIABLE)
    if configured:
        try:
            return Path(configured).expanduser()
        except RuntimeError:
            raise HarnessError(_NO_HOME.format(f"HOME, or {CACHE_VARIABLE} without ~,")) from None
    import platformdirs

    return user_folder(platformdirs.user_cache_dir, CACHE_VARIABLE)


def user_folder(find: Callable[[str], str], *variables: str) -> Path:
    """Returns this project's folder among the user's folders.

    Args:
        find: The function of `platformdirs` that finds the folder.
        variables: Variables that the user can set instead of `HOME`.

    Raises:
        HarnessError: The user has no home folder, as a user without a name in a container.
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
        content: The whole contents.
        advice: Advice for the user if the file cannot be written, as the end of a sentence.
        durable: Whether to wait until the data are on the disk.

    Raises:
        HarnessError: The file cannot be written; the previous file is unchanged.
    """
    with write_file(path, advice=advice) as temporary, temporary.open("wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def write_text(path: Path, text: str, *, advice: str = ADVICE, durable: bool = False) -> None:
    """Writes a text file in UTF-8, with escapes for characters that cannot be encoded; see `write_bytes`."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"), advice=advice, durable=durable)


def write_json(path: Path, value: Any, *, sort_keys: bool = False, advice: str = ADVICE, durable: bool = False) -> None:
    """Writes the text `json_text`, which is never in memory as a whole; see `write_bytes`."""
    with (
        write_file(path, advice=advice) as temporary,
        temporary.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file,
    ):
        json.dump(value, file, indent=1, ensure_ascii=False, sort_keys=sort_keys)
        file.write("\n")
        if durable:
            file.flush()
            os.fsync(file.fileno())


def json_text(value: Any) -> str:
    """Returns the text of a JSON file of the project."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def append_bytes(path: Path, content: bytes, *, advice: str = ADVICE) -> None:
    """Appends to a file, completely or not at all; the file is created if it does not exist.

    Args:
        path: The file; its folder must exist, and no other process may write the file.
        content: The bytes to append.
        advice: Advice for the user if the file cannot be written, as the end of a sentence.

    Raises:
        HarnessError: The file cannot be written; its previous contents are unchanged.
    """
    with explain_write_errors(path, advice):
        length = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab") as file:
                file.write(content)
        except BaseException:
            with contextlib.suppress(OSError):
                os.truncate(path, length)
            raise


def write_files(folder: Path, files: Mapping[str, bytes], *, advice: str = ADVICE) -> None:
    """Writes several files of a folder, and renames them after the last one is written.

    Temporary files that a killed process left beside them are removed.

    Args:
        folder: The folder; it is created if it does not exist, and no other process may be writing these files.
        files: Contents by name; a name may include folders.
        advice: Advice for the user if a file cannot be written, as the end of a sentence.

    Raises:
        HarnessError: A file cannot be written.
    """
    with contextlib.ExitStack() as stack:
        with explain_write_errors(folder, advice):
            remove_temporary_files(folder / name for name in files)
        for name, content in files.items():
            path = folder / name
            with explain_write_errors(path.parent, advice):
                path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(write_file(path, advice=advice)).write_bytes(content)


@contextmanager
def write_file(path: Path, *, advice: str = ADVICE) -> Iterator[Path]:
    """Yields a temporary name to write a file under, which then replaces the file; see `replace_file`.

    Raises:
        HarnessError: The file cannot be written; the previous file is unchanged.
    """
    with explain_write_errors(path, advice), replace_file(path) as temporary:
        yield temporary


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yields a temporary name next to a file's; the new file replaces the old one if the context ends without an error.

    Errors of the system are raised as they are, for processes that have no user to address.

    Raises:
        OSError: The file cannot be written; the previous file is unchanged.
    """
    temporary = temporary_name(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    """Removes a file or a folder with its contents as far as possible, even if it is interrupted meanwhile."""

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
    """Returns the name next to a file's under which this thread writes it."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}.tmp")


def prune_files(limit_bytes: int, paths: Iterable[Path], keep: Path | None = None) -> None:
    """Deletes the least recently used files until the others are within a limit, and as large as what is free at most.

    Args:
        limit_bytes: The limit on the total size.
        paths: The files; a file that another process deletes meanwhile is skipped.
        keep: A file that is never deleted.
    """
    files = []
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in files)
    if files:
        _, _, path = files[0]
        with contextlib.suppress(OSError):
            limit_bytes = min(limit_bytes, (total + shutil.disk_usage(path.parent).free) // 2)
    for _, size, path in sorted(files):
        if total <= limit_bytes:
            return
        if path != keep:
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size


def remove_temporary_files(paths: Iterable[Path]) -> None:
    """Removes the temporary files of killed processes; no other process may be writing these files."""
    names: dict[Path, set[str]] = {}
    for path in paths:
        names.setdefault(path.parent, set()).add(path.name)
    for folder, file_names in names.items():
        for leftover in folder.glob(".*.tmp"):
            name, *numbers = leftover.name.removeprefix(".").removesuffix(".tmp").rsplit(".", 2)
            if name in file_names and len(numbers) == 2 and all(number.isdecimal() for number in numbers):
                leftover.unlink(missing_ok=True)


def full_disk(error: BaseException) -> str | None:
    """Returns the sentence for an error that was raised because a disk is full; None for any other error.

    Libraries and linkers raise errors of their own, which only quote the system's words.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _FULL_DISK:
            file = cause.filename2 or cause.filename or "a file"
            return f"cannot write {file}: {os.strerror(cause.errno)}; {ADVICE}"
        for line in str(cause).splitlines():
            if os.strerror(errno.ENOSPC) in line:
                return f"cannot write all files: {line.strip()}; {ADVICE}"
        cause = cause.__cause__ or cause.__context__
    return None


@contextmanager
def explain_write_errors(path: Path, advice: str = ADVICE) -> Iterator[None]:
    """Converts an error of the system, while a file or folder is written, to a sentence for the user.

    Raises:
        HarnessError: An error occurred.
    """
    try:
        yield
    except OSError as error:
        raise HarnessError(f"cannot write {path}: {error.strerror or error}; {advice}") from error


def make_folder(folder: Path, *, advice: str = ADVICE) -> None:
    """Creates a folder with its parents, and checks before the work that it can be written.

    Raises:
        HarnessError: The folder cannot be created or written.
    """
    with explain_write_errors(folder, advice):
        check_folder(folder)


def check_folder(folder: Path) -> None:
    """Creates a folder, and a file in it that is deleted at once.

    Raises:
        OSError: The folder cannot be created or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def check_writable(path: Path, *, advice: str = ADVICE) -> None:
    """Checks before the work that a file can be written into its existing folder.

    Raises:
        HarnessError: The file cannot be written.
    """
    with explain_write_errors(path, advice):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        tempfile.TemporaryFile(dir=path.parent).close()


@contextmanager
def replace_folder(folder: Path, is_replaceable: Callable[[Path], bool], kind: str) -> Iterator[Path]:
    """Yields an empty folder to fill, which replaces `folder` if the context ends without an error.

    The old contents stay until then, and also if the context ends with an exception.

    Args:
        folder: The folder; it must not exist, or be empty, or be replaceable.
        is_replaceable: Returns whether a folder that is not empty may be replaced.
        kind: Noun phrase for such a folder, with its article.

    Raises:
        HarnessError: The folder holds something else, another process is writing it, or there is no room or no
            permission.
    """
    folder = folder.resolve()
    filling = folder.with_name(f".{folder.name}.filling")
    previous = folder.with_name(f".{folder.name}.previous")
    if folder.exists() and not folder.is_dir():
        raise HarnessError(f"{folder} is a file: give the name of a folder")
    with explain_write_errors(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder, folder.with_name(f".{folder.name}.lock")):
        with explain_write_errors(folder):
            _recover(folder, filling, previous)
        if folder.is_dir() and any(folder.iterdir()) and not is_replaceable(folder):
            raise HarnessError(f"{folder} holds something else than {kind}: choose another folder")
        with contextlib.ExitStack() as cleanup:  # every step is taken, even if a signal interrupts another
            cleanup.callback(_remove, previous)
            cleanup.callback(_remove, filling)
            cleanup.callback(_restore, folder, previous)
            with explain_write_errors(folder):
                filling.mkdir()
                yield filling
                if folder.exists():
                    folder.rename(previous)
                filling.rename(folder)


def _restore(folder: Path, previous: Path) -> None:
    if previous.exists() and not folder.exists():
        previous.rename(folder)


def _recover(folder: Path, filling: Path, previous: Path) -> None:
    """Finishes the work of a process that was killed in `replace_folder`; this process holds the lock."""
    if previous.exists() and not folder.exists():
        # The process was killed between its renames, when the new folder was complete.
        (filling if filling.exists() else previous).rename(folder)
    _remove(filling)
    _remove(previous)


@contextmanager
def lock_folder(folder: Path, lock_file: Path) -> Iterator[None]:
    """Prevents other processes from writing a folder within the context; a killed process holds no lock.

    Args:
        folder: The folder.
        lock_file: The file that all writers of the folder lock; the file's folder exists.

    Raises:
        HarnessError: Another process is writing the folder, or the lock cannot be written.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(lock_file, timeout=0)
    with explain_write_errors(lock_file):
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
    """Yields an empty folder for this context alone, which other users cannot read, and removes it at the end.

    Folders that killed processes left in `parent` are removed. A lock stands next to each folder, and the system
    releases it when its process ends.

    Args:
        parent: Folder for scratch folders, created if it does not exist; other processes may use it at the same time.
        prefix: Prefix of the folder's name, not a path.

    Raises:
        HarnessError: The folder cannot be written.
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
    lock = FileLock(lock_file, thread_local=False)  # another thread may end the context
    with contextlib.ExitStack() as cleanup:  # every step is taken, even if a signal interrupts another
        cleanup.callback(lock.release)
        cleanup.callback(_remove, lock_file)
        cleanup.callback(_remove, folder)
        lock.acquire()
        folder.mkdir(mode=0o700)
        yield folder


@contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """Yields a `scratch_folder` among the system's temporary files.

    Args:
        kind: Purpose of the folder, a part of its name.

    Raises:
        HarnessError: The folder cannot be written.
    """
    with scratch_folder(Path(tempfile.gettempdir()), f"{_TEMPORARY}{kind}-") as folder:
        yield folder
