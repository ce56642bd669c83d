"""MetaSchedule's records on disk: its JSON database in a folder for each place, repaired and guarded.

MetaSchedule appends a line for every workload and every record. A line that was being written when the process died is
cut off, and so are records of a workload whose line is lost; anything else that cannot be read is an error.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import tvm
from tvm.s_tir import meta_schedule as ms

from harness.core.errors import HarnessError
from harness.tuning.lines import read_lines, unwritable
from harness.tuning.trials import Place
from harness.tuning.worker import last_line

FOLDER = "rules"
WORKLOADS, RECORDS = "database_workload.json", "database_tuning_record.json"
LOG = "trials.jsonl"
FAILED_SECONDS = 1e10
"""MetaSchedule's time of a candidate that did not work; such records are never used."""


@dataclass(frozen=True)
class Opened:
    """Records of one place.

    Attributes:
        path: Their folder.
        records: MetaSchedule's database; what is committed to it is appended to the files.
        notices: A sentence for everything that was left out.
    """

    path: Path
    records: ms.database.JSONDatabase
    notices: tuple[str, ...] = ()

    def of(self, module: tvm.IRModule) -> list[ms.database.TuningRecord]:
        """Every record of a function, failures included, in no particular order."""
        if not self.records.has_workload(module):
            return []
        workload = self.records.commit_workload(module)
        return [record for record in self.records.get_all_tuning_records() if record.workload.same_as(workload)]

    def add(self, record: ms.database.TuningRecord) -> None:
        """Appends a record and waits until the disk has it.

        Raises:
            HarnessError: It could not be written.
        """
        try:
            self.records.commit_tuning_record(record)
            self.check()
        except (tvm.error.TVMError, RuntimeError) as error:
            raise unwritable(self.path, last_line(error)) from error

    def note(self, trial: Mapping[str, Any]) -> None:
        """Adds a trial to the log, which is for people to read.

        Raises:
            HarnessError: It could not be written.
        """
        path = self.path / LOG
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(trial) + "\n")
        except OSError as error:
            raise unwritable(path, error.strerror or str(error)) from error

    def check(self) -> None:
        """Makes sure that what was appended is on the disk; MetaSchedule itself does not look.

        Raises:
            HarnessError: It is not.
        """
        for name in (WORKLOADS, RECORDS):
            path = self.path / name
            try:
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
                    size = file.seek(0, os.SEEK_END)
                    file.seek(max(0, size - 1))
                    if size and file.read(1) != b"\n":
                        raise OSError("the last line is incomplete, the disk may be full")
            except OSError as error:
                raise unwritable(path, error.strerror or str(error)) from error


def place_folder(database: Path, place: Place) -> Path:
    """Where the records of a place lie: no other version of TVM, CPU or number of threads can read them by mistake."""
    return database / FOLDER / f"{place.tag}-tvm-{place.tvm}"


@contextlib.contextmanager
def opened_for_tuning(database: Path, place: Place) -> Iterator[Opened]:
    """The records of a place, for this process alone.

    Raises:
        HarnessError: They are damaged, cannot be written, or another process is tuning into them.
    """
    path = place_folder(database, place)
    lock = filelock.FileLock(path / ".lock")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=1)
    except filelock.Timeout as error:
        raise HarnessError(f"another process is tuning into {path}: wait for it, or give another --db") from error
    except OSError as error:
        raise HarnessError(f"cannot write {path}: {error.strerror}; choose another folder with --db") from error
    try:
        yield open_records(database, place)
    finally:
        lock.release()


def open_records(database: Path, place: Place) -> Opened:
    """Reads the records of a place, after cutting off what was not written to its end.

    Raises:
        HarnessError: They are damaged in the middle, or cannot be read.
    """
    path = place_folder(database, place)
    notices = []
    others = [other.name for other in sorted((database / FOLDER).glob("*-tvm-*")) if other.name != path.name]
    if others and not any(read_lines(path / RECORDS)):
        notices.append(
            f"records of {database / FOLDER} left out: they are of {', '.join(others)}, this is {path.name}."
        )
    workloads = _repaired(path / WORKLOADS, notices)
    _repaired(path / RECORDS, notices, lambda entry: 0 <= int(entry[0]) < workloads)
    try:
        records = ms.database.JSONDatabase(work_dir=str(path))
    except Exception as error:
        raise HarnessError(
            f"TVM cannot read the records in {path}: delete the folder and tune again, or give another --db"
        ) from error
    return Opened(path, records, tuple(notices))


def _repaired(path: Path, notices: list[str], belongs: Any = lambda entry: True) -> int:
    """The number of lines, once the torn last one and those after the last that belongs are cut off."""
    lines, torn = read_lines(path)
    kept = 0
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            if not isinstance(entry, list) or len(entry) != 2:
                raise ValueError("no pair")
            ours = belongs(entry)
        except (ValueError, TypeError) as error:
            raise HarnessError(
                f"{path} is damaged in line {number}: delete {path.parent} and tune again, or give another --db"
            ) from error
        if not ours:
            break
        kept = number
    if torn or kept < len(lines):
        lost = len(lines) - kept + bool(torn)
        notices.append(f"{path} was not written to its end: the last {lost} line{'s' * (lost > 1)} left out.")
        length = sum(len(line) + 1 for line in lines[:kept])
        try:
            os.truncate(path, length)
        except OSError as error:
            raise HarnessError(f"cannot repair {path}: {error.strerror}; choose another folder with --db") from error
    return kept
