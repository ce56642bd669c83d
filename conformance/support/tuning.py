"""Tuning databases for tests: what is in them was never measured."""

from __future__ import annotations

from typing import Any

from harness.schedules import Schedule
from harness.tuned.database import Record, current_conditions


def record(task: str, schedule: Schedule, **others: Any) -> Record:
    """A record under the conditions of this process."""
    values = {
        "conditions": current_conditions("llvm"),
        "seconds": 0.5,
        "default_seconds": 0.75,
        "torch_seconds": 1.25,
        "r_rms": 0.9,
        "trials": 20,
        "failed": 1,
        "rejected": 2,
        "machine": "a machine",
        "date": "2026-01-02T03:04:05+00:00",
        "seed": 0,
    }
    return Record(task, schedule, **(values | others))
