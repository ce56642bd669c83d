"""Functions that go wrong for real, to be called in a worker; see `test_worker.py`."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from harness.core.errors import HarnessError

Enter = Callable[[str], None]

traces: list[int] = []
"""Ids of the processes that have loaded."""

# A grandchild that no signal but SIGKILL ends; it leaves its process id in the file named by its argument.
_STUBBORN = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
if sys.argv[2] == "leaves":
    os.setsid()
path = pathlib.Path(sys.argv[1])
path.with_suffix(".tmp").write_text(str(os.getpid()))
path.with_suffix(".tmp").replace(path)
time.sleep(600)
"""


def echo(argument: object, enter: Enter) -> object:
    enter("first")
    enter("second")
    return argument


def load() -> None:
    """Leaves a trace in this process, for `what_was_loaded`."""
    traces.append(os.getpid())


def load_what_is_missing() -> None:
    raise ImportError("no such library")


def load_for_ever() -> None:
    time.sleep(600)


def load_and_die() -> None:
    os.abort()


def what_was_loaded(_: object, enter: Enter) -> tuple[int, list[int]]:
    """This process, and those in which `load` ran before it was forked."""
    enter("looking")
    return os.getpid(), traces


def collects_garbage(_: object, enter: Enter) -> bool:
    enter("looking")
    return gc.isenabled()


def load_libraries(_: object, enter: Enter) -> tuple[set[str], list[str]]:
    """Large modules that are there after `harness.verify.stages.load_libraries`, and the threads."""
    from harness.verify import stages

    stages.load_libraries()
    return {"torch", "tvm", "sam3"} & set(sys.modules), [thread.name for thread in threading.enumerate()]


def where_it_is(variable: str, enter: Enter) -> tuple[str, str | None]:
    return str(Path.cwd()), os.environ.get(variable)


def leave_files(how: str, enter: Enter) -> str:
    """Files in the folder for temporary ones, this process's and a program's; then it returns, waits or dies."""
    folder = Path(tempfile.mkdtemp())
    (folder / "large").write_bytes(bytes(1000))
    subprocess.run([sys.executable, "-c", "import tempfile; tempfile.mkdtemp()"], check=True)
    enter("left")
    if how == "waits":
        time.sleep(600)
    if how == "dies":
        os.abort()
    return str(folder)


def tell_pid_and_wait(path: Path, enter: Enter) -> None:
    enter("waiting")
    path.with_suffix(".tmp").write_text(str(os.getpid()))
    path.with_suffix(".tmp").replace(path)
    time.sleep(600)


def read_through_a_null_pointer(_: object, enter: Enter) -> None:
    enter("before the crash")
    print("printed before the crash", file=sys.stderr)
    ctypes.string_at(0)


def abort(_: object, enter: Enter) -> None:
    os.abort()


def leave(code: int, enter: Enter) -> None:
    os._exit(code)


def hang_in_python(_: object, enter: Enter) -> None:
    enter("hanging")
    while True:
        time.sleep(1)


def hang_in_native_code(_: object, enter: Enter) -> None:
    """Holds the interpreter lock forever and ignores what can be ignored."""
    enter("hanging")
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, signal.SIG_IGN)
    ctypes.PyDLL(None).sleep(600)


def allocate(size: int, enter: Enter) -> None:
    """Takes memory bit by bit and touches it, so that it is resident."""
    enter("allocating")
    kept = []
    for _ in range(size // 2**24):
        kept.append(bytearray(b"x") * 2**24)
        time.sleep(0.005)
    time.sleep(600)


def allocate_in_a_grandchild(size: int, enter: Enter) -> None:
    enter("allocating")
    code = f"import time; kept = bytearray(b'x') * {size}; time.sleep(600)"
    subprocess.run([sys.executable, "-c", code], check=True)


def ask_for_more_than_there_is(_: object, enter: Enter) -> object:
    return bytearray(2**62)


def take_and_give_back(size: int, enter: Enter) -> None:
    kept = bytearray(b"x") * size
    del kept


def fail(message: str, enter: Enter) -> None:
    enter("failing")
    raise LookupError(message)


def blame_the_user(message: str, enter: Enter) -> None:
    raise HarnessError(message)


def return_a_lambda(_: object, enter: Enter) -> object:
    return lambda: None


def shout(megabytes: int, enter: Enter) -> str:
    line = "x" * 999 + "\n"
    for _ in range(megabytes * 1000):
        sys.stderr.write(line)
    sys.stderr.write("the last line\n")
    sys.stderr.flush()
    os.abort()


def read_stdin(_: object, enter: Enter) -> str:
    return sys.stdin.read()


def spawn_a_stubborn_grandchild(argument: tuple[Path, str, bool], enter: Enter) -> None:
    path, leaves, waits = argument
    grandchild = subprocess.Popen([sys.executable, "-c", _STUBBORN, str(path), leaves])
    while not path.exists():
        time.sleep(0.01)
    enter("spawned")
    if waits:
        grandchild.wait()
    time.sleep(0.3)  # so that the parent sees a grandchild that has left the group


def import_stages(stages: list[str], enter: Enter) -> None:
    for stage in stages:
        enter(stage)
        time.sleep(0.05)


def fail_without_argument(_: object, enter: Enter) -> None:
    enter("looking")
    raise OSError("no such library")


def visible_gpus(_: object, enter: Enter) -> tuple[str | None, int]:
    import torch

    return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()
