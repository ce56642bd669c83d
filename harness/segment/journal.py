"""The journal of a job: one line for each image that is done, so that a job that was killed goes on where it was.

The first line says what was asked. A journal of another question, or of another model, is begun anew. A line that was
not written to its end is ignored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.files import write_text, writing

JOURNAL = ".journal.jsonl"


class Journal:
    """The images of a job that are done, in a file of its output folder.

    Attributes:
        done: Entry of each image that is done, by the image's key.
    """

    def __init__(self, folder: Path, question: dict[str, Any]) -> None:
        """Reads the journal of an earlier run that was asked the same, or begins one.

        Args:
            folder: Folder of the results; it exists.
            question: All that the results depend on besides the images; JSON.

        Raises:
            HarnessError: The journal cannot be written.
        """
        self._path = folder / JOURNAL
        first = json.dumps(question, sort_keys=True)
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.is_file() else []
        entries = [entry for line in lines[1:] if (entry := _whole(line)) is not None] if lines[:1] == [first] else []
        self.done: dict[str, dict[str, Any]] = {entry["key"]: entry for entry in entries}
        # What is kept is written anew, so that the next line does not continue half of one.
        write_text(self._path, "".join(f"{line}\n" for line in (first, *map(json.dumps, entries))))

    def add(self, key: str, entry: dict[str, Any]) -> None:
        """Adds an image that is done; the disk has its line when this returns.

        Raises:
            HarnessError: It cannot be written.
        """
        self.done[key] = entry | {"key": key}
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.done[key]) + "\n")

    def remove(self) -> None:
        """Removes the file: the job is done."""
        self._path.unlink(missing_ok=True)


def _whole(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return None
    return entry if isinstance(entry, dict) and "key" in entry else None
