"""The database of tuning: a folder with the best schedule of each task, merged under a lock, never overwritten.

The file `schedules.json` has a record for each task and its conditions; the file `trials.jsonl` (see `trials.py`) has
every trial that led there. A task is known by its key, which names its element type only if that is not float32.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.core.errors import HarnessError
from harness.core.processors import THIS_MACHINE, Processors
from harness.core.settings import REPOSITORY
from harness.files import explain_write_errors, write_json
from harness.schedules import DEFAULT_SCHEDULES, UNTUNED, ChosenSchedules, Schedule, Schedules
from harness.targets import TARGETS
from harness.tuned.trials import FILE as TRIALS
from harness.tuned.trials import Conditions, read_trials

FORMAT = 1
FILE = "schedules.json"
TUNED = REPOSITORY / "fixtures" / "tuned"
"""The folder of the databases that are used by default; it has one folder for each tag of conditions."""
ADVICE = "free some space or choose another folder with --db"
"""Advice for the user where a database cannot be written."""
_LOCK = ".lock"
_LOCK_SECONDS = 30.0


@dataclass(frozen=True)
class Record:
    """The best schedule of a task that was found under some conditions.

    Attributes:
        task: Key of the task.
        schedule: Decisions of the schedule.
        conditions: Conditions under which it was measured.
        seconds, default_seconds: Median times of this schedule and of the default one, which took turns.
        torch_seconds: Time of PyTorch, if it was measured.
        r_rms: Rms error against float64, in units of the default schedule's rms error.
        trials, failed, rejected: Number of schedules tried, of those that crashed or hung, and of wrong results.
        machine: Model of the processor.
        date: Date and time at which it was found, in UTC, as ISO 8601 writes them.
        seed: Seed of the search.
    """

    task: str
    schedule: Schedule
    conditions: Conditions
    seconds: float
    default_seconds: float
    torch_seconds: float | None
    r_rms: float
    trials: int
    failed: int
    rejected: int
    machine: str
    date: str
    seed: int

    @property
    def gain(self) -> float:
        """The default schedule's time in units of this schedule's time."""
        return self.default_seconds / self.seconds

    def to_plain(self) -> dict[str, Any]:
        """Returns the record as a JSON object."""
        values = {**asdict(self), **asdict(self.conditions), "schedule": dict(sorted(self.schedule.items()))}
        del values["conditions"]
        return values


def better_record(a: Record, b: Record) -> Record:
    """Returns the one of two records of a task that has the larger gain; the order of the two does not matter."""
    return max(a, b, key=lambda record: (record.gain, record.trials, json.dumps(record.to_plain(), sort_keys=True)))


def merge_records(*groups: Iterable[Record]) -> list[Record]:
    """Returns the best record of each task under the same conditions, ordered by their names."""
    best: dict[tuple[str, Conditions], Record] = {}
    for record in (record for group in groups for record in group):
        known = best.get((record.task, record.conditions))
        best[record.task, record.conditions] = record if known is None else better_record(known, record)
    return [best[key] for key in sorted(best, key=lambda key: (key[0], key[1].tag, key[1].tvm))]


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

    def schedules(self, processors: Processors = THIS_MACHINE) -> dict[str, Schedule]:
        """Returns the schedules that were found with this version of TVM, for a CPU and this number of threads."""
        conditions = current_conditions(self.target, processors)
        return {record.task: record.schedule for record in self.records if record.conditions == conditions}

    def notices(self, processors: Processors = THIS_MACHINE) -> list[str]:
        """Returns one sentence for each of the other conditions, whose records are left out."""
        conditions = current_conditions(self.target, processors)
        others: dict[Conditions, int] = {}
        for record in self.records:
            if record.conditions != conditions:
                others[record.conditions] = others.get(record.conditions, 0) + 1
        return [
            f"{count} record{'s' if count > 1 else ''} of {self.path} left out: "
            f"made {_describe_differences(other, conditions)}; tune again to have such here."
            for other, count in others.items()
        ]


def _describe_differences(other: Conditions, conditions: Conditions) -> str:
    """Returns the ways in which other conditions differ from these, as part of a sentence."""
    ways = []
    if other.tvm != conditions.tvm:
        ways.append(f"with TVM {other.tvm}, this is {conditions.tvm}")
    if other.cpu != conditions.cpu:
        ways.append(f"for {other.cpu}, this is {conditions.cpu}")
    if other.threads != conditions.threads:
        ways.append(f"for {other.threads} threads, these are {conditions.threads}")
    return " and ".join(ways)


def current_conditions(target: str, processors: Processors = THIS_MACHINE) -> Conditions:
    """Returns the conditions of this process, for the target of that name and the CPU among the processors."""
    from harness.machine import versions
    from harness.processes.threads import thread_count
    from harness.targets.llvm import cpu_name

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
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        if (path / TRIALS).exists():  # a search found nothing better than the default schedules
            return Database(path, target or _target_of_trials(path))
        raise HarnessError(
            f"there is no tuning database in {path}: make one with `sam3-tvm tune --db {path}`, or leave out --db"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise HarnessError(f"cannot read {file}: {error}; leave out --db to do without it") from error
    try:
        values = json.loads(text)
        version, made_for = int(values["format"]), str(values["target"])
        if version == FORMAT:
            records = tuple(_record(entry) for entry in values["records"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise HarnessError(
            f"{file} is damaged: delete it and tune again, which takes what is known from the trials beside it"
        ) from error
    if version != FORMAT:
        raise HarnessError(f"{file} has format {version}, this version reads {FORMAT}: tune again into another folder")
    if target is not None and made_for != target:
        raise HarnessError(f"{path} is a tuning database for {made_for}, not for {target}: give another --db")
    return Database(path, made_for, records)


def _target_of_trials(path: Path) -> str:
    """Returns the target of the trials in a folder; the first tunable target if there are no trials."""
    trials, _ = read_trials(path)
    return trials[0].conditions.target if trials else next(target.name for target in TARGETS.values() if target.tunable)


def _record(values: Mapping[str, Any]) -> Record:
    """Returns the record that a JSON object describes."""
    schedule = {str(name): value for name, value in values["schedule"].items()}
    if not all(type(value) is int for value in schedule.values()):
        raise ValueError("a decision is no number")
    seconds, default_seconds = float(values["seconds"]), float(values["default_seconds"])
    if not (0 < seconds < 1e6 and 0 < default_seconds < 1e6):
        raise ValueError("a time is impossible")
    torch_seconds = values["torch_seconds"]
    return Record(
        str(values["task"]),
        schedule,
        Conditions(str(values["target"]), str(values["cpu"]), int(values["threads"]), str(values["tvm"])),
        seconds,
        default_seconds,
        None if torch_seconds is None else float(torch_seconds),
        float(values["r_rms"]),
        int(values["trials"]),
        int(values["failed"]),
        int(values["rejected"]),
        str(values["machine"]),
        str(values["date"]),
        int(values["seed"]),
    )


def store(path: Path, target: str, record: Record, instead_of: Record | None = None) -> Database:
    """Merges a record into a database; other processes may do so at the same time.

    Args:
        path: Folder of the database; it is made if it does not exist.
        target: Name of the target.
        record: The new record.
        instead_of: A record that was measured beside the new one and was slower; it is removed, whatever its gain.

    Raises:
        HarnessError: The folder cannot be written, or its database is damaged or for another target.
    """
    with _locked(path):
        known = open_database(path, target).records if (path / FILE).exists() else ()
        if instead_of is not None:
            known = tuple(entry for entry in known if entry != instead_of)
        database = Database(path, target, tuple(merge_records(known, [record])))
        _write(database)
        return database


def _write(database: Database) -> None:
    """Replaces the file of a database at once, so that no reader sees half of it."""
    values = {
        "format": FORMAT,
        "target": database.target,
        "records": [record.to_plain() for record in database.records],
    }
    write_json(database.path / FILE, values, sort_keys=True, advice=ADVICE, durable=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of a database."""
    import filelock

    lock = filelock.FileLock(path / _LOCK)
    with explain_write_errors(path, ADVICE):
        path.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=_LOCK_SECONDS)
        except filelock.Timeout as error:
            raise HarnessError(f"{path} is in use by another process for {_LOCK_SECONDS:g} s: try again") from error
    try:
        yield
    finally:
        lock.release()


