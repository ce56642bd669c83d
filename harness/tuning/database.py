"""The database of tuning: a folder with the best schedule of each task, merged under a lock, never overwritten.

`schedules.json` has a record for each task and place; `trials.jsonl` (see `trials.py`) every trial that led there.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.core.errors import HarnessError
from harness.core.settings import REPOSITORY
from harness.schedules import UNTUNED, Schedule, Schedules
from harness.tuning.trials import FILE as TRIALS
from harness.tuning.trials import Place

FORMAT = 1
FILE = "schedules.json"
TUNED = REPOSITORY / "fixtures" / "tuned"
"""Where the databases lie that are used by default, a folder for each tag."""
TUNABLE = ("llvm",)
"""Targets that there are schedules to search for."""
_LOCK = ".lock"
_LOCK_SECONDS = 30.0


@dataclass(frozen=True)
class Record:
    """The best schedule of a task that was found in a place.

    Attributes:
        task: Key of the task.
        schedule: Its decisions.
        place: Where it was measured: target, CPU, threads, version of TVM.
        seconds, default_seconds: Medians of the measurement that confirmed it, alternately with the default schedule.
        torch_seconds: PyTorch's, if it was measured.
        r_rms: Rms error against float64 in units of the default schedule's.
        trials, failed, rejected: Number of schedules tried, of those that crashed or hung, and of wrong results.
        machine: The processor's model.
        date: When it was found, UTC, in ISO 8601.
        seed: Of the search.
    """

    task: str
    schedule: Schedule
    place: Place
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
        """How many times as fast as the default schedule."""
        return self.default_seconds / self.seconds

    def to_plain(self) -> dict[str, Any]:
        """As it is written into JSON."""
        values = {**asdict(self), **asdict(self.place), "schedule": dict(sorted(self.schedule.items()))}
        del values["place"]
        return values


def better(a: Record, b: Record) -> Record:
    """The one of two records of a task with the larger gain; the same whichever comes first."""
    return max(a, b, key=lambda record: (record.gain, record.trials, json.dumps(record.to_plain(), sort_keys=True)))


def merged(*groups: Iterable[Record]) -> list[Record]:
    """The best record of each task and place, in the order of their names."""
    best: dict[tuple[str, Place], Record] = {}
    for record in (record for group in groups for record in group):
        known = best.get((record.task, record.place))
        best[record.task, record.place] = record if known is None else better(known, record)
    return [best[key] for key in sorted(best, key=lambda key: (key[0], key[1].tag, key[1].tvm))]


@dataclass(frozen=True)
class Database:
    """A folder that was read.

    Attributes:
        path: The folder.
        target: Kind of target that the schedules are for.
        records: Everything in it.
    """

    path: Path
    target: str
    records: tuple[Record, ...] = ()

    def schedules(self) -> dict[str, Schedule]:
        """The schedules that were found in this place: with this version of TVM, for this CPU and number of threads."""
        place = this_place(self.target)
        return {record.task: record.schedule for record in self.records if record.place == place}

    def notices(self) -> list[str]:
        """A sentence for each kind of record that is left out here."""
        place = this_place(self.target)
        others: dict[Place, int] = {}
        for record in self.records:
            if record.place != place:
                others[record.place] = others.get(record.place, 0) + 1
        return [
            f"{count} record{'s' if count > 1 else ''} of {self.path} left out: made {_differently(other, place)}; "
            "tune again to have such here."
            for other, count in others.items()
        ]


def _differently(other: Place, place: Place) -> str:
    ways = []
    if other.tvm != place.tvm:
        ways.append(f"with TVM {other.tvm}, this is {place.tvm}")
    if other.cpu != place.cpu:
        ways.append(f"for {other.cpu}, this is {place.cpu}")
    if other.threads != place.threads:
        ways.append(f"for {other.threads} threads, these are {place.threads}")
    return " and ".join(ways)


def this_place(target: str) -> Place:
    """This process's place for a target, the name of an entry of `harness.targets.TARGETS`."""
    from harness.machine import versions
    from harness.processes.threads import thread_count
    from harness.targets.llvm import host_cpu

    return Place(target, host_cpu(), thread_count(), versions()["apache-tvm"] or "unknown")


