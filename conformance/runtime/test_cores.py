"""What machines are, from the files in which they say so, and how many threads a run gets on each."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.support.machines import MACHINES, described, file_system
from harness.core.machine import control_group
from harness.runtime.cores import Cores, Cpu, cores, cores_of_macos, parse_list, read_cores
from harness.runtime.cpu import cpu_model
from harness.runtime.threads import BINDING_VARIABLE, VARIABLE, cgroup_cpuset, choose, usable, usable_cpus

pytestmark = pytest.mark.law

FILL = "one for each of {} cores, whose vector units one thread keeps busy"

LINUX = {
    "intel-i7-1370p": (
        "13th Gen Intel(R) Core(TM) i7-1370P",
        "6 performance cores with 2 hardware threads each, 8 efficiency cores",
        6,
        f"8 efficiency cores would keep the others waiting, and {FILL.format(6)}",
    ),
    "amd-epyc-7451": (
        "AMD EPYC 7451 24-Core Processor",
        "48 cores with 2 hardware threads each",
        48,
        FILL.format(48),
    ),
    "arm-phone": (
        "Arm 3x Cortex-A510 + 2x Cortex-A715 + 2x Cortex-A710 + 1x Cortex-X3",
        "5 performance cores, 3 efficiency cores",
        5,
        "3 efficiency cores would keep the others waiting",
    ),
    "nvidia-gb10": (
        "Arm 10x Cortex-A725 + 10x Cortex-X925",
        "10 performance cores, 10 efficiency cores",
        10,
        "10 efficiency cores would keep the others waiting",
    ),
    "opteron-cpuset-v1": ("Dual Core AMD Opteron(tm) Processor 865", "15 cores", 15, "one for each CPU"),
    "opteron-cpuset-v2": ("AMD Opteron(tm) Processor 6134", "32 cores", 32, "one for each CPU"),
}


@pytest.mark.parametrize(("name", "told"), LINUX.items(), ids=LINUX)
def test_a_machine_with_linux(tmp_path: Path, name: str, told: tuple[str, str, int, str]) -> None:
    root = file_system(tmp_path, described(name))
    found = read_cores(root)
    choice = choose(found, None, None)
    assert (cpu_model(root), str(found), choice.count, choice.reason) == told


MODELS = {
    "aws-graviton": "AWS Graviton (Cortex-A72)",
    "aws-graviton2": "AWS Graviton2 (Neoverse-N1)",
    "aws-graviton3": "AWS Graviton3 (Neoverse-V1)",
    "ampere-altra-max": "Ampere Altra (Neoverse-N1)",
    "ampere-one": "AmpereOne (Ampere-1a)",
    "apple-m1-pro-linux": "Apple 2x M1 Pro Icestorm + 8x M1 Pro Firestorm",
}


@pytest.mark.parametrize(("name", "model"), MODELS.items(), ids=MODELS)
def test_arm_processors_are_told_apart(tmp_path: Path, name: str, model: str) -> None:
    assert cpu_model(file_system(tmp_path, described(name))) == model


def test_of_an_arm_core_that_several_makers_use_no_more_is_said_than_is_known(tmp_path: Path) -> None:
    cpuinfo = described("aws-graviton2")["proc/cpuinfo"]
    assert cpu_model(file_system(tmp_path / "n1", {"proc/cpuinfo": cpuinfo})) == "Arm Neoverse-N1"
    unknown = cpuinfo.replace("0xd0c", "0xfff").replace("0x41", "0x99")
    assert cpu_model(file_system(tmp_path / "unknown", {"proc/cpuinfo": unknown})) == "Arm implementer 0x99 part 0xfff"


def test_macs() -> None:
    m1_pro = cores_of_macos(described("apple-m1-pro-macos")["sysctl"])
    assert str(m1_pro) == "8 performance cores, 2 efficiency cores"
    assert choose(m1_pro, None, None).count == 8
    m5_max = cores_of_macos(described("apple-m5-max-macos")["sysctl"])
    assert str(m5_max) == "18 cores"  # none of its two kinds is made for efficiency
    assert choose(m5_max, None, None).count == 18
    with_intel = cores_of_macos("hw.physicalcpu: 4\nhw.logicalcpu: 8\n")
    assert str(with_intel) == "4 cores with 2 hardware threads each"
    assert choose(with_intel, None, None).count == 4


def test_a_newer_kernel_lists_the_efficiency_cores(tmp_path: Path) -> None:
    """The same machine: its firmware's figures are gone, and the lists of Linux 5.13 are there."""
    files = {path: text for path, text in described("intel-i7-1370p").items() if "acpi_cppc" not in path}
    lists = {"sys/devices/cpu_core/cpus": "0-11", "sys/devices/cpu_atom/cpus": "12-19"}
    machine = read_cores(file_system(tmp_path, {**files, **lists}))
    assert str(machine) == LINUX["intel-i7-1370p"][1]


def test_amds_firmware_ranks_cores_of_one_kind(tmp_path: Path) -> None:
    """Of the performance that it tells, which it gives to tell the scheduler where to begin."""
    ranks = {f"sys/devices/system/cpu/cpu{n}/acpi_cppc/highest_perf": str(166 + n % 48) for n in range(96)}
    assert choose(read_cores(file_system(tmp_path, {**described("amd-epyc-7451"), **ranks})), None, None).count == 48


def test_a_virtual_machines_siblings_are_counted_as_cpus(tmp_path: Path) -> None:
    files = dict(described("amd-epyc-7451"))
    files["proc/cpuinfo"] = files["proc/cpuinfo"].replace("flags\t\t: ", "flags\t\t: hypervisor ")
    machine = read_cores(file_system(tmp_path, files))
    assert str(machine) == "48 cores with 2 hardware threads each, as a virtual machine tells"
    assert choose(machine, None, None).count == 96


