"""Names the processor of this machine and lists its instruction sets in LLVM's spelling."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from harness.runtime.arm import arm_model
from harness.runtime.system import ROOT, read_text, sysctl

Platform = tuple[str, str]
"""A system (`Linux`, `macOS`) and an architecture (`x86_64`, `aarch64`)."""

VECTOR_FEATURES = (
    "popcnt",
    "lzcnt",
    "movbe",
    "sse3",
    "ssse3",
    "sse4.1",
    "sse4.2",
    "sse4a",
    "avx",
    "f16c",
    "fma",
    "fma4",
    "xop",
    "tbm",
    "bmi",
    "bmi2",
    "avx2",
    "avxvnni",
    "avxvnniint8",
    "avxvnniint16",
    "avxifma",
    "gfni",
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
    "egpr",
    "neon",
    "fp-armv8",
    "fullfp16",
    "fp16fml",
    "lse",
    "rdm",
    "dotprod",
    "bf16",
    "i8mm",
    "complxnum",
    "sha3",
    "sve",
    "sve2",
    "cssc",
    "mops",
)
"""Features that LLVM may use by itself in compiled loops; a target CPU must not have one that the machine lacks.

Features that only intrinsics use (AMX tiles, AES) are left out. Hypervisors often hide these features, and no kernel
needs them unless the target names them, see `MATRIX_UNIT`.
"""

MATRIX_UNIT = ("amx-tile", "amx-bf16")
"""Features of x86's matrix unit, which kernels use only where the target names them."""

_INTEGER_PAIRS = {"avx512f": ("avx512vnni", "avx512bw"), "avx2": ("avx2", "fma")}
"""Features with which pairs of 16-bit integers are faster than fp32, by the widest vectors of an x86 processor.

AVX2 starts two multiplications of pairs and two additions in the time of two fp32 multiply-adds; 512-bit vectors need
VNNI, which does both at once.
"""


def has_integer_pairs(has: Callable[[str], bool]) -> bool:
    """Returns whether pairs of 16-bit integers are faster than fp32 on a processor; `has` tests for a feature."""
    widest = next(filter(has, _INTEGER_PAIRS), None)
    return widest is not None and all(map(has, _INTEGER_PAIRS[widest]))


