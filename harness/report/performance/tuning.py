"""What a database of tuned schedules says was found, for the report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TuningRecord:
    """A task of the search.

    Attributes:
        task: Its key.
        default_seconds: Of the default schedule; `seconds` of the tuned one, None where none was better.
        torch_seconds: Of PyTorch, None where it was not timed.
        trials: Candidates that were tried; `rejected` of them failed parity, `failed` crashed or hung.
    """

    task: str
    default_seconds: float | None
    seconds: float | None
    torch_seconds: float | None
    trials: int
    rejected: int
    failed: int

    @property
    def found(self) -> bool:
        """Whether there is something better than the default."""
        return self.seconds is not None and self.default_seconds is not None


@dataclass(frozen=True)
class Tuning:
    """Everything in a database.

    Attributes:
        summary: In a sentence.
        records: By task.
        origin: Machines, versions and dates of the records.
    """

    summary: str
    records: tuple[TuningRecord, ...]
    origin: tuple[str, ...]
