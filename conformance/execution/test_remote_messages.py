"""What trackers and devices answer is not trusted: whatever it is, there is a sentence, and no traceback."""

from __future__ import annotations

import copy
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest

from harness.core.errors import HarnessError
from harness.core.remote import Remote
from harness.execution.remote.client import registered
from harness.execution.remote.description import INFO, PROTOCOL, Description
from harness.execution.remote.handshake import RefusedError, TakenError, enter
from harness.execution.remote.secret import VARIABLE, Secret
from harness.execution.remote.tracker import Tracker
from harness.execution.remote.wire import MAGIC, TRACKER_MAGIC, Code

HERE, KEY, SEEDS, DRAWN = "127.0.0.1", "k", range(10), 40
DESCRIPTION = json.loads(
    Description("n", "c", "Linux", "x86_64", "haswell", "", 1, None, {}, {"llvm": "c"}, {"apache-tvm": None}).to_json()
)
SERVER = {"key": f"server:{KEY}", "addr": [HERE, 1], INFO: DESCRIPTION}
SUMMARY = [Code.SUCCESS, {"server_info": [SERVER]}]
REQUEST = [Code.SUCCESS, [HERE, 1, f"{KEY}:00"]]
HELLO = {"sam3_tvm": PROTOCOL, "nonce": "00", "proof": "00"}
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 1 << 16, 1 << 70, 0.5, float("nan"), "", "x", "\ud800", "\0", "a..b", "é" * 70, "a" * 2000),
    *([], {}, [[]], [None], {"": None}, [HERE], [HERE, 1, 2], [HERE, "x"], [None, 1]),
)


def mutated(value: Any, rng: random.Random) -> Any:
    """The value with something odd in one place, or with one place missing."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return copy.deepcopy(rng.choice(ODD))
    result = copy.copy(value)
    place = rng.choice(list(result) if isinstance(result, dict) else range(len(result)))
    if rng.random() < 0.15:
        del result[place]
    else:
        result[place] = mutated(result[place], rng)
    return result


def sent(text: bytes) -> bytes:
    return struct.pack("<i", len(text)) + text


def encoded(message: Any, rng: random.Random) -> bytes:
    """The message as it is sent, sometimes damaged."""
    text = bytearray(json.dumps(message).encode())
    size, chance = len(text), rng.random()
    if chance < 0.1:
        text[rng.randrange(size)] = rng.randrange(256)
    elif chance < 0.15:
        size = rng.choice([-1, 0, 1, size - 1, size + 1, MAGIC, 1 << 30])
    elif chance < 0.18:
        text = bytearray(b"[" * 10_000 + b"]" * 10_000)
        size = len(text)
    return struct.pack("<i", size) + text


@contextmanager
def answering(greeting: bytes, *answers: bytes) -> Iterator[int]:
    """A server on loopback that answers every connection with these bytes; its port."""
    with socket.create_server((HERE, 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        for answer in (greeting, *answers):
                            connection.sendall(answer)
                        connection.shutdown(socket.SHUT_WR)
                        while connection.recv(1 << 16):
                            pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture
def remote_secret(monkeypatch: pytest.MonkeyPatch) -> Secret:
    words = "a secret that is long enough to be one"
    monkeypatch.setenv(VARIABLE, words)
    return Secret(VARIABLE, words.encode())


@pytest.mark.parametrize("seed", SEEDS)
def test_any_answer_of_a_tracker_is_a_sentence_or_an_answer(remote_secret: Secret, seed: int) -> None:
    rng = random.Random(seed)
    for right in (SUMMARY, REQUEST) * DRAWN:
        with answering(struct.pack("<i", TRACKER_MAGIC), encoded(mutated(right, rng), rng)) as port:
            remote = Remote(f"{HERE}:{port}", KEY)
            tracker = Tracker(remote.address, KEY)
            for ask in (tracker.workers, tracker.require_workers, partial(tracker.request, 1.0)):
                with suppress(HarnessError):
                    ask()
            with pytest.raises(HarnessError):  # nobody listens at port 1
                registered(remote)


@pytest.mark.parametrize("seed", SEEDS)
def test_any_answer_of_a_device_is_a_sentence(remote_secret: Secret, seed: int) -> None:
    rng = random.Random(seed)
    for which in (0, 1) * DRAWN:
        messages = [encoded(mutated(HELLO, rng) if n == which else HELLO, rng) for n in range(2)]
        refused = pytest.raises((RefusedError, TakenError, OSError))
        with answering(*messages) as port, socket.create_connection((HERE, port)) as connection, refused:
            enter(connection, remote_secret, "", time.monotonic() + 5)


def test_a_proof_that_is_no_text_is_refused(remote_secret: Secret) -> None:
    first, second = (sent(json.dumps(message).encode()) for message in (HELLO, HELLO | {"proof": "\ud800"}))
    refused = pytest.raises(RefusedError, match="does not prove")
    with answering(first, second) as port, socket.create_connection((HERE, port)) as connection, refused:
        enter(connection, remote_secret, "", time.monotonic() + 5)
