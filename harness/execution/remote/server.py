"""What `sam3-tvm serve-device` runs: registers with a tracker and gives every client a session, one after another.

TVM's own server ends when the process of a session crashes, waits for ever for a client that connects and says nothing,
asks nobody who they are, and keeps nothing from one session to the next. This one speaks the same protocol with clients
that have proved themselves.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from harness.core.errors import HarnessError
from harness.core.processors import THIS_MACHINE, Processors
from harness.core.remote import Remote
from harness.execution.remote.admission import Admission, Client
from harness.execution.remote.description import DESCRIBE, INFO, Description
from harness.execution.remote.handshake import address_of
from harness.execution.remote.secret import Secret
from harness.execution.remote.store import Store
from harness.execution.remote.tracker import CONNECT_SECONDS, connected
from harness.execution.remote.wire import Code, receive_json, send_json
from harness.processes import kill_and_collect, start_python
from harness.processes.threads import thread_count

LOOPBACK = "127.0.0.1"
"""The address that no other machine reaches."""
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
        secret: What clients must know.
        host: Address to listen at.
        port: To listen on; 0 for any.
        advertised: The address that clients are told; None for the one that the tracker sees.
        processors: The CPU that clients compile for, if it is not to be this machine's.
    """

    remote: Remote
    store: Path
    secret: Secret
    host: str = LOOPBACK
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
        for line in (*told(description), _where(serving, port)):
            tell(line)
        own = partial(is_own, advertised=serving.advertised)
        admission = Admission(listener, serving.secret, serving.remote.key, own, tell)
        tracker = _registered(serving, description, port)
        tell(f"Serving as {serving.remote.key} on port {port}, registered at {serving.remote.address}.")
        while True:
            try:
                client = _awaited(admission, tracker, serving, port)
            except OSError as error:
                tracker.close()
                tell(f"The tracker {serving.remote.address} is gone ({error}): trying again until it is back.")
                tracker = _registered_again(serving, description, port)
                tell(f"Registered at {serving.remote.address} again.")
                continue
            with client.connection as connection:
                end = spare.serve(connection, client.seconds, serving.store, description)
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
        "addr": (_advertised(serving), port),
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


def _awaited(admission: Admission, tracker: socket.socket, serving: Serving, port: int) -> Client:
    """The client that the tracker sent.

    Raises:
        OSError: The tracker is gone.
    """

    def offer() -> str:
        match_key = f"{serving.remote.key}:{secrets.token_hex(16)}"
        admission.promise(match_key)
        _ask(tracker, [Code.PUT, serving.remote.key, (port, match_key), _advertised(serving)])
        return match_key

    match_key, claimed = offer(), None
    while True:
        ready, _, _ = select.select([admission.fileno(), tracker.fileno()], [], [], _PING_SECONDS)
        if tracker.fileno() in ready:  # it only speaks when asked
            raise OSError("the connection ended")
        if admission.fileno() in ready:
            admission.promise(None)
            return admission.client()
        pending = _ask(tracker, [Code.GET_PENDING_MATCHKEYS])
        if isinstance(pending, list) and match_key in pending:
            claimed = None
        elif claimed is None:
            claimed = time.monotonic()
        elif time.monotonic() - claimed > _UNCLAIMED_SECONDS:
            match_key, claimed = offer(), None


def _is_loopback(host: str) -> bool:
    """Whether an address that can be listened at is one that no other machine reaches."""
    address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    return ipaddress.ip_address(str(address).partition("%")[0]).is_loopback


def _advertised(serving: Serving) -> str | None:
    """The address that clients are told; None for the one that the tracker sees."""
    return serving.host if serving.advertised is None and _is_loopback(serving.host) else serving.advertised


def is_own(host: str, port: int, connection: socket.socket, advertised: str | None) -> bool:
    """Returns whether a client may mean this server by an address that it reached.

    Args:
        host: As numbers.
        port: It must be that on which the server listens: where clients are told another one, they do not get here.
        connection: The server's end of the client's connection; its address is the server's.
        advertised: The address that clients are told where networks translate them.
    """
    here, own_port = address_of(connection.getsockname())
    return port == own_port and (host == here or host in _addresses(advertised))


def _addresses(host: str | None) -> set[str]:
    """Every address of a host; none where its name is not known here."""
    if host is None:
        return set()
    try:
        return {address_of(info[4])[0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return set()


def _where(serving: Serving, port: int) -> str:
    """Who reaches the server, in a sentence."""
    if _is_loopback(serving.host):
        return (
            f"Listening at {serving.host}, port {port}: only this machine reaches it, and what comes through SSH "
            "(docs/REMOTE.md); --host 0.0.0.0 lets others connect."
        )
    return (
        f"Listening at {serving.host}, port {port}: OTHER MACHINES REACH IT. Only who knows the secret is let in, and "
        "then runs any code here as this user; what is sent is not encrypted."
    )


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
