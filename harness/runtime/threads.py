"""Counts the CPUs that this process may use, and sets the size of TVM's thread pool before the pool starts.

TVM's pool counts *physical* cores, which on many virtual machines is half of the CPUs or fewer. Measured with TVM 0.27,
the pool has `TVM_NUM_THREADS` threads if this environment variable is set before the first parallel loop.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.runtime.cores import Cores, Cpu, core_count, cores, parse_list
from harness.runtime.system import ROOT, read_text

VARIABLE = "TVM_NUM_THREADS"
BINDING_VARIABLE = "TVM_BIND_THREADS"
"""Unless it is 0, threads are bound to CPUs: by TVM when its pool starts, by a library in its long loops."""


def use_default_threads() -> None:
    """Makes TVM's pool as large as `default_threads` says, unless the environment sets its size."""
    os.environ.setdefault(VARIABLE, str(default_threads().count))
    leave_placing_to_the_system(int(os.environ[VARIABLE]))


def leave_placing_to_the_system(count: int) -> None:
    """Keeps TVM from binding `count` threads to CPUs where this would crowd cores, unless the environment decides.

    TVM binds threads to the CPUs with the highest clocks first, and then in the order of their numbers. These numbers
    are often consecutive on a core, so that two threads would share a core while another is idle.
    """
    cpus = usable(cores(), affinity_mask())
    if count < len(cpus) and core_count(cpus) < len(cpus):
        os.environ.setdefault(BINDING_VARIABLE, "0")


@dataclass(frozen=True)
class Choice:
    """A number of threads.

    Attributes:
        count: The number.
        reason: The reason for it, as part of a sentence.
    """

    count: int
    reason: str


def default_threads() -> Choice:
    """Returns the default number of threads of a process."""
    return choose(cores(), affinity_mask(), cgroup_quota())


def choose(machine: Cores, allowed: frozenset[int] | None, quota: float | None) -> Choice:
    """Returns the default number of threads on a machine: one for each fast core, and no more than the quota.

    TVM gives each thread an equal part of a loop, which ends with its slowest thread; an efficiency core has a third of
    the vector units or fewer. One thread keeps all vector units of a core busy, so that a second one gains nothing and
    needs cache. The siblings of a virtual machine are counted as CPUs, because its report of cores may be wrong, and
    because it often has hardware threads alone.

    Args:
        machine: The CPUs of the machine.
        allowed: The CPUs that the process may run on; None for all.
        quota: The CPU time that the process gets, in CPUs; None for no limit.
    """
    cpus = usable(machine, allowed)
    total, reasons = len(machine.cpus), []
    if len(cpus) < total:
        reasons.append(f"the affinity mask allows {len(cpus)} of {total} CPUs")
    fast = [cpu for cpu in cpus if cpu.performance]
    if fast and len(fast) < len(cpus):
        slow = core_count([cpu for cpu in cpus if not cpu.performance])
        reasons.append(f"{slow} efficiency core{'' if slow == 1 else 's'} would keep the others waiting")
        cpus = fast
    count = len(cpus)
    if not machine.virtual and core_count(cpus) < count:
        count = core_count(cpus)
        reasons.append(f"one for each of {count} cores, whose vector units one thread keeps busy")
    if quota is not None and quota < count:
        return Choice(max(1, math.floor(quota)), f"the quota of the control group is {quota:g} CPUs of {total}")
    return Choice(count, ", and ".join(reasons) or "one for each CPU")


def usable(machine: Cores, allowed: frozenset[int] | None = None) -> list[Cpu]:
    """Returns the CPUs of a machine that are allowed; all CPUs if the system lists none of the allowed ones.

    Args:
        machine: The CPUs of the machine.
        allowed: Numbers of the allowed CPUs; None for all.
    """
    return [cpu for cpu in machine.cpus if allowed is None or cpu.number in allowed] or list(machine.cpus)


def usable_cpus() -> int:
    """Returns the number of CPUs that this process may keep busy: affinity mask and control group's quota."""
    cpus, quota = affinity(), cgroup_quota()
    return cpus if quota is None else max(1, min(cpus, math.ceil(quota)))


def affinity_mask() -> frozenset[int] | None:
    """Returns the CPUs that the process may run on; None where the system has no affinity masks."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def affinity() -> int:
    """Returns the number of CPUs that the process may run on; all CPUs where the system has no affinity masks."""
    allowed = affinity_mask()
    return os.cpu_count() or 1 if allowed is None else len(allowed)


def cgroup_quota(root: Path = ROOT) -> float | None:
    """Returns the CPU time that the control groups of this process grant, in CPUs; None if unlimited.

    The smallest quota of all levels counts.

    Args:
        root: The folder with `proc` and `sys`; the file system's root except in tests.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return None
    quotas: list[float] = []
    for line in lines:
        hierarchy, _, fields = line.partition(":")
        controllers, _, group = fields.partition(":")
        if hierarchy == "0":
            quotas += _quotas(root / "sys/fs/cgroup", group, _quota_v2)
        elif "cpu" in controllers.split(","):
            quotas += _quotas(root / "sys/fs/cgroup/cpu", group, _quota_v1)
    return min(quotas, default=None)


def _quotas(mount: Path, group: str, read: Callable[[Path], float | None]) -> list[float]:
    """Returns the quotas of a group and its ancestors; in a container the group's path may not exist in the mount."""
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


def cgroup_cpuset(root: Path = ROOT) -> frozenset[int] | None:
    """Returns the CPUs that the control groups of this process allow; None if they do not limit them.

    Args:
        root: The folder with `proc` and `sys`; the file system's root except in tests.
    """
    group = read_text(root / "proc/self/cpuset")
    for line in read_text(root / "proc/mounts").splitlines():
        _, point, kind, options, *_ = [*line.split(), "", "", "", ""]
        names: tuple[str, ...]
        if kind == "cgroup2":
            names = ("cpuset.cpus.effective",)
        elif kind == "cpuset" or (kind == "cgroup" and "cpuset" in options.split(",")):
            names = ("cpuset.effective_cpus", "cpuset.cpus", "cpus")
        else:
            continue
        mount = root / point.lstrip("/")
        directory = mount / group.lstrip("/")
        # In a container the group's path may not exist below the mount, which is then the group itself.
        for level in (directory, *directory.parents):
            texts = [read_text(level / name) for name in names] if level.is_relative_to(mount) else []
            if cpus := parse_list(next(filter(None, texts), "")):
                return cpus
    return None
