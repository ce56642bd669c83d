"""The processor of this machine: which instruction sets it has, and the CPU name that tells LLVM so."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

# Linux names of features that LLVM spells otherwise; the rest are equal once "_" is taken out.
_LINUX_TO_LLVM = {
    "sse4_1": "sse4.1",
    "sse4_2": "sse4.2",
    "pni": "sse3",
    "abm": "lzcnt",
    "bmi1": "bmi",
    "sha_ni": "sha",
    "lahf_lm": "sahf",
    "pclmulqdq": "pclmul",
    "avx_vnni": "avxvnni",
    "amx_tile": "amx-tile",
    "amx_int8": "amx-int8",
    "amx_bf16": "amx-bf16",
}

# What LLVM may use in a loop; a CPU name must not promise more of these than the machine has.
VECTOR_FEATURES = (
    "popcnt",
    "lzcnt",
    "movbe",
    "sse3",
    "ssse3",
    "sse4.1",
    "sse4.2",
    "avx",
    "f16c",
    "fma",
    "bmi",
    "bmi2",
    "avx2",
    "avxvnni",
    "avx512f",
    "avx512cd",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512ifma",
    "avx512vbmi",
    "avx512vbmi2",
    "avx512vnni",
    "avx512bitalg",
    "avx512vpopcntdq",
    "avx512bf16",
    "avx512fp16",
)

# The levels of the x86-64 ABI, best first, with the features that each adds to the next.
X86_LEVELS: tuple[tuple[str, frozenset[str]], ...] = (
    ("x86-64-v4", frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})),
    ("x86-64-v3", frozenset({"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"})),
    ("x86-64-v2", frozenset({"cx16", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3"})),
    ("x86-64", frozenset()),
)


def cpu_model() -> str:
    """Name of the processor as its vendor writes it, or the architecture where it is not to be found."""
    cpuinfo = _proc_cpuinfo()
    if "model name" in cpuinfo:
        return cpuinfo["model name"]
    return _sysctl("machdep.cpu.brand_string") or platform.processor() or platform.machine()


def cpu_features() -> frozenset[str] | None:
    """Features of this machine's x86 processor in LLVM's spelling; None where the system does not tell."""
    cpuinfo = _proc_cpuinfo()
    if "flags" not in cpuinfo:
        return None
    flags = cpuinfo["flags"].split()
    return frozenset(_LINUX_TO_LLVM.get(flag, flag.replace("_", "")) for flag in flags)


def x86_level(features: frozenset[str]) -> str:
    """The highest level of the x86-64 ABI that `features` (LLVM's spelling) fulfil."""
    for index, (level, _) in enumerate(X86_LEVELS):
        if all(needed <= features for _, needed in X86_LEVELS[index:]):
            return level
    return "x86-64"


def safe_cpu(name: str, promised: frozenset[str], present: frozenset[str] | None) -> str:
    """The CPU name to compile for: `name`, unless it promises vector instructions that the machine does not show.

    A hypervisor may hide instruction sets of the processor that it names; code that used them would die of SIGILL.

    Args:
        name: LLVM's name of the host processor.
        promised: Features that LLVM connects with that name.
        present: Features that the operating system shows; None if it does not tell.
    """
    if present is None or promised.intersection(VECTOR_FEATURES) <= present:
        return name
    return x86_level(present)


def _proc_cpuinfo() -> dict[str, str]:
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _sysctl(name: str) -> str:
    if platform.system() != "Darwin":
        return ""
    answer = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, check=False)
    return answer.stdout.strip()
