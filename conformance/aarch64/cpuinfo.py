"""What Linux tells about a processor in `/proc/cpuinfo`, of an emulated one.

QEMU's user-mode emulation, as of version 7, shows a process that of the machine beneath.
"""

from __future__ import annotations

CPUS = {"neoverse-n1": (0x41, 0xD0C), "max": (0x00, 0x051)}
"""What QEMU emulates: implementer and part of its register MIDR_EL1. `max` has all that QEMU can, SVE among it."""

_HWCAP = """
fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 sm3 sm4
asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs sb paca pacg
"""
_HWCAP2 = """
dcpodp sve2 sveaes svepmull svebitperm svesha3 svesm4 flagm2 frint svei8mm svef32mm svef64mm svebf16 i8mm bf16 dgh rng
bti mte
"""
"""The names of the bits, lowest first: `arch/arm64/kernel/cpuinfo.c` and `arch/arm64/include/uapi/asm/hwcap.h`."""


def cpuinfo(cpu: str, hwcap: int, hwcap2: int, count: int) -> str:
    """Returns the text.

    Args:
        cpu: One of `CPUS`.
        hwcap, hwcap2: The words AT_HWCAP and AT_HWCAP2 that a process there gets.
        count: Number of processors.
    """
    implementer, part = CPUS[cpu]
    names = [
        name
        for word, table in ((hwcap, _HWCAP), (hwcap2, _HWCAP2))
        for bit, name in enumerate(table.split())
        if word >> bit & 1
    ]
    lines = {
        "BogoMIPS": "100.00",
        "Features": " ".join(names),
        "CPU implementer": f"{implementer:#04x}",
        "CPU architecture": "8",
        "CPU variant": "0x0",
        "CPU part": f"{part:#05x}",
        "CPU revision": "0",
    }
    described = "".join(f"{key}\t: {value}\n" for key, value in lines.items())
    return "\n".join(f"processor\t: {number}\n{described}" for number in range(count))
