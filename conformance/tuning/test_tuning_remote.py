"""Measuring on other machines: a real tracker and real servers, of which some vanish."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tvm

from conformance.support.remotes import KEY, Served, device, end, free_port, new_remote, tracker, until
from harness.core.errors import HarnessError
from harness.core.remote import Remote, chosen_remote, split_address
from harness.execution.remote.tracker import Tracker
from harness.targets.linking import link
from harness.tuning.local import LocalRunner
from harness.tuning.measuring import Program, Rounds, RunError, Step
from harness.tuning.remote import RemoteRunner, new_session

ROUNDS = Rounds(2, 0.001)
SHAPE = (64, 48)


def built(folder: Path, name: str, body: str) -> Program:
    """A library with one function of a matrix, written in TVMScript, as a program."""
    source = f"""
@T.prim_func(s_tir=True)
def main(a: T.Buffer({SHAPE}, "float32"), b: T.Buffer({SHAPE}, "float32")):
    T.func_attr({{"global_symbol": "main", "tirx.noalias": True}})
    for i, j in T.grid({SHAPE[0]}, {SHAPE[1]}):
        with T.sblock("b"):
            v, w = T.axis.remap("SS", [i, j])
            {body}
"""
    function = tvm.script.from_source(source)
    library = folder / f"{name}.so"
    module = tvm.IRModule({"main": function})
    tvm.tirx.build(module, tvm.target.Target("llvm")).export_library(str(library), fcompile=link)
    return Program(library, (), (Step("main", (0,), SHAPE, "float32"),), 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("remote")


@pytest.fixture(scope="module")
def array(folder: Path) -> Path:
    path = folder / "a.npy"
    np.save(path, np.random.default_rng(0).standard_normal(SHAPE, np.float32))
    return path


@pytest.fixture(scope="module")
def twice(folder: Path) -> Program:
    return built(folder, "twice", "b[v, w] = a[v, w] * T.float32(2)")


@pytest.fixture(scope="module")
def slow(folder: Path) -> Program:
    """About a second of work."""
    loop = "for k in range(40000):\n                b[v, w] = T.sqrt(b[v, w] * b[v, w] + T.float32(1))"
    return built(folder, "slow", f"b[v, w] = a[v, w]\n            {loop}")


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[Remote]:
    """Two of them, which share a secret."""
    with tracker() as address:
        remote = new_remote(address, folder)
        with device(remote, folder / "one"), device(remote, folder / "other"):
            yield remote


def test_several_servers_measure_at_the_same_time_what_this_machine_measures(
    array: Path, twice: Program, servers: Remote
) -> None:
    local = LocalRunner()
    expected = local.run([twice], [array], ROUNDS)[0]
    local.close()
    runner = RemoteRunner(servers)
    assert runner.workers == 2
    with ThreadPoolExecutor(2) as threads:
        runs = list(threads.map(lambda _: runner.run([twice, twice], [array], ROUNDS), range(4)))
    runner.close()
    for run in runs:
        assert len(run) == 2
        for ran in run:
            assert len(ran.seconds) == ROUNDS.count
            assert all(seconds > 0 for seconds in ran.seconds)
            np.testing.assert_array_equal(ran.result, expected.result)


def test_a_program_that_hangs_or_fails_is_named_and_the_server_is_used_again(
    array: Path, twice: Program, slow: Program, servers: Remote
) -> None:
    runner = RemoteRunner(servers, seconds=6)
    with pytest.raises(RunError, match="not done after 6 s"):
        runner.run([slow], [array], Rounds(30, 0.0))
    missing = Program(twice.library, (), (Step("missing", (0,), SHAPE, "float32"),), 1)
    with pytest.raises(RunError, match="missing"):
        runner.run([missing], [array], ROUNDS)
    assert runner.run([twice], [array], ROUNDS)[0].seconds
    with pytest.raises(HarnessError, match=rf"no server with key 'another' .* the keys there are {KEY}"):
        RemoteRunner(dataclasses.replace(servers, key="another"))
    runner.close()


def test_what_a_vanished_server_was_doing_is_done_elsewhere_until_there_is_none(
    array: Path, slow: Program, servers: Remote, tmp_path: Path
) -> None:
    remote = dataclasses.replace(servers, key="vanishing")
    with device(remote, tmp_path / "one") as one, device(remote, tmp_path / "other") as other:
        runner = RemoteRunner(remote, wait=20)

        def at_work() -> list[Served]:
            return [server for server in (one, other) if server.is_busy()]

        until(lambda: not at_work())
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(runner.run, [slow], [array], Rounds(1, 0.0))
            until(lambda: bool(at_work()))
            (first,) = at_work()
            end(first.process)
            assert running.result(timeout=300)[0].seconds[0] > 0
        end(one.process)
        end(other.process)
        until(lambda: Tracker(remote.address, remote.key).workers() == 0)
        runner.close()
        with pytest.raises(HarnessError, match="is left at the tracker"):
            new_session(remote, 5, wait=0.5)
        with pytest.raises(HarnessError, match="no server with key 'vanishing'"):
            RemoteRunner(remote)


def test_an_address_without_a_tracker_is_one_sentence(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(HarnessError, match=r"no RPC tracker answers at 127\.0\.0\.1:"):
        RemoteRunner(new_remote(f"127.0.0.1:{free_port()}", tmp_path))
    assert time.monotonic() - start < 30


def test_what_is_no_tracker_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(HarnessError, match="is no RPC tracker"):
            RemoteRunner(new_remote(f"127.0.0.1:{listening.getsockname()[1]}", tmp_path))
        thread.join()


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":1", "host:0", "host:65536", "host:-1", "host:1.5", "host:²"]
)
def test_what_is_no_address_is_one_sentence(address: str) -> None:
    with pytest.raises(HarnessError, match="not an address"):
        split_address(address)


def test_addresses() -> None:
    assert split_address("host.name:9190") == ("host.name", 9190)
    assert split_address("[::1]:9190") == ("::1", 9190)


def test_a_key_must_be_given() -> None:
    with pytest.raises(HarnessError, match="needs --key"):
        chosen_remote("127.0.0.1:9190", "")
