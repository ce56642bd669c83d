"""Describes the machine and the installed versions, without which the numbers of a report are meaningless.

This module needs neither torch nor tvm. Unknown values are None.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from typing import Any

from harness.core.processes.threads import thread_count, thread_count_reason
from harness.runtime.cores import cores
from harness.runtime.cpu import cpu_model
from harness.runtime.system import ROOT, read_text, sysctl
from harness.runtime.threads import cgroup_cpuset, cgroup_quota, usable_cpus

_PACKAGES = (
    *("sam3-tvm", "sam3", "apache-tvm", "apache-tvm-ffi", "torch", "torchvision"),
    *("numpy", "safetensors", "pillow", "open_clip_torch"),
)

# Features by which PyTorch and LLVM choose kernels, in the spelling of Linux and macOS.
_FEATURES = re.compile(r"avx|fma$|f16c$|sse4_2$|amx|asimd|neon|sve|sme\d|sme$|(feat_)?(dotprod|bf16|i8mm)", re.I)


def describe_machine() -> dict[str, Any]:
    """Returns CPU, vector features, NVIDIA GPUs, usable cores, memory, system and Python of this process, JSON-able.

    `usable_cpus` is the smallest of cores, affinity and the container's quota. `threads` is the number of threads that
    the process uses, and `threads_chosen` the reason.
    """
    import psutil

    memory, memory_limit = psutil.virtual_memory().total, _cgroup_memory_bytes()
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
        "usable_memory_bytes": min(memory, memory_limit or memory),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "architecture": platform.machine(),
        "python": platform.python_version(),
    }


def control_group(cpuset: frozenset[int] | None, quota: float | None) -> str:
    """Returns the limits of this process's control groups in words.

    Args:
        cpuset: The allowed CPUs; None if they are not limited.
        quota: The granted CPU time, in CPUs; None without a limit.
    """
    time = "no quota of CPU time" if quota is None else f"a quota of {quota:g} CPUs' time"
    return time if cpuset is None else f"{time}, {len(cpuset)} CPUs allowed"


def versions(names: Sequence[str] = _PACKAGES) -> dict[str, str | None]:
    """Returns the installed versions of packages, by default those that can change a result; None if not installed."""
    installed: dict[str, str | None] = {}
    for name in names:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return installed


def _features() -> list[str]:
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", read_text(ROOT / "proc/cpuinfo"), re.M)
    if match:
        names = match.group(1).split()
    elif platform.system() == "Darwin":
        names = [name.split(".")[-1] for name in re.findall(r"^hw\.optional\.(\S+): 1$", sysctl("hw.optional"), re.M)]
    else:
        names = []
    return sorted({name for name in names if _FEATURES.match(name)})


def _gpus() -> list[str]:
    """Returns the names of the NVIDIA GPUs, as nvidia-smi prints them."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return process.stdout.strip().splitlines()


def _cgroup_memory_bytes() -> int | None:
    text = read_text(ROOT / "sys/fs/cgroup/memory.max") or read_text(
        ROOT / "sys/fs/cgroup/memory/memory.limit_in_bytes"
    )
    try:
        limit = int(text)
    except ValueError:
        return None
    return limit if limit < 1 << 60 else None  # version 1 writes a huge number for "no limit"
