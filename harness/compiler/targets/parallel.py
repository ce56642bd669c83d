"""Schedules parallel loops dynamically: a library hands out the parts of a loop to free threads.

TVM's pool gives each thread one equal part of a loop, which ends with its slowest thread: a thread on an efficiency
core, or on a core that another process also uses. The code that TVM compiles from a loop can run any one of any number
of equal parts. Therefore a library cuts a long loop into more parts than there are threads, and each thread takes the
next part until none is left. `harness.runtime.loading` switches this on when it loads a library.

In a long loop each thread is bound to its own CPU, if there is a CPU for each. A busy neighbour then takes its share of
one CPU, and the other threads take the parts that the slowed thread does not reach. Without binding, systems migrate
threads, or give a process with two threads one CPU and a process with one thread the other CPU. The calling thread's
affinity is restored when the loop ends.

A short loop does not need all threads of a large machine, because each woken thread costs time. A library records the
work of a loop's last run, and wakes as many threads as shorten the loop.
"""

from __future__ import annotations

from pathlib import Path

from harness.runtime.loading import HAND_OUT_PARTS
from harness.runtime.threads import BINDING_VARIABLE

PARTS_PER_THREAD = 4
"""Parts of a loop per thread; smaller parts would lose the data that a thread keeps from one task to the next."""
LEAST_PARTS = 16
"""Least number of parts, because on few threads a late thread would delay the others for longer."""
LONG_SECONDS = 8e-3
"""Duration of the last run from which on a loop is long; systems preempt a thread about as often."""

LAUNCH_NANOSECONDS, LAUNCH_NANOSECONDS_PER_THREAD = 2000, 100
"""Assumed cost of launching a loop on awake threads: the calling thread fills one queue after another."""

_CONSTANTS = {
    "PARTS_PER_THREAD": PARTS_PER_THREAD,
    "LEAST_PARTS": LEAST_PARTS,
    "LONG_NANOSECONDS": round(LONG_SECONDS * 1e9),
    "LAUNCH_NANOSECONDS": LAUNCH_NANOSECONDS,
    "LAUNCH_NANOSECONDS_PER_THREAD": LAUNCH_NANOSECONDS_PER_THREAD,
    "BINDING_VARIABLE": f'"{BINDING_VARIABLE}"',
    "HAND_OUT_PARTS": f"__tvm_ffi_{HAND_OUT_PARTS}",
}
SOURCE = "".join(f"#define {name} {value}\n" for name, value in _CONSTANTS.items()) + (
    Path(__file__).with_name("parallel.c").read_text(encoding="utf-8")
)
"""C source of the launcher. A failing thread takes no further part, and TVM reports the error of one of them."""
