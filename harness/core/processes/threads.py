"""Chooses the number of threads of this process, and makes TVM and torch use it.

The number is an option of the commands and of pytest, and `SAM3_TVM_THREADS` holds its default; without either,
`harness.runtime.threads.default_threads` chooses. Processes that `harness.core.processes` starts get the number of the
process that starts them.

TVM's thread pool starts on the first parallel loop of each calling thread, and counts *physical* cores, which on many
virtual machines is half of the CPUs or fewer. Measured with TVM 0.27: TVM obeys the environment variable
`TVM_NUM_THREADS` if it is set before that first loop; `runtime.config_threadpool` can only lower the number, and not
once the pool runs. The pool never has more threads than there are CPUs.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from harness.core.errors import HarnessError
from harness.runtime.threads import VARIABLE, default_threads, leave_placing_to_the_system, usable_cpus

OPTION_VARIABLE = "SAM3_TVM_THREADS"
"""The environment variable with the default of the option --threads; only commands and pytest read it."""
OPENMP_VARIABLE = "OMP_NUM_THREADS"
SPIN_VARIABLE = "TVM_THREAD_POOL_SPIN_COUNT"
"""Variable for how often TVM's idle threads look for work before they sleep; read when the pool starts."""


Result = TypeVar("Result")

_thread_count: int | None = None
"""The chosen number of threads of this process; None for the default."""


def thread_count() -> int:
    """Returns the number of threads that this process runs on: the chosen number, otherwise the default."""
    return default_threads().count if _thread_count is None else _thread_count


def choose_threads(count: int | None) -> None:
    """Makes `count` the number of threads of this process and its children; None changes nothing.

    Raises:
        HarnessError: `count` is not positive, or more than the CPUs that this process may use.
    """
    global _thread_count
    if count is None:
        return
    usable = usable_cpus()
    if not 1 <= count <= usable:
        raise HarnessError(
            f"cannot run on {count} threads: give 1 to {usable}, the number of CPUs that this process may use"
        )
    _thread_count = count


def thread_count_reason() -> str:
    """Returns why a run uses `thread_count()` threads, as part of a sentence."""
    if _thread_count is not None:
        return f"--threads or {OPTION_VARIABLE} says so"
    return default_threads().reason


def configure_threads(count: int | None = None) -> int:
    """Makes TVM, torch and OpenMP libraries of this process use `count` threads, and returns the number.

    It must be called before the first parallel loop runs.

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


def run_on_tvm_threads(count: int, run: Callable[[], Result]) -> Result:
    """Calls a function whose parallel loops of TVM run on `count` threads, or on all CPUs if there are fewer.

    The function runs in its own thread. TVM starts that thread's pool with the number in the environment at that time,
    so no other thread may start a pool meanwhile.
    """
    with set_variable(VARIABLE, str(count)), ThreadPoolExecutor(1) as executor:
        return executor.submit(run).result()


@contextmanager
def set_variable(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable of this process, and of those that it starts, in the context."""
    previous = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if previous is None:
            del os.environ[name]
        else:
            os.environ[name] = previous


def share_cpus() -> None:
    """Makes waiting threads sleep in all processes that this one starts, unless the environment decides.

    Spinning gains microseconds if a process has its CPUs to itself, but takes CPU time from other processes.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault(SPIN_VARIABLE, "0")


def tvm_threads() -> int:
    """Returns the number of threads that a parallel loop of TVM really runs on, counted by running one.

    This starts the pool of the calling thread; to learn about a fresh process, call it in one.
    """
    import ctypes

    import tvm  # noqa: F401  (loads the runtime library with its symbols visible)

    thread_ids: list[int] = []
    task = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

    @task
    def record_thread(_index: int, _group: int | None, _data: int | None) -> int:
        thread_ids.append(threading.get_native_id())
        return 0

    # The function that compiled parallel loops call, from TVM's c_backend_api.h; 0 tasks stands for all threads.
    launch = ctypes.CDLL(None).TVMBackendParallelLaunch
    launch.argtypes = [task, ctypes.c_void_p, ctypes.c_int]
    launch.restype = ctypes.c_int
    if launch(record_thread, None, 0) != 0:
        raise RuntimeError("TVM could not launch a parallel loop")
    return len(set(thread_ids))
