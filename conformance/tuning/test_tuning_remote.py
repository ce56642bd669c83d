"""Measuring on other machines: a real tracker and real servers, of which some vanish."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import tvm

from conformance.support.remotes import KEY, device, end, free_port, tracker, tvm_server, until
from harness.core.errors import HarnessError
from harness.core.remote import split_address
from harness.execution.remote.tracker import Tracker
from harness.targets.linking import link
from harness.tuning.local import LocalRunner
from harness.tuning.measuring import Program, Rounds, RunError, Step
from harness.tuning.remote import RemoteRunner

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


def test_several_servers_measure_at_the_same_time_what_this_machine_measures(array: Path, twice: Program) -> None:
    local = LocalRunner()
    expected = local.run([twice], [array], ROUNDS)[0]
    local.close()
    with tracker() as address, tvm_server(address), tvm_server(address):
        until(lambda: Tracker(address, KEY).workers() == 2)
        runner = RemoteRunner(address, KEY)
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


def test_what_a_vanished_server_was_doing_is_done_elsewhere_until_there_is_none(
    array: Path, twice: Program, slow: Program
) -> None:
    with tracker() as address, tvm_server(address) as one, tvm_server(address) as other:
        until(lambda: Tracker(address, KEY).workers() == 2)
        idle = {server.pid: len(_children(server.pid)) for server in (one, other)}
        runner = RemoteRunner(address, KEY, wait=20)

        def at_work() -> list[subprocess.Popen[str]]:
            return [server for server in (one, other) if len(_children(server.pid)) > idle[server.pid]]

        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(runner.run, [slow], [array], Rounds(1, 0.0))
            until(lambda: bool(at_work()))
            (first,) = at_work()
            end(first)
            assert running.result(timeout=300)[0].seconds[0] > 0
        end(one)
        end(other)
        until(lambda: Tracker(address, KEY).workers() == 0)
        runner.close()
        with pytest.raises(HarnessError, match="is left at the tracker"):
            Tracker(address, KEY).session(5, wait=0.5)
        with pytest.raises(HarnessError, match=r"no server with key 'a-machine' .* there are no servers at all"):
            RemoteRunner(address, KEY)


def _children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def test_a_program_that_hangs_or_fails_is_named_and_the_server_is_used_again(
    array: Path, twice: Program, slow: Program, tmp_path: Path
) -> None:
    with tracker() as address, device(address, tmp_path):
        runner = RemoteRunner(address, KEY, seconds=6)
        with pytest.raises(RunError, match="not done after 6 s"):
            runner.run([slow], [array], Rounds(30, 0.0))
        missing = Program(twice.library, (), (Step("missing", (0,), SHAPE, "float32"),), 1)
        with pytest.raises(RunError, match="missing"):
            runner.run([missing], [array], ROUNDS)
        assert runner.run([twice], [array], ROUNDS)[0].seconds
        with pytest.raises(HarnessError, match=r"no server with key 'another' .* the keys there are a-machine"):
            RemoteRunner(address, "another")
        runner.close()


def test_an_address_without_a_tracker_is_one_sentence() -> None:
    start = time.monotonic()
    with pytest.raises(HarnessError, match=r"no RPC tracker answers at 127\.0\.0\.1:"):
        RemoteRunner(f"127.0.0.1:{free_port()}", KEY)
    assert time.monotonic() - start < 30


def test_what_is_no_tracker_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(HarnessError, match="is no RPC tracker"):
            RemoteRunner(f"127.0.0.1:{listening.getsockname()[1]}", KEY)
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
        RemoteRunner("127.0.0.1:9190", "")
