"""Reads and writes a database of tuned schedules: a folder whose file `schedules.json` has a record per kernel.

A kernel is identified by the key of its workload (`harness.compiler.schedules.cpu.schedule`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from harness.compiler.schedules import DEFAULT_SCHEDULES, ChosenSchedules, Schedule
from harness.compiler.targets import TARGETS
from harness.core.errors import HarnessError
from harness.core.files import write_json
from harness.core.processors import THIS_MACHINE, Processors
from harness.core.settings import FIXTURES
from harness.runtime.decoding import convert, decode

FORMAT = 1
FILE = "schedules.json"
TUNED = FIXTURES / "tuned"
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
        """Returns the name of their database's folder, without TVM's version, which changes too often."""
        return f"{self.target}-{self.cpu}-{self.threads}-threads"


_Seconds = Annotated[float, Meta(gt=0, lt=1e6)]


@dataclass(frozen=True)
class Record:
    """The best schedule of a kernel under some conditions, and the progress of the search for a better one.

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
    seconds: _Seconds
    default_seconds: _Seconds
    trials: int
    machine: str
    date: str

    @property
    def gain(self) -> float:
        """Returns the default schedule's time divided by this schedule's."""
        return self.default_seconds / self.seconds

    def to_plain(self) -> dict[str, Any]:
        """Returns the record as a JSON object."""
        values = {**asdict(self), **asdict(self.conditions), "schedule": dict(self.schedule)}
        del values["conditions"]
        return values


@dataclass(frozen=True)
class _File:
    """The spec of a database's file; each of its records has the fields of its conditions, too."""

    format: int
    target: str
    records: list[dict[str, Any]]


@dataclass(frozen=True)
class Database:
    """The records of one folder.

    Attributes:
        path: The folder.
        target: Name of the target that the schedules are for.
        records: All records of the database.
    """

    path: Path
    target: str
    records: tuple[Record, ...] = ()

    def matching_records(self, processors: Processors = THIS_MACHINE) -> dict[str, Record]:
        """Returns the records for this version of TVM, a CPU and this number of threads, by kernel."""
        conditions = current_conditions(self.target, processors)
        return {record.task: record for record in self.records if record.conditions == conditions}

    def notices(self, processors: Processors = THIS_MACHINE) -> list[str]:
        """Returns one sentence for each of the other conditions, whose records are not used."""
        conditions = current_conditions(self.target, processors)
        counts = Counter(record.conditions for record in self.records if record.conditions != conditions)
        return [
            f"{count} record{'s' if count > 1 else ''} of {self.path} left out: "
            f"made {_describe_differences(recorded, conditions)}; tune again to have such here."
            for recorded, count in counts.items()
        ]

    def store(self, record: Record) -> Database:
        """Writes a record in place of an older one of its kernel and conditions; returns the new database.

        Raises:
            HarnessError: The file cannot be written; the old file stays.
        """
        records_by_kernel = {(entry.task, entry.conditions): entry for entry in self.records}
        records_by_kernel[record.task, record.conditions] = record
        records = sorted(
            records_by_kernel.values(), key=lambda entry: (entry.task, entry.conditions.tag, entry.conditions.tvm)
        )
        values = {"format": FORMAT, "target": self.target, "records": [entry.to_plain() for entry in records]}
        write_json(self.path / FILE, values, sort_keys=True, advice=ADVICE, durable=True)
        return Database(self.path, self.target, tuple(records))


def _describe_differences(recorded: Conditions, conditions: Conditions) -> str:
    """Returns the differences of recorded conditions from current ones, as part of a sentence."""
    ways = {
        f"with TVM {recorded.tvm}, this is {conditions.tvm}": recorded.tvm != conditions.tvm,
        f"for {recorded.cpu}, this is {conditions.cpu}": recorded.cpu != conditions.cpu,
        f"for {recorded.threads} threads, these are {conditions.threads}": recorded.threads != conditions.threads,
    }
    return " and ".join(way for way, differs in ways.items() if differs)


def current_conditions(target: str, processors: Processors = THIS_MACHINE) -> Conditions:
    """Returns the conditions of this process for a target and the CPU among the processors."""
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
        stored = convert(decode(file.read_bytes()), _File)
        nested = [{**values, "conditions": values} for values in stored.records if stored.format == FORMAT]
        records = convert(nested, tuple[Record, ...])
    except (FileNotFoundError, NotADirectoryError):
        raise HarnessError(
            f"there is no tuning database in {path}: make one with `sam3-tvm tune --db {path}`, or leave out --db"
        ) from None
    except OSError as error:
        raise HarnessError(f"cannot read {file}: {error.strerror}; leave out --db to do without it") from error
    except ValueError as error:
        raise HarnessError(f"{file} is damaged ({error}): delete it and tune again") from error
    if stored.format != FORMAT:
        version = f"format {stored.format}, this version reads {FORMAT}"
        raise HarnessError(f"{file} has {version}: tune again into another folder")
    if target is not None and stored.target != target:
        raise HarnessError(f"{path} is a tuning database for {stored.target}, not for {target}: give another --db")
    return Database(path, stored.target, records)


def find_default_database(target: str, processors: Processors = THIS_MACHINE) -> Path | None:
    """Returns the folder in `fixtures/tuned` for the processors; None if there is none or the target is not tuned."""
    if not (TARGETS[target].tunable and TUNED.is_dir()):
        return None
    path = TUNED / current_conditions(target, processors).tag
    return path if (path / FILE).is_file() else None


def choose_schedules(database: Path | None, target: str, processors: Processors = THIS_MACHINE) -> ChosenSchedules:
    """Returns the schedules that a target is compiled with, and their origin in words.

    Without a database or a tunable target, these are the default schedules.

    Raises:
        HarnessError: The database cannot be used.
    """
    if database is None or not TARGETS[target].tunable:
        return DEFAULT_SCHEDULES
    records = open_database(database, target).matching_records(processors)
    schedules = {key: record.schedule for key, record in records.items() if record.schedule}
    name = database.resolve().name
    if not schedules:
        return ChosenSchedules({}, f"untuned: the default ones, the database {name} has none that is better")
    return ChosenSchedules(schedules, f"tuned: {len(schedules)} from the database {name}, the default ones otherwise")
