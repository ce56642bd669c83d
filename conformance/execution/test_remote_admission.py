"""Who may connect: clients that prove themselves, and all the others, which get nothing and delay nobody."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st

from conformance.support.examples import examples
from conformance.support.remotes import KEY, Served, device, free_port, new_remote, tracker, until
from harness.core.errors import HarnessError
from harness.core.remote import Remote
from harness.execution.remote.client import DeviceSession, registered
from harness.execution.remote.description import INFO, PROTOCOL
from harness.execution.remote.entering import begun, require_proof
from harness.execution.remote.handshake import LONGEST_BYTES, SECONDS, Granted, RefusedError, TakenError, admit, enter
from harness.execution.remote.secret import VARIABLE, Secret, make_secret, read_secret
from harness.execution.remote.server import is_own
from harness.execution.remote.tracker import Tracker, connected
from harness.execution.remote.wire import MAGIC, Code, receive, receive_json, receive_number, send_json, send_number

HERE = "127.0.0.1"
WORDS = "a secret that is long enough to be one"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("admission")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with tracker() as address:
        yield address


@pytest.fixture(scope="module")
def remote(address: str, folder: Path) -> Remote:
    return new_remote(address, folder)


@pytest.fixture(scope="module")
def served(remote: Remote, folder: Path) -> Iterator[Served]:
    """A server that is given its secret in the variable, and neither host nor advertised address."""
    secret = remote.secret_file
    assert secret is not None
    options = dataclasses.replace(remote, secret_file=None)
    with device(options, folder / "store", **{VARIABLE: secret.read_text()}) as served:
        yield served


@pytest.fixture
def another(remote: Remote, tmp_path: Path) -> Remote:
    """The same devices for a user who has another secret."""
    return new_remote(remote.address, tmp_path)


def connection(served: Served, *sent: bytes) -> socket.socket:
    made = socket.create_connection((HERE, served.port), 30)
    for part in sent:
        made.sendall(part)
    return made


def refusals(served: Served, why: str) -> int:
    return sum(line.startswith(f"Refused {HERE}, port ") and why in line for line in served.printed().splitlines())


def test_it_listens_where_no_other_machine_reaches_it_and_says_so(served: Served) -> None:
    listening = [one for one in psutil.Process(served.process.pid).net_connections() if one.status == "LISTEN"]
    assert {one.laddr.ip for one in listening} == {HERE}
    assert f"Listening at {HERE}, port {served.port}: only this machine reaches it" in served.printed()
    assert "OTHER MACHINES" not in served.printed()


def test_who_says_nothing_and_who_guesses_delay_nobody(served: Served, remote: Remote, another: Remote) -> None:
    start = time.monotonic()
    wrong = read_secret(another.secret_file)
    stop, guesses = threading.Event(), 0

    def guess() -> None:
        nonlocal guesses
        while not stop.is_set():
            with pytest.raises((RefusedError, OSError)):  # it may have to make room for others
                require_proof(HERE, served.port, wrong)
            guesses += 1

    guessing = threading.Thread(target=guess)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connection(served)) for _ in range(200)]
        guessing.start()
        try:
            until(lambda: guesses > 20, 30)
            begun = time.monotonic()
            with DeviceSession(remote) as session:
                assert session.description.threads
            taken = time.monotonic() - begun
            # Those that are silent are sent away, whether or not anybody is there to be served.
            for one in silent:
                one.settimeout(SECONDS + 30)
                while one.recv(LONGEST_BYTES):
                    pass
        finally:
            stop.set()
            guessing.join()
    assert taken < SECONDS, f"a client waited {taken:.1f} s for those who do not prove themselves"
    assert time.monotonic() - start < 10 * SECONDS
    until(lambda: refusals(served, "it does not know the secret") >= guesses // 2, 30)
    until(lambda: refusals(served, f"it did not prove itself in {SECONDS:g} s") >= 1, 30)


def test_who_sends_byte_after_byte_has_no_more_time(served: Served) -> None:
    start = time.monotonic()
    with connection(served) as slow, contextlib.suppress(OSError):
        slow.sendall(LONGEST_BYTES.to_bytes(4, "little"))
        while time.monotonic() < start + 60:
            slow.sendall(b" ")
            time.sleep(0.2)
    assert time.monotonic() - start < SECONDS + 10


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "it speaks another protocol"),
        ((LONGEST_BYTES + 1).to_bytes(4, "little"), "it speaks another protocol"),
        ((2).to_bytes(4, "little") + b"[]", "it speaks another protocol"),
        ((2).to_bytes(4, "little") + b"{}", "it speaks another protocol"),
        ((1000).to_bytes(4, "little") + b"[" * 1000, "it speaks another protocol"),
        (b"", "the connection ended"),
    ],
    ids=["http", "long", "list", "nothing", "nested", "left"],
)
def test_who_speaks_another_protocol_is_refused_in_a_line(served: Served, sent: bytes, why: str) -> None:
    before = refusals(served, why)
    with connection(served, sent) as one:
        if not sent:
            one.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while one.recv(LONGEST_BYTES):
                pass
    until(lambda: refusals(served, why) == before + 1, 30)


def test_tvms_own_client_is_refused(served: Served, remote: Remote) -> None:
    why = "it speaks TVM's protocol without knowing the secret"
    process, before = served.session(), refusals(served, why)
    with pytest.raises(Exception, match="not TVM RPC server"):
        tvm.rpc.connect(HERE, served.port, "any")
    until(lambda: refusals(served, why) == before + 1, 30)
    assert served.session() == process  # nothing was given to it


def test_who_is_refused_may_finish_what_it_says(served: Served) -> None:
    """TVM's client sends its key in parts, and reads what it was told only then."""
    why = "it speaks TVM's protocol without knowing the secret"
    before = refusals(served, why)
    with connection(served, MAGIC.to_bytes(4, "little")) as client:
        until(lambda: refusals(served, why) == before + 1, 30)
        for part in (b"client:", b"any"):
            client.sendall(part)
            time.sleep(0.2)
        assert b"nonce" in client.recv(LONGEST_BYTES)


