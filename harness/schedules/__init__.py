"""How operators become fast loops, one package per kind of target."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

Schedule = Mapping[str, int]
"""Decisions about one kernel by name, for instance `{"rows": 8, "vectors": 3}`; what is not named keeps its default."""

Schedules = Mapping[str, Schedule]
"""Schedules by the key of the kernel's workload; a kernel that is not named gets its default schedule."""

UNTUNED: Schedules = MappingProxyType({})
"""Every kernel with its default schedule."""
