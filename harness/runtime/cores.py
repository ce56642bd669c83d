"""The cores of this machine: which CPUs share one, and which are slower than others.

Linux tells it in files, macOS in what `sysctl` prints. A CPU is what the system schedules threads on: a core, or one of
the hardware threads (SMT siblings) of a core.
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
"""Share of the largest capacity below which a CPU is an efficiency core's. Capacities of one kind of core differ by a
few percent with their clocks; those of kinds that do the same vector work per cycle lie closer than this."""


@dataclass(frozen=True)
class Cpu:
    """A CPU.

    Attributes:
        number: As the system counts.
        siblings: Numbers of the CPUs of its core, its own among them.
        performance: Whether its core is among the fast ones of the machine.
    """

    number: int
    siblings: frozenset[int]
    performance: bool = True


@dataclass(frozen=True)
class Cores:
    """The CPUs of a machine.

    Attributes:
        cpus: All that are there and switched on, in the order of their numbers.
        virtual: Whether a hypervisor tells what they are, which need not be so.
    """

    cpus: tuple[Cpu, ...]
    virtual: bool = False

    def __str__(self) -> str:
        """What they are, in words."""
        fast = [cpu for cpu in self.cpus if cpu.performance]
        slow = [cpu for cpu in self.cpus if not cpu.performance]
        told = f"{_told(fast, 'performance core')}, {_told(slow, 'efficiency core')}" if slow else _told(fast, "core")
        return f"{told}, as a virtual machine tells" if self.virtual else told


def core_count(cpus: list[Cpu]) -> int:
    """Returns the number of cores that CPUs belong to."""
    return len({cpu.siblings for cpu in cpus})


def read_cores(root: Path = ROOT) -> Cores:
    """Returns the CPUs that Linux lists.

    Args:
        root: Where `proc` and `sys` are; the file system's root except in tests.
    """
    folder = root / "sys/devices/system/cpu"
    first = read_text(root / "proc/cpuinfo").partition("\n\n")[0]
    numbers = sorted(parse_list(read_text(folder / "online")))
    slow = _efficient(root, numbers, first)
    cpus = []
    for number in numbers:
        topology = folder / f"cpu{number}" / "topology"
        # The first is the name since Linux 5.3, the second the one before.
        text = read_text(topology / "core_cpus_list") or read_text(topology / "thread_siblings_list")
        siblings = parse_list(text) & frozenset(numbers)
        cpus.append(Cpu(number, siblings | {number}, number not in slow))
    return Cores(tuple(cpus), virtual=bool(re.search(r"^flags\s*:.*\bhypervisor\b", first, re.M)))


def cores_of_macos(listing: str) -> Cores:
    """Returns the CPUs in what `sysctl hw` prints.

    Apple lists its kinds of cores as performance levels, the fastest first; since macOS 12.3 they have names.
    """
    values = dict(re.findall(r"^hw\.([\w.]+): (.*)$", listing, re.M))
    levels = [number for number in range(8) if f"perflevel{number}.physicalcpu" in values]
    cpus: list[Cpu] = []
    for number in levels:
        name = values.get(f"perflevel{number}.name", "")
        _add(cpus, values, f"perflevel{number}.", name != "Efficiency" if name else number == levels[0])
    if not levels:
        _add(cpus, values, "", True)
    return Cores(tuple(cpus))


@functools.cache
def cores() -> Cores:
    """Returns the CPUs of this machine; where the system tells nothing, as many as Python counts, each a core."""
    found = cores_of_macos(sysctl("hw")) if platform.system() == "Darwin" else read_cores()
    return found if found.cpus else Cores(tuple(Cpu(n, frozenset({n})) for n in range(os.cpu_count() or 1)))


def parse_list(text: str) -> frozenset[int]:
    """Returns the numbers in a list as Linux writes it: `0-3,5`; none if it is no list."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return frozenset()
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def _efficient(root: Path, numbers: list[int], cpuinfo: str) -> frozenset[int]:
    """The CPUs of efficiency cores.

    Intel's hybrid processors have a list of them (Linux 5.13 and later). Elsewhere the kernel tells each CPU's
    capacity, or the firmware its highest performance; AMD's firmware ranks cores of one kind with it.
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


def _add(cpus: list[Cpu], values: Mapping[str, str], prefix: str, performance: bool) -> None:
    """Adds CPUs that macOS only counts, with numbers of their own."""
    physical = int(values.get(f"{prefix}physicalcpu", 0))
    each = int(values.get(f"{prefix}logicalcpu", physical)) // physical if physical else 0
    for _ in range(physical):
        start = len(cpus)
        siblings = frozenset(range(start, start + each))
        cpus += [Cpu(number, siblings, performance) for number in sorted(siblings)]


def _told(cpus: list[Cpu], noun: str) -> str:
    count = core_count(cpus)
    told = f"{count} {noun}{'' if count == 1 else 's'}"
    if count == len(cpus):
        return told
    each = len(cpus) / count
    return f"{told} with {each:g} hardware threads each" if each.is_integer() else f"{told} with {len(cpus)} CPUs"
