"""Runs the parallel loops of a compiled library on any number of threads, whatever this machine and TVM's pool have.

A parallel loop is compiled to a function that does part `number` of `count` equal parts of it, ⌈iterations / count⌉
each, and is handed to `TVMBackendParallelLaunch`, which calls it once on each thread of the pool. The library finds
that function through a variable of its own, which the runtime sets when it loads the library; it is set to another
function here for a while. What is run is the code that any other run of the library runs, cut as on so many threads.
"""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "__TVMBackendParallelLaunch"
"""The variable of a library with the function that runs a loop; TVM's `codegen_cpu.cc` declares it."""


class _Group(ctypes.Structure):
    """`TVMParallelGroupEnv` of TVM's `c_backend_api.h`."""

    _fields_ = [("sync_handle", ctypes.c_void_p), ("num_task", ctypes.c_int32)]


PART = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Group), ctypes.c_void_p)
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)


@dataclass(frozen=True)
class Loop:
    """A parallel loop that is to be run now.

    Attributes:
        code: Address of its compiled body, which tells it from other loops of the library.
        data: Address of what the body reads.
    """

    code: int
    data: int | None

    def parts(self, count: int) -> Callable[[int], None]:
        """Returns what runs part 0 … `count` - 1 of the loop; parts behind the last iteration do nothing."""
        body, group = PART(self.code), ctypes.pointer(_Group(None, count))

        def run(number: int) -> None:
            if body(number, group, self.data):
                raise RuntimeError(f"part {number} of {count} of a parallel loop failed")

        return run


Launch = Callable[[Loop], None]
"""Runs all of a loop."""


def one_by_one(count: int) -> Launch:
    """Runs a loop in `count` parts on the calling thread, the last one first."""

    def launch(loop: Loop) -> None:
        run = loop.parts(count)
        for number in reversed(range(count)):
            run(number)

    return launch


@contextmanager
def on_threads(count: int) -> Iterator[Launch]:
    """Runs a loop in `count` parts on as many threads, which may be more than there are CPUs."""
    with ThreadPoolExecutor(count) as pool:

        def launch(loop: Loop) -> None:
            for future in [pool.submit(loop.parts(count), number) for number in range(count)]:
                future.result()

        yield launch


@contextmanager
def launched_by(library: Path, launch: Launch) -> Iterator[None]:
    """Runs the parallel loops of a library that is loaded by `launch` instead of TVM's pool.

    A call in which a loop fails raises TVM's error, as with TVM's pool.
    """

    def run(code: int, data: int | None, _count: int) -> int:
        try:
            launch(Loop(code, data))
        except BaseException:  # it cannot pass through compiled code, which reports the status
            traceback.print_exc()
            return -1
        return 0

    variable: Any = ctypes.c_void_p.in_dll(ctypes.CDLL(str(library)), VARIABLE)
    before, function = variable.value, LAUNCH(run)
    variable.value = ctypes.cast(function, ctypes.c_void_p).value
    try:
        yield
    finally:
        variable.value = before
