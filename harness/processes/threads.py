"""How many threads this process runs on, and making TVM and torch use that many.

The number is an option of the commands and of pytest, and `SAM3_TVM_THREADS` has its default; without either,
`harness.runtime.threads.default_threads` chooses. Processes that `harness.processes` starts are told the number of the
process that starts them.

TVM's thread pool starts on the first parallel loop of each calling thread, and counts *physical* cores, which on many
virtual machines is half of the CPUs or fewer. Measured with TVM 0.27: the environment variable `TVM_NUM_THREADS` is
what it obeys, as long as it is set before that first loop; `runtime.config_threadpool` can only lower the number, and
not once the pool runs. The pool never has more threads than there are CPUs.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from harness.core.errors import HarnessError
from harness.runtime.threads import VARIABLE, default_threads, leave_placing_to_the_system, usable_cpus

OPTION_VARIABLE = "SAM3_TVM_THREADS"
"""The environment variable with the default of the option --threads; commands and pytest read it, and nothing else."""
OPENMP_VARIABLE = "OMP_NUM_THREADS"
SPIN_VARIABLE = "TVM_THREAD_POOL_SPIN_COUNT"
"""How often TVM's idle threads look for work before they sleep; read when the pool starts."""


Result = TypeVar("Result")

_chosen: int | None = None
"""The number of threads that this process was told to run on."""


def thread_count() -> int:
    """The number of threads that this process runs on: the one that was chosen, otherwise the default."""
    return default_threads().count if _chosen is None else _chosen


def choose_threads(count: int | None) -> None:
    """Makes `count` the number of threads of this process and of those that it starts; None leaves it as it is.

    Raises:
        HarnessError: `count` is not positive, or more than the CPUs that this process may use.
    """
    global _chosen
    if count is not None:
        _chosen = checked(count)


def checked(count: int) -> int:
    """`count`, if a run on so many threads makes sense.

    Raises:
        HarnessError: It is not positive, or more than the CPUs that this process may use.
    """
    usable = usable_cpus()
    if 1 <= count <= usable:
        return count
    raise HarnessError(
        f"cannot run on {count} threads: give 1 to {usable}, the number of CPUs that this process may use"
    )


def reason() -> str:
    """Why a run uses `thread_count()` threads, as part of a sentence."""
    if _chosen is not None:
        return f"--threads or {OPTION_VARIABLE} says so"
    return default_threads().reason


def configure_threads(count: int | None = None) -> int:
    """Makes TVM, torch and OpenMP libraries of this process use `count` threads; returns the number.

    Call it before the first parallel loop runs.

    Args:
        count: The number of threads, as for `choose_threads`.

    Raises:
        HarnessError: `count` is not positive, or more than the CPUs that this process may use.
    """
    choose_threads(count)
    count = thread_count()
    os.environ[VARIABLE] = str(count)
    os.environ[OPENMP_VARIABLE] = str(count)
    leave_placing_to_the_system(count)
    if (torch := sys.modules.get("torch")) is not None:  # otherwise it reads OMP_NUM_THREADS when it is imported
        torch.set_num_threads(count)
    return count


def on_tvm_threads(count: int, run: Callable[[], Result]) -> Result:
    """Calls a function whose parallel loops of TVM run on `count` threads, or on as many as there are CPUs.

    It is called in a thread of its own, whose pool TVM starts with the number that the environment has at that time;
    no other thread may start one meanwhile.
    """
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(count)
    try:
        with ThreadPoolExecutor(1) as alone:
            return alone.submit(run).result()
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def share_cpus() -> None:
    """Makes threads that wait for others sleep, in all processes that this one starts, unless the environment decides.

    Spinning, which gains microseconds where a process has its CPUs to itself, takes them from the other processes.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault(SPIN_VARIABLE, "0")


def tvm_threads() -> int:
    """Number of threads that a parallel loop of TVM really runs on, counted by running one.

    It starts the pool of the calling thread: whoever only wants to know how a fresh process would fare asks in one.
    """
    import ctypes

    import tvm  # noqa: F401  (loads the runtime library with its symbols visible)

    seen: list[int] = []
    task = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

    @task
    def note_thread(_index: int, _group: int | None, _data: int | None) -> int:
        seen.append(threading.get_native_id())
        return 0

    # The function that compiled parallel loops call, from TVM's c_backend_api.h; 0 tasks stands for all threads.
    launch = ctypes.CDLL(None).TVMBackendParallelLaunch
    launch.argtypes = [task, ctypes.c_void_p, ctypes.c_int]
    launch.restype = ctypes.c_int
    if launch(note_thread, None, 0) != 0:
        raise RuntimeError("TVM could not launch a parallel loop")
    return len(set(seen))
