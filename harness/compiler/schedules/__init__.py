"""How operators become fast loops, one package per kind of target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

Schedule = Mapping[str, int]
"""Decisions about one kernel by name, for instance `{"rows": 8, "vectors": 3}`; what is not named keeps its default."""

Schedules = Mapping[str, Schedule]
"""Schedules by the key of the kernel's workload; a kernel that is not named gets its default schedule."""

UNTUNED: Schedules = MappingProxyType({})
"""Every kernel with its default schedule."""


@dataclass(frozen=True)
class ChosenSchedules:
    """Schedules to compile with, and where they are from.

    Attributes:
        schedules: The schedules by the keys of the kernels' workloads.
        origin: Where they are from, in words.
    """

    schedules: Schedules = field(default_factory=dict)
    origin: str = "untuned: the default ones"


DEFAULT_SCHEDULES = ChosenSchedules()
"""Every kernel with its default schedule."""
