"""The machine and the installed versions, without which no number in a report can be read.

Needs neither torch nor tvm; whatever cannot be found out is None.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from typing import Any

from harness.processes.threads import thread_count, thread_count_reason
from harness.runtime.cores import cores
from harness.runtime.cpu import cpu_model
from harness.runtime.system import ROOT, read_text
from harness.runtime.threads import cgroup_cpuset, cgroup_quota, usable_cpus

_PACKAGES = (
    "sam3-tvm",
    "sam3",
    "apache-tvm",
    "apache-tvm-ffi",
    "torch",
    "torchvision",
    "numpy",
    "safetensors",
    "pillow",
    "open_clip_torch",
)

# The features that decide which kernels PyTorch and LLVM choose, as Linux and macOS spell them.
_FEATURES = re.compile(r"avx|fma$|f16c$|sse4_2$|amx|asimd|neon|sve|sme\d|sme$|(feat_)?(dotprod|bf16|i8mm)", re.I)


def describe_machine() -> dict[str, Any]:
    """Returns CPU, vector features, NVIDIA GPUs, usable cores, memory, system and Python of this process, JSON-able.

    `usable_cpus` is what the process may really use: the smallest of cores, affinity and the container's quota;
    `threads` is what it does use, and `threads_chosen` why.
    """
    memory, memory_limit = _memory_bytes(), _cgroup_memory_bytes()
    cpuset, quota = cgroup_cpuset(), cgroup_quota()
    return {
        "cpu": cpu_model(),
        "features": _features(),
        "gpus": _gpus(),
        "cpus": os.cpu_count(),
        "cores": str(cores()),
        "affinity": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "control_group": control_group(cpuset, quota),
        "cgroup_cpus": quota,
        "usable_cpus": usable_cpus(),
        "threads": thread_count(),
        "threads_chosen": thread_count_reason(),
        "memory_bytes": memory,
        "cgroup_memory_bytes": memory_limit,
        "usable_memory_bytes": min((limit for limit in (memory, memory_limit) if limit), default=None),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "architecture": platform.machine(),
        "python": platform.python_version(),
    }


def control_group(cpuset: frozenset[int] | None, quota: float | None) -> str:
    """Returns what the control groups of this process allow it, in words.

    Args:
        cpuset: The CPUs that they allow; None if they say nothing about that.
        quota: The CPUs' worth of time that they grant; None without a limit.
    """
    time = "no quota of CPU time" if quota is None else f"a quota of {quota:g} CPUs' time"
    return time if cpuset is None else f"{time}, {len(cpuset)} CPUs allowed"


def versions() -> dict[str, str | None]:
    """Returns the installed version of every package that can change a result; None where it is not installed."""
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _features() -> list[str]:
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", read_text(ROOT / "proc/cpuinfo"), re.M)
    if match:
        names = match.group(1).split()
    elif platform.system() == "Darwin":
        listing = _run(["sysctl", "hw.optional"]) or ""
        names = [name.split(".")[-1] for name in re.findall(r"^hw\.optional\.(\S+): 1$", listing, re.M)]
    else:
        names = []
    return sorted({name for name in names if _FEATURES.match(name)})


def _gpus() -> list[str]:
    """Returns the names of the NVIDIA GPUs, as their driver's tool gives them."""
    listing = _run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    return listing.splitlines() if listing else []


def _memory_bytes() -> int | None:
    match = re.search(r"^MemTotal:\s*(\d+) kB$", read_text(ROOT / "proc/meminfo"), re.M)
    if match:
        return int(match.group(1)) * 1024
    size = _sysctl("hw.memsize")
    return int(size) if size and size.isdigit() else None


def _cgroup_memory_bytes() -> int | None:
    text = read_text(ROOT / "sys/fs/cgroup/memory.max") or read_text(
        ROOT / "sys/fs/cgroup/memory/memory.limit_in_bytes"
    )
    try:
        limit = int(text)
    except ValueError:
        return None
    return limit if limit < 1 << 60 else None  # version 1 writes a huge number for "no limit"


def _sysctl(name: str) -> str | None:
    return _run(["sysctl", "-n", name]) if platform.system() == "Darwin" else None


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
