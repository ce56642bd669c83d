"""How many CPUs this process may use, and telling TVM's thread pool before it starts.

TVM's pool counts *physical* cores, which on many virtual machines is half of the CPUs or fewer. Measured with TVM 0.27:
the environment variable `TVM_NUM_THREADS` is what it obeys, as long as it is set before the first parallel loop.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

VARIABLE = "TVM_NUM_THREADS"


def use_every_cpu() -> None:
    """Makes TVM's pool as large as the CPUs that this process may use, unless the environment says how large."""
    os.environ.setdefault(VARIABLE, str(usable_cpus()))


def usable_cpus() -> int:
    """Returns the number of CPUs that this process may keep busy: affinity mask and control group's quota."""
    cpus, quota = affinity(), cgroup_quota()
    return cpus if quota is None else max(1, min(cpus, math.ceil(quota)))


def affinity() -> int:
    """Returns the number of CPUs that the process may run on; all of them where the system has no affinity masks."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cgroup_quota(root: Path = Path("/")) -> float | None:
    """Returns the CPUs' worth of time that the control groups of this process grant; None if unlimited.

    The smallest quota of all levels counts.

    Args:
        root: Where `proc` and `sys` are; the file system's root except in tests.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return None
    quotas: list[float] = []
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if hierarchy == "0":
            quotas += _quotas(root / "sys/fs/cgroup", group, _quota_v2)
        elif "cpu" in controllers.split(","):
            quotas += _quotas(root / "sys/fs/cgroup/cpu", group, _quota_v1)
    return min(quotas, default=None)


def _quotas(mount: Path, group: str, read: Callable[[Path], float | None]) -> list[float]:
    """Quotas of a group and of its ancestors; in a container the group's path may not exist below the mount."""
    directory = mount / group.lstrip("/")
    levels = [directory, *directory.parents]
    return [quota for level in levels if level.is_relative_to(mount) and (quota := read(level)) is not None]


def _quota_v2(level: Path) -> float | None:
    try:
        quota, period = (level / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(level: Path) -> float | None:
    try:
        quota = int((level / "cpu.cfs_quota_us").read_text())
        period = int((level / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 and period > 0 else None
