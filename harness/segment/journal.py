"""The journal of a job: what is done of it and which files are its own, so that a run that was ended goes on.

It stays beside the results when they are whole: the same job then has nothing to do. What it does not list is neither
replaced nor deleted. The first line says what was asked; what is done belongs to a question by its digest. A journal of
another question, or of another model, is begun anew, with the list of files. A line that was not written to its end is
ignored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.core.errors import HarnessError
from harness.files import append_bytes, lock_folder, make_folder, remove_temporary_files, write_file

JOURNAL = ".journal.jsonl"
LOCK = ".lock"

_QUESTION, _FILES = "question", "files"
_WHOLE = {"whole": True}


@contextmanager
def results_folder(folder: Path) -> Iterator[None]:
    """Makes the folder of a job's results, and keeps other commands from writing it as long as the context lasts.

    Raises:
        HarnessError: It cannot be written, or another command is writing it.
    """
    make_folder(folder)
    with lock_folder(folder, folder / LOCK):
        yield


class Journal:
    """What is done of a job, in a file of its output folder, entry after entry.

    Attributes:
        listed: Names, below the folder, of the files that are there and that earlier runs wrote.
        is_whole: Whether the last thing that happened was that the results became whole.
    """

    def __init__(
        self,
        folder: Path,
        question: dict[str, Any],
        results: Iterable[Path] = (),
        is_kept: Callable[[dict[str, Any]], bool] = lambda entry: True,
    ) -> None:
        """Takes the journal of an earlier run that was asked the same, or begins one.

        Args:
            folder: Folder of the results; it exists.
            question: All that the results depend on besides what the entries are about; JSON.
            results: Files that are there and that the job would replace or delete.
            is_kept: Whether an entry of the earlier run stays; called for each of them in their order.

        Raises:
            HarnessError: The journal cannot be written, or one of `results` was not written by a run that it tells of.
        """
        self._folder, self._path = folder, folder / JOURNAL
        self._digest = _digest(question)
        listed = {name for line in _lines(self._path) for name in line.get(_FILES, ())}
        for path in results:
            if self._name(path) not in listed:
                raise HarnessError(
                    f"{path} would be replaced or deleted, and was not written by this command; "
                    "give another folder with --out."
                )
        remove_temporary_files([self._path, *(folder / name for name in listed)])
        self.listed = frozenset(name for name in listed if (folder / name).exists())
        self.is_whole, all_kept = False, True
        # What is kept is written anew, so that the next line does not continue half of one.
        with write_file(self._path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.write(_line({_QUESTION: question}))
            file.write(_line({_FILES: sorted(self.listed)}))
            for entry in entries_of(folder, question):
                self.is_whole = entry == _WHOLE and all_kept
                if entry == _WHOLE:
                    continue
                if is_kept(entry):
                    file.write(_line({_QUESTION: self._digest} | entry))
                else:
                    all_kept = False
            if self.is_whole:
                file.write(_line({_QUESTION: self._digest} | _WHOLE))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Reads the entries."""
        return _entries(self._path, self._digest)

    def list_files(self, paths: Iterable[Path]) -> None:
        """Lists files of the job; to be called before they are written.

        Raises:
            HarnessError: The journal cannot be written.
        """
        if new := [name for name in map(self._name, paths) if name not in self.listed]:
            append_bytes(self._path, _line({_FILES: new}).encode())

    def add(self, entry: dict[str, Any]) -> None:
        """Adds what is done; the file has its line when this returns.

        Raises:
            HarnessError: It cannot be written.
        """
        append_bytes(self._path, _line({_QUESTION: self._digest} | entry).encode())
        self.is_whole = entry == _WHOLE

    def end(self) -> None:
        """Says that the results are whole.

        Raises:
            HarnessError: The journal cannot be written.
        """
        if not self.is_whole:
            self.add(_WHOLE)

    def remove_listed(self, path: Path) -> None:
        """Removes a file if an earlier run wrote it."""
        if self._name(path) in self.listed:
            path.unlink(missing_ok=True)

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()


def entries_of(folder: Path, question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Reads what the journal that an earlier run has left in a folder tells of a question, the last line included."""
    return _entries(folder / JOURNAL, _digest(question))


def is_whole(folder: Path, question: dict[str, Any]) -> bool:
    """Whether the journal in a folder says that the results of a question are whole."""
    last = None
    for entry in entries_of(folder, question):
        last = entry
    return last == _WHOLE


def _digest(question: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:16]


def _line(value: dict[str, Any]) -> str:
    return f"{json.dumps(value)}\n"


def _entries(path: Path, digest: str) -> Iterator[dict[str, Any]]:
    """What belongs to the question of a digest."""
    for line in _lines(path):
        if line.get(_QUESTION) == digest:
            yield {name: value for name, value in line.items() if name != _QUESTION}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a journal; none if there is no such file."""
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if (value := _whole(line)) is not None:
                    yield value


def _whole(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
