"""Names the processor of this machine and lists its instruction sets in LLVM's spelling.

Linux reports Arm processors by numbers alone. Implementers and parts are those of the register MIDR_EL1, as
`/proc/cpuinfo` lists them. Their names are in Linux's `arch/arm64/include/asm/cputype.h` and in util-linux's
`lscpu-arm.c`. Where several makers use the same core, the seller of the machine (DMI) or the maker of the chip (SOC_ID,
with a JEP106 code) tells them apart.

Linux keeps the state of the tile registers of x86's matrix unit, Intel's AMX, only for processes that request it
(`Documentation/arch/x86/xstate.rst` in its source). A tile instruction ends any other process with SIGILL. A
container's filter of system calls may block the request.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from harness.runtime.system import ROOT, read_text, sysctl

_ARM, _APPLE, _AMPERE = 0x41, 0x61, 0xC0
_IMPLEMENTERS = {_ARM: "Arm", 0x46: "Fujitsu", 0x48: "HiSilicon", 0x4E: "NVIDIA", 0x51: "Qualcomm"} | {
    _APPLE: "Apple",
    _AMPERE: "Ampere",
}
_CORES = {
    (_ARM, 0xD03): "Cortex-A53",
    (_ARM, 0xD05): "Cortex-A55",
    (_ARM, 0xD07): "Cortex-A57",
    (_ARM, 0xD08): "Cortex-A72",
    (_ARM, 0xD0B): "Cortex-A76",
    (_ARM, 0xD0C): "Neoverse-N1",
    (_ARM, 0xD40): "Neoverse-V1",
    (_ARM, 0xD41): "Cortex-A78",
    (_ARM, 0xD42): "Cortex-A78AE",
    (_ARM, 0xD44): "Cortex-X1",
    (_ARM, 0xD46): "Cortex-A510",
    (_ARM, 0xD47): "Cortex-A710",
    (_ARM, 0xD48): "Cortex-X2",
    (_ARM, 0xD49): "Neoverse-N2",
    (_ARM, 0xD4D): "Cortex-A715",
    (_ARM, 0xD4E): "Cortex-X3",
    (_ARM, 0xD4F): "Neoverse-V2",
    (_ARM, 0xD80): "Cortex-A520",
    (_ARM, 0xD81): "Cortex-A720",
    (_ARM, 0xD82): "Cortex-X4",
    (_ARM, 0xD84): "Neoverse-V3",
    (_ARM, 0xD85): "Cortex-X925",
    (_ARM, 0xD87): "Cortex-A725",
    (_ARM, 0xD8E): "Neoverse-N3",
    (_APPLE, 0x000): "cores that the virtual machine hides",
    (_APPLE, 0x022): "M1 Icestorm",
    (_APPLE, 0x023): "M1 Firestorm",
    (_APPLE, 0x024): "M1 Pro Icestorm",
    (_APPLE, 0x025): "M1 Pro Firestorm",
    (_APPLE, 0x028): "M1 Max Icestorm",
    (_APPLE, 0x029): "M1 Max Firestorm",
    (_APPLE, 0x032): "M2 Blizzard",
    (_APPLE, 0x033): "M2 Avalanche",
    (_APPLE, 0x034): "M2 Pro Blizzard",
    (_APPLE, 0x035): "M2 Pro Avalanche",
    (_APPLE, 0x038): "M2 Max Blizzard",
    (_APPLE, 0x039): "M2 Max Avalanche",
    (_AMPERE, 0xAC3): "Ampere-1",
    (_AMPERE, 0xAC4): "Ampere-1a",
}
_AMAZON = "Amazon EC2"
_GRAVITONS = {
    "Cortex-A72": "AWS Graviton",
    "Neoverse-N1": "AWS Graviton2",
    "Neoverse-V1": "AWS Graviton3",
    "Neoverse-V2": "AWS Graviton4",
}
_AMPERE_ONE = ("Ampere-1", "Ampere-1a")
_AMPERE_SOC = "jep106:0a16"


def arm_model(root: Path = ROOT) -> str | None:
    """Returns the name of this machine's Arm processor with its cores; None if `/proc/cpuinfo` lists none.

    Args:
        root: The folder with `proc` and `sys`; the file system's root except in tests.
    """
    cpuinfo = read_text(root / "proc/cpuinfo")
    implementers = re.findall(r"^CPU implementer\s*:\s*(0x[0-9a-fA-F]+)$", cpuinfo, re.M)
    parts = re.findall(r"^CPU part\s*:\s*(0x[0-9a-fA-F]+)$", cpuinfo, re.M)
    counts = Counter((int(maker, 16), int(part, 16)) for maker, part in zip(implementers, parts, strict=False))
    if not counts:
        return None
    names = {core: _CORES.get(core, f"part {core[1]:#05x}") for core in counts}
    (maker, _), name = next(iter(names.items()))
    if len(counts) == 1 and (product := _product(root, name)):
        return f"{product} ({name})"
    listed = name if len(counts) == 1 else " + ".join(f"{count}x {names[core]}" for core, count in counts.items())
    return f"{_IMPLEMENTERS.get(maker, f'Arm implementer {maker:#04x}')} {listed}"


def _product(root: Path, core: str) -> str | None:
    """Returns the product name of a processor with such cores; None if the core's name says it already."""
    if core in _AMPERE_ONE:
        return "AmpereOne"
    if read_text(root / "sys/class/dmi/id/sys_vendor") == _AMAZON:
        return _GRAVITONS.get(core)
    if core == "Neoverse-N1" and read_text(root / "sys/devices/soc0/family") == _AMPERE_SOC:
        return "Ampere Altra"
    return None


Platform = tuple[str, str]
"""A system (`Linux`, `macOS`) and an architecture (`x86_64`, `aarch64`)."""

VECTOR_FEATURES = (
    *("popcnt", "lzcnt", "movbe", "sse3", "ssse3", "sse4.1", "sse4.2", "sse4a"),
    *("avx", "f16c", "fma", "fma4", "xop", "tbm", "bmi", "bmi2"),
    *("avx2", "avxvnni", "avxvnniint8", "avxvnniint16", "avxifma", "gfni"),
    *("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl", "avx512ifma", "avx512vbmi", "avx512vbmi2"),
    *("avx512vnni", "avx512bitalg", "avx512vpopcntdq", "avx512bf16", "avx512fp16", "egpr"),
    *("neon", "fp-armv8", "fullfp16", "fp16fml", "lse", "rdm", "dotprod", "bf16", "i8mm"),
    *("complxnum", "sha3", "sve", "sve2", "cssc", "mops"),
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


SYSTEM_CALL, REQUEST, TILE_DATA = 158, 0x1023, 18
"""`arch_prctl` of x86-64 (arch/x86/entry/syscalls), ARCH_REQ_XCOMP_PERM (asm/prctl.h) and XFEATURE_XTILEDATA."""


def matrix_unit_problem() -> str | None:
    """Requests the unit for this process and its future forks; returns why the system refuses it, or None.

    No request is made where the unit is emulated.
    """
    if emulated_features().issuperset(MATRIX_UNIT):
        return None
    if (platform.system(), architecture()) != ("Linux", "x86_64"):
        return "only Linux on x86-64 has a way to ask for it"
    if ctypes.CDLL(None, use_errno=True).syscall(SYSTEM_CALL, REQUEST, TILE_DATA) == 0:
        return None
    return os.strerror(ctypes.get_errno()).lower()
