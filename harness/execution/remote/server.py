"""What `sam3-tvm serve-device` runs: registers with a tracker and gives every client a session, one after another.

TVM's own server ends when the process of a session crashes, waits for ever for a client that connects and says nothing,
and keeps nothing from one session to the next. This one speaks the same protocol.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.core.errors import HarnessError
from harness.core.processors import THIS_MACHINE, Processors
from harness.core.remote import Remote
from harness.execution.remote.description import DESCRIBE, INFO, Description
from harness.execution.remote.store import Store
from harness.execution.remote.tracker import CONNECT_SECONDS, connected
from harness.execution.remote.wire import (
    MAGIC,
    MISMATCH,
    Code,
    receive,
    receive_json,
    receive_number,
    send_json,
    send_number,
)
from harness.processes import kill_and_collect, start_python
from harness.processes.threads import thread_count

_PING_SECONDS = 2.0
"""How often the tracker is asked whether a session was given away."""
_UNCLAIMED_SECONDS = 6.0
"""After which a session that was given away and not begun is offered again."""
_AGAIN_SECONDS = 5.0
"""Between two attempts to reach a tracker that is gone."""
_END_SECONDS = 5.0
"""What a session gets to end after its client did."""
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Serving:
    """What to serve, and where.

    Attributes:
        remote: The tracker, and the key to be known by.
        store: Folder for what clients send.
        host: Address to listen at.
        port: To listen on; 0 for any.
        advertised: The address that clients are told; None for the one that the tracker sees.
        processors: The CPU that clients compile for, if it is not to be this machine's.
    """

    remote: Remote
    store: Path
    host: str = "0.0.0.0"
    port: int = 0
    advertised: str | None = None
    processors: Processors = THIS_MACHINE


def serve(serving: Serving, tell: Callable[[str], None]) -> None:
    """Serves until it is interrupted; no session outlives it.

    Args:
        serving: What to serve.
        tell: Called with a sentence for what happens.

    Raises:
        HarnessError: There is no tracker, the port cannot be used, or nothing can be run here.
        KeyboardInterrupt: The user ended it.
    """
    with _listening(serving.host, serving.port) as listener, _spare() as spare:
        port = int(listener.getsockname()[1])
        description = spare.describe(serving.processors)
        for line in told(description):
            tell(line)
        tracker = _registered(serving, description, port)
        tell(f"Serving as {serving.remote.key} on port {port}, registered at {serving.remote.address}.")
        while True:
            try:
                client, seconds = _awaited(listener, tracker, serving, port)
            except OSError as error:
                tracker.close()
                tell(f"The tracker {serving.remote.address} is gone ({error}): trying again until it is back.")
                tracker = _registered_again(serving, description, port)
                tell(f"Registered at {serving.remote.address} again.")
                continue
            with client:
                end = spare.serve(client, seconds, serving.store, description)
            tell(end)
            Store(serving.store).trim()


def told(description: Description) -> list[str]:
    """The machine, and a line for each target: what runs it, or why it cannot."""
    targets = [f"  {name}: {hardware}" for name, hardware in description.hardware.items()]
    return [str(description), *targets, *(f"  {name}: no, {why}" for name, why in description.problems.items())]


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise HarnessError(
            f"cannot listen at {host}, port {port} ({error.strerror or error}): give another --host or --port"
        ) from error
    with listener:
        yield listener


def _registered(serving: Serving, description: Description, port: int) -> socket.socket:
    """A connection to the tracker, which knows this server as long as it lasts.

    Raises:
        HarnessError: There is no tracker.
    """
    tracker = connected(serving.remote.address)
    info = {
        "key": f"server:{serving.remote.key}",
        "addr": (serving.advertised, port),
        INFO: asdict(description),
    }
    try:
        _ask(tracker, [Code.UPDATE_INFO, info])
    except OSError as error:
        tracker.close()
        raise HarnessError(f"the tracker {serving.remote.address} does not register servers: {error}") from error
    return tracker


def _registered_again(serving: Serving, description: Description, port: int) -> socket.socket:
    while True:
        try:
            return _registered(serving, description, port)
        except HarnessError:
            time.sleep(_AGAIN_SECONDS)


def _ask(tracker: socket.socket, question: list[object]) -> object:
    tracker.settimeout(CONNECT_SECONDS)
    send_json(tracker, question)
    return receive_json(tracker)


def _awaited(
    listener: socket.socket, tracker: socket.socket, serving: Serving, port: int
) -> tuple[socket.socket, float | None]:
    """The connection of a client that the tracker sent, and the time limit that it set.

    Raises:
        OSError: The tracker is gone.
    """

    def offer() -> str:
        match_key = f"{serving.remote.key}:{random.random()}"
        _ask(tracker, [Code.PUT, serving.remote.key, (port, match_key), serving.advertised])
        return match_key

    match_key, claimed = offer(), None
    while True:
        ready, _, _ = select.select([listener, tracker], [], [], _PING_SECONDS)
        if tracker in ready:  # it only speaks when asked
            raise OSError("the connection ended")
        if listener in ready:
            client, _address = listener.accept()
            try:
                client.settimeout(CONNECT_SECONDS)
                seconds = _greet(client, match_key, serving.remote.key)
            except (OSError, ValueError):
                client.close()
                continue
            client.settimeout(None)
            _keep_alive(client)
            return client, seconds
        pending = _ask(tracker, [Code.GET_PENDING_MATCHKEYS])
        if isinstance(pending, list) and match_key in pending:
            claimed = None
        elif claimed is None:
            claimed = time.monotonic()
        elif time.monotonic() - claimed > _UNCLAIMED_SECONDS:
            match_key, claimed = offer(), None


def _greet(client: socket.socket, match_key: str, key: str) -> float | None:
    """The handshake; returns the seconds that the client wants at most, None for no limit.

    Raises:
        OSError, ValueError: It is no client, or not the one that the tracker sent.
    """
    if receive_number(client) != MAGIC:
        raise OSError("another protocol")
    said, *options = receive(client, receive_number(client)).decode().split()
    if said != f"client:{match_key}":
        send_number(client, MISMATCH)
        raise OSError("another session")
    own = f"server:{key}".encode()
    send_number(client, MAGIC)
    send_number(client, len(own))
    client.sendall(own)
    limits = [float(option.removeprefix("-timeout=")) for option in options if option.startswith("-timeout=")]
    return limits[0] if limits else None


def _keep_alive(client: socket.socket) -> None:
    """Notices within minutes that the client's machine is gone."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPALIVE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):
            client.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _Process:
    """The process of a session, and the channel on which it is handed a client; its output goes into a file."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the process)
        with theirs:
            self.process = start_python(
                "harness.execution.remote.session",
                str(theirs.fileno()),
                str(thread_count()),
                stdout=self._output.fileno(),
                pass_fds=(theirs.fileno(),),
            )

    def give(self, client: socket.socket, given: str) -> None:
        """Hands over the client.

        Raises:
            OSError: The process has ended.
        """
        socket.send_fds(self._channel, [given.encode()], [client.fileno()])

    def describe(self, processors: Processors) -> Description:
        """What it says that this machine is, of which clients compile for these processors.

        Raises:
            HarnessError: It ends instead.
        """
        self._channel.sendall(json.dumps({DESCRIBE: asdict(processors)}).encode())
        with self._channel.makefile("rb") as lines:
            line = lines.readline()
        if not line:
            reason = _died(self.process.wait(), self.last_line())
            raise HarnessError(f"this machine cannot run compiled code, what asks it {reason}: see sam3-tvm doctor")
        return Description.of(json.loads(line))

    def last_line(self) -> str:
        """The end of what it printed."""
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - 4000))
        lines = [line.strip() for line in self._output.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def close(self) -> None:
        """Ends it."""
        kill_and_collect(self.process)
        self._channel.close()
        self._output.close()


class _Spare:
    """A process that has loaded TVM by the time a client comes."""

    def __init__(self) -> None:
        self._process = _Process()

    def describe(self, processors: Processors) -> Description:
        """See `_Process`."""
        return self._process.describe(processors)

    def serve(self, client: socket.socket, seconds: float | None, store: Path, description: Description) -> str:
        """Lets the process serve a client and waits until it has ended; returns how that went, in a sentence."""
        if self._process.process.poll() is not None:
            self.close()
            self._process = _Process()
        process = self._process
        with tempfile.TemporaryDirectory(prefix="sam3-tvm-session-") as work:
            given = {"work": work, "store": str(store), "description": description.to_json()}
            start = time.monotonic()
            try:
                process.give(client, json.dumps(given))
                problem = _watched(process, client, seconds)
            except OSError:
                process.process.wait()
                problem = f"died before it began: {process.last_line()}"
            finally:
                process.close()
                self._process = _Process()
        if problem:
            _tell_client(client, f"sam3-tvm serve-device on {description.name}: the session {problem}")
        return f"A session of {time.monotonic() - start:.1f} s {problem or 'ended'}."

    def close(self) -> None:
        """Ends it."""
        self._process.close()


@contextlib.contextmanager
def _spare() -> Iterator[_Spare]:
    spare = _Spare()
    try:
        yield spare
    finally:
        spare.close()


def _watched(process: _Process, client: socket.socket, seconds: float | None) -> str:
    """Waits until a session has ended; returns what went wrong, or nothing."""
    deadline = None if seconds is None else time.monotonic() + seconds
    gone = select.poll()
    gone.register(client, select.POLLHUP | getattr(select, "POLLRDHUP", 0))
    left: float | None = None
    while True:
        try:
            code = process.process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        else:
            return "" if code == 0 else _died(code, process.last_line())
        now = time.monotonic()
        if deadline is not None and now > deadline:
            return f"was not done after {seconds:g} s"
        if left is None and gone.poll(0):
            left = now
        if left is not None and now > left + _END_SECONDS:
            return "was ended, since its client is gone"


def _died(code: int, last_line: str) -> str:
    try:
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    except ValueError:
        how = f"died of signal {-code}"
    return f"{how}: {last_line}" if last_line else how


def _tell_client(client: socket.socket, sentence: str) -> None:
    """Answers the call that the client waits for with an error."""
    import tvm_ffi

    from harness.runtime.loading import load_runtime

    load_runtime()
    with contextlib.suppress(Exception):  # it may be gone
        tvm_ffi.get_global_func("rpc.ReturnException")(client.fileno(), sentence)
        client.shutdown(socket.SHUT_WR)
        # What it sent and nobody read would turn closing into a reset, which may overtake the sentence.
        deadline = time.monotonic() + _END_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            client.settimeout(left)
            if not client.recv(1 << 16):
                break
