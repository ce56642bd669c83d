"""Keeps the journal of a job, which lists finished work and result files, so that an interrupted run can continue.

The journal stays beside complete results; the same job then has nothing to do. Files that it does not list are neither
replaced nor deleted. The first line is the question: the model and all inputs; entries belong to a question by its
digest. A new question, or another model, starts a new journal with the list of files. Each line begins
with its checksum: a line that is incomplete or was damaged since is ignored.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from harness.core.errors import HarnessError
from harness.core.files import append_bytes, lock_folder, make_folder, remove_temporary_files, write_file
from harness.runtime.decoding import convert

JOURNAL = ".journal.jsonl"
LOCK = ".lock"

_QUESTION, _FILES = "question", "files"
_WHOLE = {"whole": True}


@contextmanager
def results_folder(folder: Path) -> Iterator[None]:
    """Makes the folder of a job's results, and locks it against other commands in the context.

    Raises:
        HarnessError: The folder cannot be written, or another command is writing it.
    """
    make_folder(folder)
    with lock_folder(folder, folder / LOCK):
        yield


def existing_files(files: Iterable[Path], folders: Iterable[Path], masks: re.Pattern[str]) -> Iterator[Path]:
    """Yields those of the files that exist, and the files in the folders whose names are those of masks."""
    yield from (path for path in files if path.exists())
    for folder in folders:
        if folder.is_dir():
            yield from [path for path in folder.iterdir() if masks.fullmatch(path.name)]


class Journal:
    """The finished work of a job, in a file of its output folder, entry after entry.

    Attributes:
        listed: Names of existing files that earlier runs wrote, relative to the folder.
        is_whole: Whether the results are complete.
    """

    def __init__(
        self,
        folder: Path,
        question: dict[str, Any],
        results: Iterable[Path] = (),
        keeps: Callable[[dict[str, Any]], bool] = lambda entry: True,
    ) -> None:
        """Continues the journal of an earlier run with the same question, or starts one.

        Args:
            folder: Folder of the results; it exists.
            question: All inputs of the results besides those of single entries; JSON.
            results: Existing files that the job would replace or delete.
            keeps: Returns whether an entry of the earlier run stays; called for each of them in their order.

        Raises:
            HarnessError: The journal cannot be written, or does not list one of `results`.
        """
        self._folder, self._path = folder, folder / JOURNAL
        self._question, self._digest = question, _digest(question)
        listed = {name for line in _lines(self._path) for name in _listed_files(folder, line)}
        for path in results:
            if self._name(path) not in listed:
                raise HarnessError(
                    f"{path} would be replaced or deleted, and was not written by this command; "
                    "give another folder with --out."
                )
        remove_temporary_files([self._path, *(folder / name for name in listed)])
        self.listed = frozenset(name for name in listed if (folder / name).exists())
        self.is_whole = self._rewrite(keeps)

    def _rewrite(self, keeps: Callable[[dict[str, Any]], bool]) -> bool:
        """Writes the entries that stay, and returns whether the results are complete.

        They are written anew, so that the next line does not continue an incomplete one.
        """
        is_whole, is_unchanged = False, True
        with write_file(self._path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.write(_line({_QUESTION: self._question}))
            file.write(_line({_FILES: sorted(self.listed)}))
            for entry in self:
                is_whole = entry == _WHOLE and is_unchanged
                if entry == _WHOLE:
                    continue
                if keeps(entry):
                    file.write(_line({_QUESTION: self._digest} | entry))
                else:
                    is_unchanged = False
            if is_whole:
                file.write(_line({_QUESTION: self._digest} | _WHOLE))
        return is_whole

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields the entries."""
        return entries_of(self._folder, self._question)

    def list_files(self, paths: Iterable[Path]) -> None:
        """Lists files of the job; must be called before they are written.

        Raises:
            HarnessError: The journal cannot be written.
        """
        if new := [name for name in map(self._name, paths) if name not in self.listed]:
            append_bytes(self._path, _line({_FILES: new}).encode())

    def add(self, entry: dict[str, Any]) -> None:
        """Adds an entry; the file has its line when this returns.

        Raises:
            HarnessError: The journal cannot be written.
        """
        append_bytes(self._path, _line({_QUESTION: self._digest} | entry).encode())
        self.is_whole = entry == _WHOLE

    def end(self) -> None:
        """Marks the results as complete.

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
    """Yields the entries of a question in a folder's journal, including the mark of complete results."""
    digest = _digest(question)
    for line in _lines(folder / JOURNAL):
        if line.get(_QUESTION) == digest:
            yield {name: value for name, value in line.items() if name != _QUESTION}


def has_form(entry: dict[str, Any], form: type, categories: Collection[str]) -> bool:
    """Returns whether an entry has the types of a form, and its annotations these categories; a damaged one may not."""
    try:
        convert(entry, form)
    except ValueError:
        return False
    return all(annotation["category"] in categories for annotation in entry["annotations"])


def is_whole(folder: Path, question: dict[str, Any]) -> bool:
    """Returns whether the journal in a folder marks the results of a question as complete."""
    last = None
    for entry in entries_of(folder, question):
        last = entry
    return last == _WHOLE


def _listed_files(folder: Path, line: dict[str, Any]) -> Iterator[str]:
    """Yields the names in a line that results in this folder can have."""
    names = line.get(_FILES)
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts:
            with suppress(OSError):  # the system refuses the name
                (folder / name).exists()
                yield name


def _digest(question: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:16]


def _line(value: dict[str, Any]) -> str:
    text = json.dumps(value)
    return f"{_checksum(text)} {text}\n"


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the complete lines of a journal; none if there is no such file."""
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if (value := _parse_line(line)) is not None:
                    yield value


def _parse_line(line: str) -> dict[str, Any] | None:
    checksum, _, text = line.rstrip("\n").partition(" ")
    if line.startswith("{"):  # earlier versions wrote no checksum
        text = line
    elif checksum != _checksum(text):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
