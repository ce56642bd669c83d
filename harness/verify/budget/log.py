"""Logs measurements, one JSON object per line, so that none is repeated under the same conditions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.core.budget import Groups
from harness.core.errors import HarnessError
from harness.core.files import write_text
from harness.verify.budget.measurement import Measurement

ADVICE = "choose another file with --out"
"""Advice for the user if a file cannot be written."""


@dataclass
class Log:
    """Measurements under some conditions, in a file that is rewritten as a whole after each of them.

    Attributes:
        file: The file; an existing one is continued.
        conditions: A digest of everything that errors depend on besides the groups.
        reused_count: Number of measurements that were in the file.
        new_count: Number of new measurements.
    """

    file: Path
    conditions: str
    reused_count: int = 0
    new_count: int = 0

    def __post_init__(self) -> None:
        self._lines = _read(self.file)
        self._measurements: dict[Groups, Measurement] = {}
        for number, line in enumerate(self._lines, 1):
            try:
                data = json.loads(line)
                if data["conditions"] == self.conditions:
                    measurement = Measurement.from_json(data)
                    self._measurements[frozenset(measurement.half)] = measurement
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                raise HarnessError(f"{self.file} is damaged in line {number}: delete it to measure again") from error
        self._used: set[Groups] = set()

    def get_or_measure(self, half: Groups, measure: Callable[[Groups], Measurement]) -> Measurement:
        """Returns a measurement from the file, or makes it and adds it to the file.

        Raises:
            HarnessError: The file cannot be written.
        """
        if half in self._measurements:
            self.reused_count += half not in self._used
            self._used.add(half)
            return self._measurements[half]
        measurement = measure(half)
        self._lines.append(json.dumps({"conditions": self.conditions, **measurement.to_json()}))
        write_text(self.file, "".join(f"{line}\n" for line in self._lines), advice=ADVICE, durable=True)
        self._measurements[half] = measurement
        self._used.add(half)
        self.new_count += 1
        return measurement

    def contains(self, half: Groups) -> bool:
        """Returns whether a measurement exists."""
        return half in self._measurements


def _read(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise HarnessError(f"cannot read {file}: {error}; {ADVICE}") from error
