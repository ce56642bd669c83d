"""Emulates Intel's matrix unit AMX on an x86 CPU without one: its instructions trap, and a C program executes them.

The program is `matrix_unit.c`. Code that was compiled for the unit runs unchanged. Denormal numbers, order and rounding
follow Intel's manual; an instruction takes some hundred times as long as on a unit.
"""

from __future__ import annotations

import ctypes
import subprocess
from functools import cache
from pathlib import Path

from harness.compiler.targets.linking import link_problem, linker
from harness.core.errors import HarnessError
from harness.core.files import temporary_folder
from harness.runtime.cpu import cpu_features, this_platform

_SOURCE = Path(__file__).with_name("matrix_unit.c")
_REQUIRED_FEATURES = frozenset({"avx2", "fma"})
"""Features of the CPU that `matrix_unit.c` uses."""


def emulation_problem() -> str | None:
    """Returns why this machine cannot emulate the unit, in one sentence, or None."""
    if this_platform() != ("Linux", "x86_64") or not (cpu_features() or frozenset()) >= _REQUIRED_FEATURES:
        return "AMX is emulated on Linux alone, on an x86-64 CPU with AVX2"
    return link_problem()


@cache
def emulate() -> ctypes.CDLL:
    """Emulates the unit from now on, in this process and its forks; returns the loaded `matrix_unit.c`.

    Where the CPU has the unit and the system permits its use, nothing traps, and the unit itself is used.

    Raises:
        HarnessError: This machine cannot emulate the unit.
    """
    if problem := emulation_problem():
        raise HarnessError(f"{problem}: leave out --emulate")
    command = linker()
    assert command is not None
    with temporary_folder("emulate") as folder:
        library = Path(folder) / "matrix_unit.so"
        process = subprocess.run(
            [*command, "-x", "c", "-O3", str(_SOURCE), "-o", str(library)], capture_output=True, text=True, check=False
        )
        if process.returncode != 0:
            reason = (process.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise HarnessError(f"{command[0]} cannot compile what emulates AMX ({reason}): install another C compiler")
        program = ctypes.CDLL(str(library))
    if program.emulate_matrix_unit() != 0:
        raise HarnessError("the system lets nobody handle SIGILL, so that AMX cannot be emulated: leave out --emulate")
    return program


def emulated_products() -> int:
    """Returns the number of `tdpbf16ps` instructions that this process has emulated so far."""
    count = emulate().products_in_matrix_unit
    count.restype = ctypes.c_uint64
    return int(count())


def skip_instructions() -> None:
    """Makes the unit's instructions do nothing from now on in this process, to time the remaining code.

    The first run must use one thread; it overwrites each instruction where it traps. Later runs have full speed, as
    with a unit that takes no time. Results are arbitrary.

    Raises:
        HarnessError: This machine cannot emulate the unit.
    """
    emulate().leave_out_matrix_unit()
