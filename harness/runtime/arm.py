"""Names Arm processors, which Linux reports by numbers alone.

Implementers and parts are those of the register MIDR_EL1, as `/proc/cpuinfo` lists them. Their names are in Linux's
`arch/arm64/include/asm/cputype.h` and in util-linux's `lscpu-arm.c`. Where several makers use the same core, the seller
of the machine (DMI) or the maker of the chip (SOC_ID, with a JEP106 code) tells them apart.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from harness.runtime.system import ROOT, read_text

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
