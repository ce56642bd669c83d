"""The log of every trial, one JSON object a line; a search that was stopped in any way goes on from it."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from harness.core.errors import HarnessError
from harness.schedules import Schedule

FILE = "trials.jsonl"


class Kind(StrEnum):
    """The outcome of a trial."""

    MEASURED = "measured"
    REJECTED = "rejected"
    FAILED = "failed"


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
class Trial:
    """A trial of one schedule of one task.

    Attributes:
        task: Key of the task.
        schedule: The complete schedule.
        kind: Outcome of the trial.
        conditions: Conditions of the trial.
        seconds: Time of one call, the fastest of a few rounds or the median of many; NaN unless it was measured.
        default_seconds: Time of one call of the default schedule, which took turns with this one.
        r_rms: Rms error against float64, in units of the default schedule's rms error; NaN unless it was judged.
        reason: The reason why it failed or was rejected.
        torch_seconds: Time of PyTorch, if this is the task's first trial.
        confirmed: Whether this is the longer measurement that decides on a record.
    """

    task: str
    schedule: Schedule
    kind: Kind
    conditions: Conditions
    seconds: float = math.nan
    default_seconds: float = math.nan
    r_rms: float = math.nan
    reason: str = ""
    torch_seconds: float | None = None
    confirmed: bool = False

    @property
    def ratio(self) -> float:
        """The schedule's time in units of the default schedule's time; infinite unless it was measured."""
        return self.seconds / self.default_seconds if self.kind is Kind.MEASURED else math.inf


def read_trials(folder: Path) -> tuple[list[Trial], list[str]]:
    """Returns all trials of a database, and a notice if the end of the last line is missing.

    Raises:
        HarnessError: The file is damaged before its end, or cannot be read.
    """
    path = folder / FILE
    lines, torn = _read_lines(path)
    notices = [f"{path} ends in half a line, which is left out: the trial is made again."] if torn else []
    trials = []
    for number, line in enumerate(lines, 1):
        try:
            trials.append(_trial(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise HarnessError(
                f"{path} is damaged in line {number}: delete the file to begin a new search, what was found is kept"
            ) from error
    return trials, notices


def _read_lines(path: Path) -> tuple[list[bytes], bytes]:
    """Returns the complete lines of a file and what stands after them; no lines if there is no file."""
    try:
        *lines, torn = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], b""
    except OSError as error:
        raise HarnessError(f"cannot read {path}: {error.strerror}; choose another folder with --db") from error
    return lines, torn


def nothing_found(trials: Iterable[Trial], conditions: Conditions, tasks: Collection[str]) -> str:
    """Returns a sentence about tasks whose default schedules are the best that were found; empty if no task was tried.

    Args:
        trials: Trials of all tasks under any conditions.
        conditions: Only trials under these conditions count.
        tasks: Keys of the tasks.
    """
    tried = [trial.task for trial in trials if trial.conditions == conditions and trial.task in tasks]
    if not tried:
        return ""
    return f"{len(tried)} trials of {len(set(tried))} of its {len(tasks)} kernels found nothing over the defaults"


def append_trials(folder: Path, trials: Iterable[Trial]) -> None:
    """Appends trials to the log and waits until they are on the disk; if that fails, none of them is kept.

    Raises:
        HarnessError: The file cannot be written.
    """
    path = folder / FILE
    text = "".join(json.dumps(_plain(trial), sort_keys=True) + "\n" for trial in trials).encode()
    try:
        with path.open("ab+") as file:
            whole = _end_of_lines(file)
            file.truncate(whole)
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(file.fileno(), whole)
                raise
    except OSError as error:
        raise HarnessError(
            f"cannot write {path}: {error.strerror or error}; free some space or make it writable, then tune again to "
            "resume"
        ) from error


def _end_of_lines(file: Any) -> int:
    """Returns the position at which the last complete line ends."""
    end = int(file.seek(0, os.SEEK_END))
    while end > 0:
        start = max(0, end - 65536)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + int(found) + 1
        end = start
    return 0


def _plain(trial: Trial) -> dict[str, Any]:
    values = {**asdict(trial), **asdict(trial.conditions), "kind": trial.kind.value, "schedule": dict(trial.schedule)}
    del values["conditions"]
    # NaN is no JSON.
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}


def _trial(values: Mapping[str, Any]) -> Trial:
    def number(name: str) -> float:
        return math.nan if values[name] is None else float(values[name])

    return Trial(
        str(values["task"]),
        {str(name): int(value) for name, value in values["schedule"].items()},
        Kind(values["kind"]),
        Conditions(str(values["target"]), str(values["cpu"]), int(values["threads"]), str(values["tvm"])),
        number("seconds"),
        number("default_seconds"),
        number("r_rms"),
        str(values["reason"]),
        None if values["torch_seconds"] is None else float(values["torch_seconds"]),
        bool(values["confirmed"]),
    )