def test_one_promise_is_for_one_client(served: Served, remote: Remote) -> None:
    secret = read_secret(remote.secret_file)
    with pytest.raises(TakenError):
        begun(HERE, served.port, "what the tracker never promised", secret, tvm.rpc.connect)
    until(lambda: refusals(served, "the session that it was promised is another client's") == 1, 30)
    # Who proves itself and does not go on as it was granted, here because another process took its place.
    host, port, session = Tracker(remote.address, KEY).request(60)
    with pytest.raises(Exception, match="cannot find server that matches"):
        begun(host, port, session, secret, lambda host, port, _: tvm.rpc.connect(host, port, "0" * 64))
    until(lambda: refusals(served, "it proved itself and then wanted another session") == 1, 30)
    with DeviceSession(remote) as session_there:
        assert session_there.description.threads


def test_a_session_takes_its_own_connection_beside_another_from_the_same_port(served: Served, remote: Remote) -> None:
    """What Linux does by itself where a process has many connections: ports are told apart by where they lead."""
    host, port, promised = Tracker(remote.address, KEY).request(60)
    with socket.create_server((HERE, 0)) as elsewhere, socket.socket() as other, socket.socket() as client:
        for one in (other, client):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((HERE, 0))
        client.bind(other.getsockname())
        other.connect(elsewhere.getsockname())

        def connect(host: str, port: int, ticket: str) -> socket.socket:
            key = f"client:{ticket}".encode()
            client.connect((host, port))
            send_number(client, MAGIC)
            send_number(client, len(key))
            client.sendall(key)
            deadline = time.monotonic() + SECONDS
            assert receive_number(client, deadline) == MAGIC
            receive(client, receive_number(client, deadline), deadline)
            return client

        assert begun(host, port, promised, read_secret(remote.secret_file), connect) is client
        assert other.getpeername() == elsewhere.getsockname()
        assert client.getpeername() == (host, port)


