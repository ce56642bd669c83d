"""The database of tuned schedules: a folder with the file `schedules.json`, which has a record for each kernel.

A kernel is known by the key of its workload (`harness.compiler.schedules.cpu.schedule`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.compiler.schedules import DEFAULT_SCHEDULES, ChosenSchedules, Schedule
from harness.compiler.targets import TARGETS
from harness.core.errors import HarnessError
from harness.core.files import write_json
from harness.core.processors import THIS_MACHINE, Processors
from harness.core.settings import REPOSITORY

FORMAT = 1
FILE = "schedules.json"
TUNED = REPOSITORY / "fixtures" / "tuned"
"""The folder of the databases that are used by default; it has one folder for each tag of conditions."""
ADVICE = "free some space or choose another folder with --db"
"""Advice for the user where a database cannot be written."""


@dataclass(frozen=True)
class Conditions:
    """The circumstances of a measurement; only times under the same conditions can be compared.

    Attributes:
        target: Name of the target.
        cpu: LLVM's name of the processor that code is compiled for.
        threads: Number of threads that the code runs on.
        tvm: Version of TVM.
    """

    target: str
    cpu: str
    threads: int
    tvm: str

    @property
    def tag(self) -> str:
        """Name of the folder of their database; the version of TVM changes too often to be a part of it."""
        return f"{self.target}-{self.cpu}-{self.threads}-threads"


@dataclass(frozen=True)
class Record:
    """The best schedule of a kernel that was found under some conditions, and how far the search for a better one is.

    Attributes:
        task: Key of the kernel's workload.
        schedule: Decisions of the schedule; empty for the default one.
        conditions: Conditions under which it was measured.
        seconds, default_seconds: Median times of one call of this schedule and of the default one, which took turns.
        trials: Number of other schedules that were tried since this one is the best.
        machine: Model of the processor.
        date: Date and time at which it was measured, in UTC, as ISO 8601 writes them.
    """

    task: str
    schedule: Schedule
    conditions: Conditions
    seconds: float
    default_seconds: float
    trials: int
    machine: str
    date: str

    @property
    def gain(self) -> float:
        """The default schedule's time in units of this schedule's time."""
        return self.default_seconds / self.seconds

    def to_plain(self) -> dict[str, Any]:
        """Returns the record as a JSON object."""
        values = {**asdict(self), **asdict(self.conditions), "schedule": dict(self.schedule)}
        del values["conditions"]
        return values

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Record:
        """Returns the record that a JSON object describes.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: It describes none.
        """
        schedule = {str(name): value for name, value in values["schedule"].items()}
        if not all(type(value) is int for value in schedule.values()):
            raise ValueError("a decision is no number")
        seconds, default_seconds = float(values["seconds"]), float(values["default_seconds"])
        if not (0 < seconds < 1e6 and 0 < default_seconds < 1e6):
            raise ValueError("a time is impossible")
        conditions = Conditions(str(values["target"]), str(values["cpu"]), int(values["threads"]), str(values["tvm"]))
        counted = int(values["trials"]), str(values["machine"]), str(values["date"])
        return cls(str(values["task"]), schedule, conditions, seconds, default_seconds, *counted)


@dataclass(frozen=True)
class Database:
    """A database that was read from its folder.

    Attributes:
        path: The folder.
        target: Name of the target that the schedules are for.
        records: All records of the database.
    """

    path: Path
    target: str
    records: tuple[Record, ...] = ()

    def found(self, processors: Processors = THIS_MACHINE) -> dict[str, Record]:
        """Returns the records that were made with this version of TVM, for a CPU and this number of threads."""
        conditions = current_conditions(self.target, processors)
        return {record.task: record for record in self.records if record.conditions == conditions}

    def notices(self, processors: Processors = THIS_MACHINE) -> list[str]:
        """Returns one sentence for each of the other conditions, whose records are left out."""
        conditions = current_conditions(self.target, processors)
        others = Counter(record.conditions for record in self.records if record.conditions != conditions)
        return [
            f"{count} record{'s' if count > 1 else ''} of {self.path} left out: "
            f"made {_describe_differences(other, conditions)}; tune again to have such here."
            for other, count in others.items()
        ]

    def store(self, record: Record) -> Database:
        """Writes a record in place of that of the same kernel under the same conditions; returns the new database.

        Raises:
            HarnessError: The file cannot be written; what was there before still is.
        """
        known = {(entry.task, entry.conditions): entry for entry in self.records}
        known[record.task, record.conditions] = record
        records = sorted(known.values(), key=lambda entry: (entry.task, entry.conditions.tag, entry.conditions.tvm))
        values = {"format": FORMAT, "target": self.target, "records": [entry.to_plain() for entry in records]}
        write_json(self.path / FILE, values, sort_keys=True, advice=ADVICE, durable=True)
        return Database(self.path, self.target, tuple(records))


def _describe_differences(other: Conditions, conditions: Conditions) -> str:
    """Returns the ways in which other conditions differ from these, as part of a sentence."""
    ways = {
        f"with TVM {other.tvm}, this is {conditions.tvm}": other.tvm != conditions.tvm,
        f"for {other.cpu}, this is {conditions.cpu}": other.cpu != conditions.cpu,
        f"for {other.threads} threads, these are {conditions.threads}": other.threads != conditions.threads,
    }
    return " and ".join(way for way, differs in ways.items() if differs)


def current_conditions(target: str, processors: Processors = THIS_MACHINE) -> Conditions:
    """Returns the conditions of this process, for the target of that name and the CPU among the processors."""
    from harness.compiler.targets.llvm import cpu_name
    from harness.core.machine import versions
    from harness.core.processes.threads import thread_count

    return Conditions(target, cpu_name(processors), thread_count(), versions()["apache-tvm"] or "unknown")


def open_database(path: Path, target: str | None = None) -> Database:
    """Reads a database.

    Args:
        path: Folder of the database.
        target: Name of the target that the database must be for; None if any target will do.

    Raises:
        HarnessError: There is no database, it is damaged, or it is for another target.
    """
    file = path / FILE
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        version, made_for = int(values["format"]), str(values["target"])
        records = tuple(map(Record.from_plain, values["records"])) if version == FORMAT else ()
    except (FileNotFoundError, NotADirectoryError):
        raise HarnessError(
            f"there is no tuning database in {path}: make one with `sam3-tvm tune --db {path}`, or leave out --db"
        ) from None
    except OSError as error:
        raise HarnessError(f"cannot read {file}: {error.strerror}; leave out --db to do without it") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise HarnessError(f"{file} is damaged: delete it and tune again") from error
    if version != FORMAT:
        raise HarnessError(f"{file} has format {version}, this version reads {FORMAT}: tune again into another folder")
    if target is not None and made_for != target:
        raise HarnessError(f"{path} is a tuning database for {made_for}, not for {target}: give another --db")
    return Database(path, made_for, records)


def default_database(target: str, processors: Processors = THIS_MACHINE) -> Path | None:
    """Returns the folder in `fixtures/tuned` that fits the processors, even if its search found nothing."""
    if not (TARGETS[target].tunable and TUNED.is_dir()):
        return None
    path = TUNED / current_conditions(target, processors).tag
    return path if (path / FILE).is_file() else None


def chosen_schedules(database: Path | None, target: str, processors: Processors = THIS_MACHINE) -> ChosenSchedules:
    """Returns the schedules that a target is compiled with, and their origin in words.

    There are none without a database or a tunable target.

    Raises:
        HarnessError: The database cannot be used.
    """
    if database is None or not TARGETS[target].tunable:
        return DEFAULT_SCHEDULES
    found = open_database(database, target).found(processors)
    schedules = {key: record.schedule for key, record in found.items() if record.schedule}
    name = database.resolve().name
    if not schedules:
        return ChosenSchedules({}, f"untuned: the default ones, the database {name} has none that is better")
    return ChosenSchedules(schedules, f"tuned: {len(schedules)} from the database {name}, the default ones otherwise")