# The levels of the x86-64 ABI, best first, with the features that each adds to the next.
X86_LEVELS: tuple[tuple[str, frozenset[str]], ...] = (
    ("x86-64-v4", frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})),
    ("x86-64-v3", frozenset({"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"})),
    ("x86-64-v2", frozenset({"cx16", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3"})),
    ("x86-64", frozenset()),
)

# Linux names (arch/x86/include/asm/cpufeatures.h) that LLVM spells otherwise; other names are equal without "_".
_LINUX_X86 = {
    "sse4_1": "sse4.1",
    "sse4_2": "sse4.2",
    "pni": "sse3",
    "abm": "lzcnt",
    "bmi1": "bmi",
    "apx": "egpr",
    "amx_tile": "amx-tile",
    "amx_bf16": "amx-bf16",
}
# Linux names (Documentation/arch/arm64/elf_hwcaps.rst) that LLVM spells otherwise.
_LINUX_ARM = {
    "fp": "fp-armv8",
    "asimd": "neon",
    "asimdhp": "fullfp16",
    "asimdfhm": "fp16fml",
    "atomics": "lse",
    "asimdrdm": "rdm",
    "asimddp": "dotprod",
    "fcma": "complxnum",
}
# Names that macOS lists below machdep.cpu on Intel, in lower case, and that LLVM spells otherwise.
_MACOS_X86 = {"avx1.0": "avx", "bmi1": "bmi"}
# Names that macOS lists below hw.optional.arm, where 0 means that the processor lacks the feature.
_MACOS_ARM = {
    "FEAT_FP16": "fullfp16",
    "FEAT_FHM": "fp16fml",
    "FEAT_LSE": "lse",
    "FEAT_RDM": "rdm",
    "FEAT_DotProd": "dotprod",
    "FEAT_BF16": "bf16",
    "FEAT_I8MM": "i8mm",
    "FEAT_FCMA": "complxnum",
    "FEAT_SHA3": "sha3",
    "FEAT_CSSC": "cssc",
}

_emulated: set[str] = set()


def cpu_model(root: Path = ROOT) -> str:
    """Returns the vendor's name of the processor, or the architecture where no name is found.

    Args:
        root: The folder with `proc` and `sys`; the file system's root except in tests.
    """
    name = _cpuinfo(read_text(root / "proc/cpuinfo")).get("model name") or arm_model(root)
    return name or sysctl("-n", "machdep.cpu.brand_string") or platform.processor() or platform.machine()


def architecture() -> str:
    """Returns the architecture of this process, such as `x86_64` or `aarch64`, by one name on every system."""
    return normalized(platform.machine())


def this_platform() -> Platform:
    """Returns the system and architecture of this process."""
    return {"Darwin": "macOS"}.get(platform.system(), platform.system()), architecture()


def normalized(machine: str) -> str:
    """Returns one name for an architecture that systems and compilers name differently."""
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine.lower(), machine.lower())


def cpu_features() -> frozenset[str] | None:
    """Returns the features of this machine's processor in LLVM's spelling; None where the system does not list them.

    Features that a program emulates for this process are included.
    """
    if platform.system() == "Darwin":
        return features_of_macos(sysctl("hw.optional", "machdep.cpu"))
    present = features_of_linux(read_text(Path("/proc/cpuinfo")))
    return None if present is None else present | _emulated


def add_emulated_features(features: Iterable[str]) -> None:
    """Adds features, in LLVM's spelling, whose instructions are emulated in this process from now on."""
    _emulated.update(features)


def emulated_features() -> frozenset[str]:
    """Returns the features whose instructions are emulated in this process."""
    return frozenset(_emulated)


def features_of_linux(cpuinfo: str) -> frozenset[str] | None:
    """Returns the features that `/proc/cpuinfo` lists; None if it lists none."""
    first = _cpuinfo(cpuinfo)
    if "flags" in first:
        return frozenset(_LINUX_X86.get(flag, flag.replace("_", "")) for flag in first["flags"].split())
    if "Features" in first:
        return frozenset(_LINUX_ARM.get(name, name) for name in first["Features"].split())
    return None


def features_of_macos(listing: str) -> frozenset[str] | None:
    """Returns the features that `sysctl hw.optional machdep.cpu` lists; None if it lists none.

    Apple names the features of its own processors one by one, more with each release. A feature that is not listed may
    still be present.
    """
    values = dict(re.findall(r"^([\w.]+): (.*)$", listing, re.M))
    keys = ("machdep.cpu.features", "machdep.cpu.leaf7_features", "machdep.cpu.extfeatures")
    intel = [name for key in keys for name in values.get(key, "").lower().split()]
    if intel:
        return frozenset(_MACOS_X86.get(name, name) for name in intel)
    listed = {name: values.get(f"hw.optional.arm.{name}") for name in _MACOS_ARM}
    if not any(listed.values()):
        return None
    return frozenset({"neon", "fp-armv8", *(_MACOS_ARM[name] for name, value in listed.items() if value != "0")})


def x86_level(features: frozenset[str]) -> str:
    """Returns the highest level of the x86-64 ABI whose features are all among `features` (LLVM's spelling)."""
    for index, (level, _) in enumerate(X86_LEVELS):
        if all(needed <= features for _, needed in X86_LEVELS[index:]):
            return level
    return "x86-64"


def common_cpu(features: frozenset[str]) -> str:
    """Returns LLVM's name of a CPU that has no features beside `features` (LLVM's spelling)."""
    return "generic" if "neon" in features else x86_level(features)


def _cpuinfo(text: str) -> Mapping[str, str]:
    """Returns the first processor of `/proc/cpuinfo`."""
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