def open_database(path: Path, target: str = "llvm") -> Database:
    """Reads a database.

    Args:
        path: Its folder.
        target: What it must be for.

    Raises:
        HarnessError: There is none, it is damaged, or it is for another target.
    """
    file = path / FILE
    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        if (path / TRIALS).exists():  # of a search that found nothing over the default schedules
            return Database(path, target)
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
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HarnessError(
            f"{file} is damaged: delete it and tune again, which takes what is known from the trials beside it"
        ) from error
    if version != FORMAT:
        raise HarnessError(f"{file} has format {version}, this version reads {FORMAT}: tune again into another folder")
    if made_for != target:
        raise HarnessError(f"{path} is a tuning database for {made_for}, not for {target}: give another --db")
    return Database(path, made_for, records)


def _record(values: Mapping[str, Any]) -> Record:
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
        Place(str(values["target"]), str(values["cpu"]), int(values["threads"]), str(values["tvm"])),
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
    """Merges a record into a database, which another process may be doing at the same time.

    Args:
        path: The folder; it is made.
        target: Kind of target.
        record: What was found.
        instead_of: The record that it was measured against and found better than: replaced whatever its gain says.

    Raises:
        HarnessError: The folder cannot be written, or what is there is damaged or for another target.
    """
    with _locked(path):
        known = open_database(path, target).records if (path / FILE).exists() else ()
        if instead_of is not None:
            known = tuple(entry for entry in known if entry != instead_of)
        database = Database(path, target, tuple(merged(known, [record])))
        _write(database)
        return database


def _write(database: Database) -> None:
    values = {
        "format": FORMAT,
        "target": database.target,
        "records": [record.to_plain() for record in database.records],
    }
    file = database.path / FILE
    unfinished = file.with_name(f".{FILE}.{os.getpid()}.tmp")
    with _writing(file):
        try:
            with unfinished.open("w", encoding="utf-8") as out:
                out.write(json.dumps(values, indent=1, sort_keys=True) + "\n")
                out.flush()
                os.fsync(out.fileno())
            unfinished.replace(file)
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HarnessError(
            f"cannot write {path}: {error.strerror or error}; free some space or choose another folder with --db"
        ) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import filelock

    lock = filelock.FileLock(path / _LOCK)
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=_LOCK_SECONDS)
        except filelock.Timeout as error:
            raise HarnessError(f"{path} is in use by another process for {_LOCK_SECONDS:g} s: try again") from error
    try:
        yield
    finally:
        lock.release()


def check_writable(path: Path) -> None:
    """Makes the folder and tries to write into it: better to know before the work than after it.

    Raises:
        HarnessError: It cannot be written.
    """
    probe = path / f".{os.getpid()}.tmp"
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()


def default_database(target: str) -> Path | None:
    """The database in `fixtures/tuned` that fits this machine, be it one of a search that found nothing, or None."""
    if target not in TUNABLE or not TUNED.is_dir():
        return None
    path = TUNED / this_place(target).tag
    return path if (path / FILE).is_file() or (path / TRIALS).is_file() else None


def told(database: Path | None, target: str) -> str:
    """What a target is compiled with, in words."""
    if database is None or target not in TUNABLE:
        return "untuned: the default ones"
    count, name = len(open_database(database, target).schedules()), database.resolve().name
    if not count:
        return f"untuned: the default ones, the database {name} has none that is better"
    return f"tuned: {count} from the database {name}, the default ones otherwise"


def schedules_from(database: Path | None, target: str) -> Schedules:
    """What to compile with for a target; nothing without a database, or for a target that is not tuned.

    Raises:
        HarnessError: The database cannot be used.
    """
    return UNTUNED if database is None or target not in TUNABLE else open_database(database, target).schedules()