HYBRID = Cores(
    tuple(Cpu(n, frozenset({n & ~1, n | 1})) for n in range(12))
    + tuple(Cpu(n, frozenset({n}), performance=False) for n in range(12, 20))
)


@pytest.mark.parametrize(
    ("allowed", "quota", "count", "reason"),
    [
        (range(4), None, 2, "the affinity mask allows 4 of 20 CPUs, and " + FILL.format(2)),
        ({0, 1, 13}, None, 1, None),
        (range(12, 16), None, 4, "the affinity mask allows 4 of 20 CPUs"),  # nothing faster is there to wait
        (None, 4.0, 4, "the quota of the control group is 4 CPUs of 20"),
        (None, 2.5, 2, "the quota of the control group is 2.5 CPUs of 20"),
        (None, 0.5, 1, "the quota of the control group is 0.5 CPUs of 20"),
        (None, 6.0, 6, None),
        (None, 64.0, 6, None),
        ({100}, None, 6, None),  # the system knows nothing of the CPU that it allows
    ],
)
def test_mask_and_quota_limit_the_threads(
    allowed: range | set[int] | None, quota: float | None, count: int, reason: str | None
) -> None:
    choice = choose(HYBRID, None if allowed is None else frozenset(allowed), quota)
    assert choice.count == count
    assert reason in (None, choice.reason)


@given(
    shape=st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=8),
    virtual=st.booleans(),
    masked=st.none() | st.frozensets(st.integers(0, 12)),
    quota=st.none() | st.floats(0.01, 64),
)
def test_threads_are_never_more_than_the_quota_the_mask_or_the_cores_that_are_worth_it(
    shape: list[tuple[int, bool]], virtual: bool, masked: frozenset[int] | None, quota: float | None
) -> None:
    cpus: list[Cpu] = []
    for size, performance in shape:
        siblings = frozenset(range(len(cpus), len(cpus) + size))
        cpus += [Cpu(number, siblings, performance) for number in siblings]
    machine = Cores(tuple(cpus), virtual)
    choice = choose(machine, masked, quota)
    there = usable(machine, masked)
    assert 1 <= choice.count <= len(there)
    assert quota is None or choice.count <= max(1, quota)
    fast = [cpu for cpu in there if cpu.performance] or there
    assert choice.count <= (len(fast) if virtual else len({cpu.siblings for cpu in fast}))
    assert choice.count == choose(machine, masked, None).count or quota is not None
    assert choice.reason


def test_cpusets_of_control_groups(tmp_path: Path) -> None:
    for name in ("opteron-cpuset-v1", "opteron-cpuset-v2"):
        root = file_system(tmp_path / name, described(name))
        listed = next(text for path, text in described(name).items() if path.endswith(("cpus", "effective")))
        assert cgroup_cpuset(root) == parse_list(listed) != frozenset()
    assert cgroup_cpuset(tmp_path) is None
    assert control_group(frozenset(range(6)), 1.5) == "a quota of 1.5 CPUs' time, 6 CPUs allowed"
    assert control_group(None, None) == "no quota of CPU time"


def test_a_container_sees_its_own_group_at_the_mount(tmp_path: Path) -> None:
    files = {
        "proc/self/cpuset": "/docker/0123",
        "proc/mounts": "cgroup2 /sys/fs/cgroup cgroup2 ro,nosuid 0 0",
        "sys/fs/cgroup/cpuset.cpus.effective": "2-3,7",
    }
    assert cgroup_cpuset(file_system(tmp_path, files)) == {2, 3, 7}


@given(st.frozensets(st.integers(0, 4096)))
def test_lists_of_cpus(numbers: frozenset[int]) -> None:
    assert parse_list(",".join(map(str, sorted(numbers)))) == numbers


def test_ranges_and_what_is_no_list() -> None:
    assert parse_list("0-3,5") == {0, 1, 2, 3, 5}
    assert {parse_list(text) for text in ("", "all", "-1", "1,x")} == {frozenset()}


def test_every_machine_names_its_source() -> None:
    for path in MACHINES.iterdir():
        assert re.search(r"\w", tomllib.loads(path.read_text())["source"]), path.name
    assert {path.stem for path in MACHINES.iterdir()} == {
        *LINUX,
        *MODELS,
        "apple-m1-pro-macos",
        "apple-m5-max-macos",
    }


def binding(machine: Cores, count: int) -> str | None:
    """What a process says about binding threads, on a machine where it uses so many."""
    code = (
        "import os, sys\nfrom harness.runtime import threads\nfrom harness.runtime.cores import Cores, Cpu\n"
        f"machine = {machine!r}\n"
        "threads.cores, threads.affinity_mask = (lambda: machine), (lambda: None)\n"
        f"threads.leave_placing_to_the_system({count})\nprint(os.environ.get('{BINDING_VARIABLE}'))"
    )
    env: Mapping[str, str] = {name: value for name, value in os.environ.items() if name != BINDING_VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    return None if done.stdout.strip() == "None" else done.stdout.strip()


def test_tvm_binds_no_threads_where_it_would_crowd_cores() -> None:
    assert binding(HYBRID, 6) == "0"
    assert binding(HYBRID, 20) is None  # each CPU has one
    alone = Cores(tuple(dataclasses.replace(cpu, siblings=frozenset({cpu.number})) for cpu in HYBRID.cpus))
    assert binding(alone, 6) is None


def test_this_machine() -> None:
    found = cores()
    assert len(found.cpus) == os.cpu_count()
    code = "from harness.runtime.threads import use_default_threads; use_default_threads()\n"
    code += f"import os; print(os.environ['{VARIABLE}'])"
    env = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert 1 <= int(done.stdout) <= usable_cpus()