def default_database(target: str, processors: Processors = THIS_MACHINE) -> Path | None:
    """Returns the folder in `fixtures/tuned` that fits the processors, even if its search found nothing."""
    if not (TARGETS[target].tunable and TUNED.is_dir()):
        return None
    path = TUNED / current_conditions(target, processors).tag
    return path if (path / FILE).is_file() or (path / TRIALS).is_file() else None


def describe_database(database: Path | None, target: str, processors: Processors = THIS_MACHINE) -> str:
    """Returns the schedules that a target is compiled with, in words."""
    if database is None or not TARGETS[target].tunable:
        return DEFAULT_SCHEDULES.origin
    count, name = len(open_database(database, target).schedules(processors)), database.resolve().name
    if not count:
        return f"untuned: the default ones, the database {name} has none that is better"
    return f"tuned: {count} from the database {name}, the default ones otherwise"


def chosen_schedules(database: Path | None, target: str, processors: Processors = THIS_MACHINE) -> ChosenSchedules:
    """Returns the schedules that a target is compiled with, and their origin in words.

    Raises:
        HarnessError: The database cannot be used.
    """
    found = schedules_from(database, target, processors)
    return ChosenSchedules(dict(found), describe_database(database, target, processors))


def schedules_from(database: Path | None, target: str, processors: Processors = THIS_MACHINE) -> Schedules:
    """Returns the schedules that a target is compiled with; there are none without a database or a tunable target.

    Raises:
        HarnessError: The database cannot be used.
    """
    if database is None or not TARGETS[target].tunable:
        return UNTUNED
    return open_database(database, target).schedules(processors)
