"""Lists the cores of this machine: which CPUs share a core, and which cores are slower than others.

Linux describes cores in files, macOS in the output of `sysctl`. A CPU is what the system schedules threads on: a core,
or one of the hardware threads (SMT siblings) of a core.
"""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.runtime.system import ROOT, read_text, sysctl

_EFFICIENT_BELOW = 0.8
"""Share of the largest capacity below which a CPU belongs to an efficiency core.

Capacities of one kind of core differ by a few percent with their clocks. Capacities of kinds of cores that do the same
vector work per cycle differ by less than this share.
"""


@dataclass(frozen=True)
class Cpu:
    """A CPU.

    Attributes:
        number: The system's number of the CPU.
        siblings: Numbers of the CPUs of its core, including its own.
        performance: Whether its core is among the fast ones of the machine.
    """

    number: int
    siblings: frozenset[int]
    performance: bool = True


@dataclass(frozen=True)
class Cores:
    """The CPUs of a machine.

    Attributes:
        cpus: All CPUs that are present and online, in the order of their numbers.
        virtual: Whether a hypervisor reports them, which may be inaccurate.
    """

    cpus: tuple[Cpu, ...]
    virtual: bool = False

    def __str__(self) -> str:
        """Returns a description of the CPUs, in words."""
        fast = [cpu for cpu in self.cpus if cpu.performance]
        slow = [cpu for cpu in self.cpus if not cpu.performance]
        description = (
            f"{_describe(fast, 'performance core')}, {_describe(slow, 'efficiency core')}"
            if slow
            else _describe(fast, "core")
        )
        return f"{description}, as a virtual machine tells" if self.virtual else description


def core_count(cpus: list[Cpu]) -> int:
    """Returns the number of cores that CPUs belong to."""
    return len({cpu.siblings for cpu in cpus})


def read_cores(root: Path = ROOT) -> Cores:
    """Returns the CPUs that Linux lists.

    Args:
        root: The folder with `proc` and `sys`; the file system's root except in tests.
    """
    folder = root / "sys/devices/system/cpu"
    first = read_text(root / "proc/cpuinfo").partition("\n\n")[0]
    numbers = sorted(parse_list(read_text(folder / "online")))
    slow = _efficient(root, numbers, first)
    cpus = []
    for number in numbers:
        topology = folder / f"cpu{number}" / "topology"
        # The first name is that of Linux 5.3 and later, the second that of older kernels.
        text = read_text(topology / "core_cpus_list") or read_text(topology / "thread_siblings_list")
        siblings = parse_list(text) & frozenset(numbers)
        cpus.append(Cpu(number, siblings | {number}, number not in slow))
    return Cores(tuple(cpus), virtual=bool(re.search(r"^flags\s*:.*\bhypervisor\b", first, re.M)))


def cores_of_macos(listing: str) -> Cores:
    """Returns the CPUs that `sysctl hw` lists.

    Apple lists its kinds of cores as performance levels, the fastest first; since macOS 12.3 the levels have names.
    """
    values = dict(re.findall(r"^hw\.([\w.]+): (.*)$", listing, re.M))
    levels = [number for number in range(8) if f"perflevel{number}.physicalcpu" in values]
    cpus: list[Cpu] = []
    for number in levels:
        name = values.get(f"perflevel{number}.name", "")
        _add_cpus(cpus, values, f"perflevel{number}.", name != "Efficiency" if name else number == levels[0])
    if not levels:
        _add_cpus(cpus, values, "", True)
    return Cores(tuple(cpus))


@functools.cache
def cores() -> Cores:
    """Returns the CPUs of this machine; where the system lists none, as many single-thread cores as Python counts."""
    machine = cores_of_macos(sysctl("hw")) if platform.system() == "Darwin" else read_cores()
    return machine if machine.cpus else Cores(tuple(Cpu(n, frozenset({n})) for n in range(os.cpu_count() or 1)))


def parse_list(text: str) -> frozenset[int]:
    """Returns the numbers of a list in Linux's format, `0-3,5`; none if the text is no list."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return frozenset()
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def _efficient(root: Path, numbers: list[int], cpuinfo: str) -> frozenset[int]:
    """Returns the numbers of the CPUs of efficiency cores.

    For Intel's hybrid processors Linux has a list (5.13 and later). Elsewhere the kernel reports the capacity of each
    CPU, or the firmware reports its highest performance; AMD's firmware uses this value to rank cores of one kind.
    """
    atoms = parse_list(read_text(root / "sys/devices/cpu_atom/cpus"))
    if atoms:
        return atoms
    folder = root / "sys/devices/system/cpu"
    names = ["cpu_capacity"] if "AuthenticAMD" in cpuinfo else ["cpu_capacity", "acpi_cppc/highest_perf"]
    for name in names:
        texts = [read_text(folder / f"cpu{number}" / name) for number in numbers]
        if texts and all(text.isdecimal() for text in texts):
            capacities = [int(text) for text in texts]
            if min(capacities) < max(capacities):
                limit = _EFFICIENT_BELOW * max(capacities)
                return frozenset(n for n, capacity in zip(numbers, capacities, strict=True) if capacity < limit)
    return frozenset()


def _add_cpus(cpus: list[Cpu], values: Mapping[str, str], prefix: str, performance: bool) -> None:
    """Adds CPUs, numbered in order, because macOS only counts them."""
    physical = int(values.get(f"{prefix}physicalcpu", 0))
    threads = int(values.get(f"{prefix}logicalcpu", physical)) // physical if physical else 0
    for _ in range(physical):
        start = len(cpus)
        siblings = frozenset(range(start, start + threads))
        cpus += [Cpu(number, siblings, performance) for number in sorted(siblings)]


def _describe(cpus: list[Cpu], noun: str) -> str:
    """Returns the number of cores of CPUs in words, and of their hardware threads if there are more."""
    count = core_count(cpus)
    description = f"{count} {noun}{'' if count == 1 else 's'}"
    if count == len(cpus):
        return description
    threads = len(cpus) / count
    return (
        f"{description} with {threads:g} hardware threads each"
        if threads.is_integer()
        else f"{description} with {len(cpus)} CPUs"
    )
