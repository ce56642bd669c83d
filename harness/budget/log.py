"""The log of measurements, one JSON object a line: what was measured before under the same conditions is not again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.budget.measuring import Measurement
from harness.core.budget import Groups
from harness.core.errors import HarnessError
from harness.files import write_text

ADVICE = "choose another file with --out"
"""Advice for the user where a file cannot be written."""


@dataclass
class Log:
    """Measurements under some conditions, in a file that is there as a whole after each of them.

    Attributes:
        file: The file; one that is there is gone on with.
        conditions: A digest of all that errors depend on besides the groups.
        reused: Number of measurements that were in the file.
        made: Number of measurements that were made.
    """

    file: Path
    conditions: str
    reused: int = 0
    made: int = 0

    def __post_init__(self) -> None:
        self._lines = _read(self.file)
        self._known: dict[Groups, Measurement] = {}
        for number, line in enumerate(self._lines, 1):
            try:
                data = json.loads(line)
                if data["conditions"] == self.conditions:
                    measured = Measurement.from_json(data)
                    self._known[frozenset(measured.half)] = measured
            except (ValueError, KeyError, TypeError) as error:
                raise HarnessError(f"{self.file} is damaged in line {number}: delete it to measure again") from error
        self._used: set[Groups] = set()

    def measured(self, half: Groups, measure: Callable[[Groups], Measurement]) -> Measurement:
        """Returns a measurement, from the file or made and added to it.

        Raises:
            HarnessError: The file cannot be written.
        """
        if half in self._known:
            self.reused += half not in self._used
            self._used.add(half)
            return self._known[half]
        found = measure(half)
        self._lines.append(json.dumps({"conditions": self.conditions, **found.to_json()}))
        write_text(self.file, "".join(f"{line}\n" for line in self._lines), advice=ADVICE, durable=True)
        self._known[half] = found
        self._used.add(half)
        self.made += 1
        return found

    def knows(self, half: Groups) -> bool:
        """Returns whether a measurement is there already."""
        return half in self._known


def _read(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise HarnessError(f"cannot read {file}: {error}; {ADVICE}") from error
