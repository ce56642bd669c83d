"""The matrix unit of x86, Intel's AMX, on a CPU without one: its instructions trap, and a program carries them out.

`matrix_unit.c` is that program. Code that was compiled for the unit runs as it is, so that it configures, loads,
multiplies and stores what it would on a CPU with the unit. Denormal numbers, order and rounding are those of Intel's
manual; speed is not, an instruction takes some hundred times as long.
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
_USED = frozenset({"avx2", "fma"})
"""What the program itself uses of the CPU."""


def emulation_problem() -> str | None:
    """Returns why this machine cannot emulate the unit, in one sentence, or None."""
    if this_platform() != ("Linux", "x86_64") or not (cpu_features() or frozenset()) >= _USED:
        return "AMX is emulated on Linux alone, on an x86-64 CPU with AVX2"
    return link_problem()


@cache
def emulate() -> ctypes.CDLL:
    """Emulates the unit from now on, in this process and those that it forks; returns the program, `matrix_unit.c`.

    On a CPU that has the unit, and a system that lets this process have it, nothing traps: the unit itself is used.

    Raises:
        HarnessError: This machine cannot emulate it.
    """
    if problem := emulation_problem():
        raise HarnessError(f"{problem}: leave out --emulate")
    command = linker()
    assert command is not None
    with temporary_folder("emulate") as folder:
        library = Path(folder) / "matrix_unit.so"
        done = subprocess.run(
            [*command, "-x", "c", "-O3", str(_SOURCE), "-o", str(library)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise HarnessError(f"{command[0]} cannot compile what emulates AMX ({reason}): install another C compiler")
        program = ctypes.CDLL(str(library))
    if program.emulate_matrix_unit() != 0:
        raise HarnessError("the system lets nobody handle SIGILL, so that AMX cannot be emulated: leave out --emulate")
    return program


def emulated_products() -> int:
    """Returns how many `tdpbf16ps` were carried out in this process so far."""
    count = emulate().products_in_matrix_unit
    count.restype = ctypes.c_uint64
    return int(count())


def leave_out() -> None:
    """Lets the unit's instructions do nothing from now on, in this process: what is left takes the time beside them.

    Code that has such instructions runs with one thread for the first time, which overwrites each of them where it
    traps; after that it runs at full speed, as with a unit that takes no time. Its results are arbitrary.

    Raises:
        HarnessError: This machine cannot emulate the unit.
    """
    emulate().leave_out_matrix_unit()
