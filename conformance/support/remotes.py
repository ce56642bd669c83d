"""Real trackers and servers on this machine, in process groups of their own, for tests of what is run elsewhere."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from harness.core.errors import HarnessError
from harness.core.remote import Remote
from harness.execution.remote.secret import make_secret
from harness.execution.remote.tracker import Tracker

KEY = "a-machine"
THIS_PYTHON = Path(sys.executable)


@contextmanager
def process(
    *command: str, output: int | None = subprocess.DEVNULL, python: Path = THIS_PYTHON, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """A Python process in a process group of its own, which is ended afterwards."""
    started = subprocess.Popen(
        [str(python), *command],
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "TVM_NUM_THREADS": "1", **environment},
    )
    try:
        yield started
    finally:
        end(started)


@contextmanager
def without_torch(
    *command: str, output: int | None = subprocess.DEVNULL, python: Path = THIS_PYTHON, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """A process on a machine without PyTorch, which TVM imports if it can: a start takes a third of the time."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "torch.py").write_text("raise ImportError('there is no PyTorch here')\n")
        with process(*command, output=output, python=python, PYTHONPATH=folder, **environment) as started:
            yield started


def end(started: subprocess.Popen[str]) -> None:
    """SIGKILL for a process and for every session that it serves: as a machine that is switched off."""
    family = []
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(started.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    started.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(done: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


@contextmanager
def tracker() -> Iterator[str]:
    """A tracker's address."""
    port = free_port()
    options = ("--host", "127.0.0.1", "--port", str(port), "--port-end", str(port + 1))
    with without_torch("-m", "tvm.exec.rpc_tracker", *options):
        address = f"127.0.0.1:{port}"
        until(lambda: _answers(address))
        yield address


def _answers(address: str) -> bool:
    try:
        Tracker(address, KEY).workers()
    except HarnessError:
        return False
    return True


def tvm_server(address: str, key: str = KEY) -> AbstractContextManager[subprocess.Popen[str]]:
    """TVM's own server."""
    port = free_port()
    return without_torch(
        *("-m", "tvm.exec.rpc_server", "--host", "127.0.0.1", "--port", str(port), "--port-end", str(port + 1)),
        *("--tracker", address, "--key", key),
    )


@dataclass(frozen=True)
class Served:
    """A server of `sam3-tvm serve-device`.

    Attributes:
        process: Its own.
        port: On which it listens.
        log: File of what it prints.
    """

    process: subprocess.Popen[str]
    port: int
    log: Path

    def session(self) -> psutil.Process:
        """The process that serves a client, or waits for one."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def printed(self) -> str:
        """What it has printed so far."""
        return self.log.read_text()

    def is_busy(self) -> bool:
        """Whether somebody is connected."""
        connections = psutil.Process(self.process.pid).net_connections()
        return any(one.laddr.port == self.port and one.status == psutil.CONN_ESTABLISHED for one in connections)


def new_remote(address: str, folder: Path, key: str = KEY) -> Remote:
    """Devices that share a secret, in a file that is made."""
    file = folder / "device-secret"
    make_secret(file)
    return Remote(address, key, file)


@contextmanager
def device(
    remote: Remote, store: Path, *options: str, python: Path = THIS_PYTHON, **environment: str
) -> Iterator[Served]:
    """`sam3-tvm serve-device`, registered; without PyTorch, which a device does not need."""
    tracker, port, log = Tracker(remote.address, remote.key), free_port(), store.with_name(f"{store.name}.log")
    before = tracker.workers()
    given = ("--tracker", remote.address, "--key", remote.key, "--store", str(store), "--port", str(port))
    secret = () if remote.secret_file is None else ("--secret-file", str(remote.secret_file))
    with (
        log.open("wb") as output,
        without_torch(
            *("-m", "harness", "serve-device", *given, *secret, *options),
            output=output.fileno(),
            python=python,
            PYTHONUNBUFFERED="1",
            **environment,
        ) as started,
    ):
        until(lambda: tracker.workers() > before or started.poll() is not None)
        assert started.poll() is None, log.read_text()
        yield Served(started, port, log)