def command(home: Path, *arguments: str) -> str:
    """The sentence with which a command ends, of a user with this home."""
    own = {"HOME": str(home), "XDG_CONFIG_HOME": str(home / "config"), "COLUMNS": "200"}
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | own
    done = subprocess.run(
        [sys.executable, "-m", "harness", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "rror: " in line]
    return line


def test_without_the_right_secret_each_command_ends_with_one_sentence(
    served: Served, remote: Remote, another: Remote, tmp_path: Path
) -> None:
    verify = ("verify", "--component", "box_head", "--report", str(tmp_path / "report"))
    tune = ("tune", "--component", "box_head", "--db", str(tmp_path / "db"), "--trials", "1")
    wrong = f"has another secret than the one in {another.secret_file}: copy the device's"
    assert wrong in command(tmp_path, *verify, *another.flags)
    assert wrong in command(tmp_path, *tune, *another.flags)
    none = command(tmp_path, *verify, "--remote", remote.address, "--key", KEY)
    assert "there is no secret to share with devices" in none
    assert str(tmp_path / "config" / "sam3-tvm" / "device-secret") in none or sys.platform == "darwin"
    readable = tmp_path / "readable"
    readable.write_text(WORDS)
    readable.chmod(0o644)
    serve = ("serve-device", "--tracker", remote.address, "--key", "other", "--secret-file", str(readable))
    assert f"(its mode is 644): chmod 600 {readable}" in command(tmp_path, *serve)


def registered_as(address: str, key: str, port: int, answer: Callable[[socket.socket], None]) -> contextlib.ExitStack:
    """A server at a port that is registered and offers a session; `answer` gets each connection."""
    stack = contextlib.ExitStack()
    listener = stack.enter_context(socket.create_server((HERE, port)))
    to_tracker = stack.enter_context(connected(address))
    own = {"key": f"server:{key}", "addr": (HERE, port), INFO: {"protocol": PROTOCOL}}
    for message in ([Code.UPDATE_INFO, own], [Code.PUT, key, (port, f"{key}:1"), HERE]):
        send_json(to_tracker, message)
        receive_json(to_tracker)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                taken, _ = listener.accept()
                with taken:
                    answer(taken)

    threading.Thread(target=serve, daemon=True).start()
    return stack


def test_an_impostor_gets_nothing_but_a_proof_that_it_cannot_use(remote: Remote, served: Served) -> None:
    heard: list[dict[str, object]] = []

    def pretend(client: socket.socket) -> None:
        client.settimeout(30)
        send_json(client, {"sam3_tvm": PROTOCOL, "nonce": "0" * 64})
        heard.append(receive_json(client))
        send_json(client, {"proof": "0" * 64})
        with contextlib.suppress(OSError):
            heard.append(receive_json(client))

    key = "impostor"
    pretended = dataclasses.replace(remote, key=key)
    with registered_as(remote.address, key, free_port(), pretend):
        for find in (registered, DeviceSession):
            with pytest.raises(RefusedError, match=r"does not prove that it knows the secret .* nothing was sent"):
                find(pretended)
    assert [sorted(said) for said in heard] == [["host", "nonce", "port", "proof", "session"]] * 2


def test_an_impostor_that_passes_everything_on_is_found_out(remote: Remote, served: Served) -> None:
    def pass_on(client: socket.socket) -> None:
        with connection(served) as genuine:
            client.settimeout(30)
            for source, sink in ((genuine, client), (client, genuine), (genuine, client)):
                send_json(sink, receive_json(source))

    key = "between"
    with (
        registered_as(remote.address, key, free_port(), pass_on),
        pytest.raises(RefusedError, match="is not its address"),
    ):
        registered(dataclasses.replace(remote, key=key))
    until(lambda: refusals(served, "which is not here: somebody passes connections on") == 1, 30)


def test_a_session_leaves_no_file_open(remote: Remote, served: Served) -> None:
    def opened() -> int:
        gc.collect()
        return len(list(Path("/dev/fd").iterdir()))

    before = opened()
    with DeviceSession(remote) as session:
        assert session.description.threads
    del session
    assert opened() == before


def test_a_servers_own_address_is_where_it_was_reached_or_what_it_advertises() -> None:
    with socket.create_server((HERE, 0)) as listener, socket.create_connection(listener.getsockname()):
        reached, _ = listener.accept()
        port = listener.getsockname()[1]
        translated = "192.0.2.7"  # for documentation (RFC 5737)
        with reached:
            assert is_own(HERE, port, reached, None)
            assert not is_own(HERE, port + 1, reached, None)
            assert not is_own(translated, port, reached, None)
            assert is_own(translated, port, reached, translated)
            assert not is_own(translated, port + 1, reached, translated)
            assert not is_own(translated, port, reached, "no.such.host.invalid")


def test_the_secret_is_nowhere_to_be_seen(served: Served, remote: Remote) -> None:
    assert remote.secret_file is not None
    secret = remote.secret_file.read_text().strip()
    with DeviceSession(remote) as session:
        assert session.description.threads
        process = served.session()
        shown = " ".join([*psutil.Process(served.process.pid).cmdline(), *process.cmdline()])
        assert VARIABLE not in process.environ()
        assert secret not in process.environ().values()
    assert secret not in shown
    assert secret not in served.printed()
    assert f"Clients need the secret in {VARIABLE}." in served.printed()
    assert secret not in repr(read_secret(remote.secret_file)) + str(remote) + " ".join(remote.flags)


def both_ends(server: bytes, client: bytes, session: str) -> list[object]:
    """What a server and a client make of each other."""
    deadline = time.monotonic() + 60
    ends: list[object] = []

    def admitting(far: socket.socket) -> None:
        try:
            ends.append(admit(far, Secret("there", server), lambda *_: True, lambda name: name == session, deadline))
        except HarnessError as error:
            ends.append(error)

    with socket.create_server((HERE, 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        thread = threading.Thread(target=admitting, args=(far,))
        thread.start()
        try:
            other: object = enter(near, Secret("here", client), session, deadline)
        except HarnessError as error:
            other = error
        thread.join()
    return [*ends, other]


WRITTEN = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1)


@examples(25)
@given(server=WRITTEN, client=WRITTEN, same=st.booleans(), session=st.text(max_size=20))
def test_both_are_let_in_if_and_only_if_they_have_the_same_secret(
    server: str, client: str, same: bool, session: str
) -> None:
    client = server if same else client
    there, here = both_ends(server.encode(), client.encode(), session)
    if server == client:
        assert isinstance(here, Granted)
        assert there == here
        assert here.session == session
    else:
        assert isinstance(there, RefusedError)
        assert isinstance(here, RefusedError)


def test_a_secret_is_made_once_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    file = tmp_path / "new" / "secret"
    assert make_secret(file) == file
    made = file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(bytes.fromhex(made)) == 32
    assert make_secret(file) is None
    assert file.read_text() == made
    assert list(file.parent.iterdir()) == [file]
    make_secret(tmp_path / "other")
    assert (tmp_path / "other").read_text() != made
    assert read_secret(file) == Secret(str(file), made.strip().encode())


def test_the_option_wins_over_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"{WORDS}\n")
    assert read_secret(None) == Secret(VARIABLE, WORDS.encode())
    file = tmp_path / "secret"
    make_secret(file)
    assert read_secret(file).source == str(file)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    make_secret(file)
    file.chmod(mode)
    with pytest.raises(HarnessError, match=f"its mode is {mode:03o}") as error:
        read_secret(file)
    assert file.read_text().strip() not in str(error.value)


def test_a_secret_that_can_be_guessed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "letmein")
    with pytest.raises(HarnessError, match=f"{VARIABLE} has 7 characters, and 32 are needed") as error:
        read_secret(None)
    assert "letmein" not in str(error.value)
    with pytest.raises(HarnessError, match="cannot be read"):
        read_secret(tmp_path)
