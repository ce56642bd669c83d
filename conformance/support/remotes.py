"""Starts real devices on this machine, in process groups of their own, and a tunnel to them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from harness.core.processors import Remote

HERE = "127.0.0.1"
THIS_PYTHON = Path(sys.executable)


def end(started: subprocess.Popen[str]) -> None:
    """Kills a process and every session that it serves, as if the machine was switched off."""
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
        probe.bind((HERE, 0))
        return int(probe.getsockname()[1])


def until(done: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


@contextmanager
def without_torch(
    *command: str, log: Path, python: Path = THIS_PYTHON, tvm_version: str = "", **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """Runs a Python process in a process group of its own, without PyTorch, and ends it afterwards.

    TVM imports PyTorch if it can, without which a start takes a third of the time.

    Args:
        command: Arguments of Python.
        log: File of what it prints.
        python: The interpreter.
        tvm_version: Version of TVM that seems to be installed there.
        environment: Variables.
    """
    with TemporaryDirectory() as folder, log.open("wb") as output:
        (Path(folder) / "torch.py").write_text("raise ImportError('there is no PyTorch here')\n")
        if tvm_version:
            (metadata := Path(folder) / f"apache_tvm-{tvm_version}.dist-info").mkdir()
            (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: apache-tvm\nVersion: {tvm_version}\n")
        started = subprocess.Popen(
            [str(python), *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": folder, "PYTHONUNBUFFERED": "1", "TVM_NUM_THREADS": "1", **environment},
        )
        try:
            yield started
        finally:
            end(started)


@contextmanager
def tvm_server(log: Path) -> Iterator[Remote]:
    """Runs TVM's own server."""
    port = free_port()
    options = ("--host", HERE, "--port", str(port), "--port-end", str(port + 1))
    with without_torch("-m", "tvm.exec.rpc_server", *options, log=log):
        until(lambda: "bind to" in log.read_text())
        yield Remote(f"{HERE}:{port}")


@dataclass(frozen=True)
class Served:
    """A server of `sam3-tvm serve-device`.

    Attributes:
        process: Its own, whose child is TVM's server.
        port: On which it listens.
        log: File of what it prints.
    """

    process: subprocess.Popen[str]
    port: int
    log: Path

    @property
    def remote(self) -> Remote:
        """Where clients find it."""
        return Remote(f"{HERE}:{self.port}")

    def session(self) -> psutil.Process:
        """The process that serves a client."""
        (server,) = psutil.Process(self.process.pid).children()
        (session,) = server.children()
        return session


@contextmanager
def device(
    store: Path,
    *options: str,
    port: int | None = None,
    python: Path = THIS_PYTHON,
    tvm_version: str = "",
    **environment: str,
) -> Iterator[Served]:
    """Runs `sam3-tvm serve-device`, without PyTorch, which a device does not need."""
    port, log = port or free_port(), store.with_name(f"{store.name}.log")
    command = ("-m", "harness", "serve-device", "--store", str(store), "--port", str(port), *options)
    with without_torch(*command, log=log, python=python, tvm_version=tvm_version, **environment) as started:
        until(lambda: "Serving" in log.read_text() or started.poll() is not None)
        assert started.poll() is None, log.read_text()
        yield Served(started, port, log)


class Tunnel:
    """Passes connections on to a port, as SSH does; of the first connection, no more than some bytes of the client.

    Attributes:
        remote: Where clients find the device.
        held: Set once these bytes have come.
    """

    def __init__(self, port: int, bytes_of_first: int) -> None:
        self.held = threading.Event()
        self._port, self._left = port, bytes_of_first
        self._listener = socket.create_server((HERE, 0))
        self.remote = Remote(f"{HERE}:{self._listener.getsockname()[1]}")
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            try:
                server = socket.create_connection((HERE, self._port))
            except OSError:
                client.close()
                continue
            threading.Thread(target=self._pass_on, args=(client, server, not self.held.is_set()), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(server, client, False), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while part := source.recv(1 << 16):
                if counts:
                    self._left -= len(part)
                if counts and self._left < 0:
                    self.held.set()
                else:
                    sink.sendall(part)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
