"""How many CPUs this process may use and how many threads it gets, and telling TVM's thread pool before it starts.

TVM's pool counts *physical* cores, which on many virtual machines is half of the CPUs or fewer. Measured with TVM 0.27:
the environment variable `TVM_NUM_THREADS` is what it obeys, as long as it is set before the first parallel loop.
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
"""Whether threads are bound to CPUs, unless this is 0: by TVM when its pool starts, by a library in its long loops."""


def use_default_threads() -> None:
    """Makes TVM's pool as large as `default_threads` says, unless the environment says how large."""
    os.environ.setdefault(VARIABLE, str(default_threads().count))
    leave_placing_to_the_system(int(os.environ[VARIABLE]))


def leave_placing_to_the_system(count: int) -> None:
    """Keeps TVM from binding `count` threads to CPUs where that would crowd cores, unless the environment decides.

    It binds one thread after the other to the CPUs with the highest clocks, and then in the order of their numbers,
    which are often those of one core after the other: two threads would share a core while another is idle.
    """
    cpus = usable(cores(), affinity_mask())
    if count < len(cpus) and core_count(cpus) < len(cpus):
        os.environ.setdefault(BINDING_VARIABLE, "0")


@dataclass(frozen=True)
class Choice:
    """A number of threads.

    Attributes:
        count: The number.
        reason: Why, as part of a sentence.
    """

    count: int
    reason: str


def default_threads() -> Choice:
    """Returns the number of threads that a process runs on unless it is told otherwise."""
    return choose(cores(), affinity_mask(), cgroup_quota())


def choose(machine: Cores, allowed: frozenset[int] | None, quota: float | None) -> Choice:
    """Returns the default number of threads on a machine: one for each fast core, and no more than the quota.

    TVM gives each thread an equal part of a loop, which ends with its slowest thread: an efficiency core has a third of
    the vector units or fewer. The kernels keep all vector units of a core busy with one thread, so that a second one on
    it gains nothing and needs cache. A virtual machine's siblings are counted as CPUs, because what it tells of cores
    need not be so, and because all that it has are often hardware threads.

    Args:
        machine: Its CPUs.
        allowed: The CPUs that the process may run on; None for all.
        quota: The CPUs' worth of time that it gets; None for no limit.
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
    """Returns the CPUs of a machine that are allowed; all of them if the system names none of those that are.

    Args:
        machine: Its CPUs.
        allowed: Their numbers; None for all.
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
    """Returns the number of CPUs that the process may run on; all of them where the system has no affinity masks."""
    allowed = affinity_mask()
    return os.cpu_count() or 1 if allowed is None else len(allowed)


def cgroup_quota(root: Path = ROOT) -> float | None:
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


def cgroup_cpuset(root: Path = ROOT) -> frozenset[int] | None:
    """Returns the CPUs that the control groups of this process allow; None if they say nothing about that.

    Args:
        root: Where `proc` and `sys` are; the file system's root except in tests.
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
            if found := parse_list(next(filter(None, texts), "")):
                return found
    return None
