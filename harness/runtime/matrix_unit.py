"""Requests the matrix unit of x86, Intel's AMX, from the system for this process.

Linux keeps the state of tile registers only for processes that request it (`Documentation/arch/x86/xstate.rst` in its
source). A tile instruction ends any other process with SIGILL. A container's filter of system calls may block the
request.
"""

from __future__ import annotations

import ctypes
import os
import platform

from harness.runtime.cpu import MATRIX_UNIT, architecture, emulated_features

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
