"""Defines functions that really go wrong, for calls in a worker (`test_worker.py`)."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.core.errors import HarnessError

OnStage = Callable[[str], None]

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


def echo(argument: object, *rest: Any) -> object:
    *_, on_stage = rest
    on_stage("first")
    on_stage("second")
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


def what_was_loaded(_: object, on_stage: OnStage) -> tuple[int, list[int]]:
    """This process, and those in which `load` ran before it was forked."""
    on_stage("looking")
    return os.getpid(), traces


def collects_garbage(_: object, on_stage: OnStage) -> bool:
    on_stage("looking")
    return gc.isenabled()


def load_libraries(_: object, on_stage: OnStage) -> tuple[set[str], list[str]]:
    """Large modules that are there after `harness.verify.stages.load_libraries`, and the threads."""
    from harness.verify import stages

    stages.load_libraries()
    return {"torch", "tvm", "sam3"} & set(sys.modules), [thread.name for thread in threading.enumerate()]


def where_it_is(variable: str, on_stage: OnStage) -> tuple[str, str | None]:
    return str(Path.cwd()), os.environ.get(variable)


def leave_files(how: str, on_stage: OnStage) -> str:
    """Files in the folder for temporary ones, this process's and a program's; then it returns, waits or dies."""
    folder = Path(tempfile.mkdtemp())
    (folder / "large").write_bytes(bytes(1000))
    subprocess.run([sys.executable, "-c", "import tempfile; tempfile.mkdtemp()"], check=True)
    on_stage("left")
    if how == "waits":
        time.sleep(600)
    if how == "dies":
        os.abort()
    return str(folder)


def tell_pid_and_wait(path: Path, on_stage: OnStage) -> None:
    on_stage("waiting")
    path.with_suffix(".tmp").write_text(str(os.getpid()))
    path.with_suffix(".tmp").replace(path)
    time.sleep(600)


def read_through_a_null_pointer(*arguments: Any) -> None:
    *_, on_stage = arguments
    on_stage("before the crash")
    print("printed before the crash", file=sys.stderr)
    ctypes.string_at(0)


def abort(_: object, on_stage: OnStage) -> None:
    os.abort()


def leave(code: int, on_stage: OnStage) -> None:
    os._exit(code)


def hang_in_python(*arguments: Any) -> None:
    *_, on_stage = arguments
    on_stage("hanging")
    while True:
        time.sleep(1)


def hang_in_native_code(_: object, on_stage: OnStage) -> None:
    """Holds the interpreter lock forever and ignores what can be ignored."""
    on_stage("hanging")
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, signal.SIG_IGN)
    ctypes.PyDLL(None).sleep(600)


def allocate(size: int, on_stage: OnStage) -> None:
    """Takes memory bit by bit and touches it, so that it is resident."""
    on_stage("allocating")
    kept = []
    for _ in range(size // 2**24):
        kept.append(bytearray(b"x") * 2**24)
        time.sleep(0.005)
    time.sleep(600)


def allocate_in_a_grandchild(size: int, on_stage: OnStage) -> None:
    on_stage("allocating")
    code = f"import time; kept = bytearray(b'x') * {size}; time.sleep(600)"
    subprocess.run([sys.executable, "-c", code], check=True)


def ask_for_more_than_there_is(_: object, on_stage: OnStage) -> object:
    return bytearray(2**62)


def take_and_give_back(size: int, on_stage: OnStage) -> None:
    kept = bytearray(b"x") * size
    del kept


def fail(message: str, on_stage: OnStage) -> None:
    on_stage("failing")
    raise LookupError(message)


def blame_the_user(message: str, on_stage: OnStage) -> None:
    raise HarnessError(message)


def answer_too_much(_: object, on_stage: OnStage) -> bytes:
    """Returns more than this process may write; the folder that would be given up to make room is gone already."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    shutil.rmtree(tempfile.gettempdir())
    return bytes(5000)


def return_a_lambda(_: object, on_stage: OnStage) -> object:
    return lambda: None


def shout(megabytes: int, on_stage: OnStage) -> str:
    line = "x" * 999 + "\n"
    for _ in range(megabytes * 1000):
        sys.stderr.write(line)
    sys.stderr.write("the last line\n")
    sys.stderr.flush()
    os.abort()


def read_stdin(_: object, on_stage: OnStage) -> str:
    return sys.stdin.read()


def spawn_a_stubborn_grandchild(argument: tuple[Path, str, bool], on_stage: OnStage) -> None:
    path, leaves, waits = argument
    grandchild = subprocess.Popen([sys.executable, "-c", _STUBBORN, str(path), leaves])
    while not path.exists():
        time.sleep(0.01)
    on_stage("spawned")
    if waits:
        grandchild.wait()
    time.sleep(0.3)  # so that the parent sees a grandchild that has left the group


def import_stages(stages: list[str], on_stage: OnStage) -> None:
    for stage in stages:
        on_stage(stage)
        time.sleep(0.05)


def fail_without_argument(on_stage: OnStage) -> None:
    on_stage("looking")
    raise OSError("no such library")


def visible_gpus(_: object, on_stage: OnStage) -> tuple[str | None, int]:
    import torch

    return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()
