"""The journal of a job: one line for each part of it that is done, so that a job that was killed goes on where it was.

The first line says what was asked. A journal of another question, or of another model, is begun anew. A line that was
not written to its end is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness.files import append_bytes, unfinished

JOURNAL = ".journal.jsonl"


class Journal:
    """What is done of a job, in a file of its output folder, entry after entry."""

    def __init__(
        self, folder: Path, question: dict[str, Any], is_kept: Callable[[dict[str, Any]], bool] = lambda entry: True
    ) -> None:
        """Takes the journal of an earlier run that was asked the same, or begins one.

        Args:
            folder: Folder of the results; it exists.
            question: All that the results depend on besides what the entries are about; JSON.
            is_kept: Whether an entry of the earlier run stays; called for each of them in their order.

        Raises:
            HarnessError: The journal cannot be written.
        """
        self._path = folder / JOURNAL
        first = json.dumps(question, sort_keys=True)
        # What is kept is written anew, so that the next line does not continue half of one.
        with unfinished(self._path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.write(f"{first}\n")
            for entry in entries_of(folder, question):
                if is_kept(entry):
                    file.write(f"{json.dumps(entry)}\n")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Reads the entries."""
        return _entries(self._path)

    def add(self, entry: dict[str, Any]) -> None:
        """Adds what is done; the file has its line when this returns.

        Raises:
            HarnessError: It cannot be written.
        """
        append_bytes(self._path, f"{json.dumps(entry)}\n".encode())

    def remove(self) -> None:
        """Removes the file: the job is done."""
        self._path.unlink(missing_ok=True)


def entries_of(folder: Path, question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Reads the journal that an earlier run has left in a folder; there is nothing if it was asked something else."""
    path = folder / JOURNAL
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            is_same = file.readline() == f"{json.dumps(question, sort_keys=True)}\n"
        if is_same:
            yield from _entries(path)


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines after the first."""
    with path.open(encoding="utf-8", errors="replace") as file:
        next(file, None)
        for line in file:
            if (entry := _whole(line)) is not None:
                yield entry


def _whole(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return None
    return entry if isinstance(entry, dict) else None
