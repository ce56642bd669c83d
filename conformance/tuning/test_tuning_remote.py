"""Measuring on a device, a real one on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import tvm

from conformance.support.remotes import device, end
from harness.core.errors import HarnessError
from harness.core.remote import Remote
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


@pytest.fixture(scope="module")
def remote(folder: Path) -> Iterator[Remote]:
    with device(folder / "store") as served:
        yield served.remote


def test_a_device_measures_what_this_machine_measures(array: Path, twice: Program, remote: Remote) -> None:
    with closing(LocalRunner()) as local, closing(RemoteRunner(remote)) as runner:
        expected = local.run([twice], [array], ROUNDS)[0]
        for _ in range(2):
            measured = runner.run([twice, twice], [array], ROUNDS)
            assert len(measured) == 2
            for ran in measured:
                assert len(ran.seconds) == ROUNDS.count
                assert all(seconds > 0 for seconds in ran.seconds)
                np.testing.assert_array_equal(ran.result, expected.result)


def test_a_program_that_hangs_or_fails_is_named_and_the_device_is_used_again(
    array: Path, twice: Program, slow: Program, remote: Remote
) -> None:
    with closing(RemoteRunner(remote, seconds=6)) as runner:
        with pytest.raises(RunError, match="not done after 6 s"):
            runner.run([slow], [array], Rounds(30, 0.0))
        missing = Program(twice.library, (), (Step("missing", (0,), SHAPE, "float32"),), 1)
        with pytest.raises(RunError, match="missing"):
            runner.run([missing], [array], ROUNDS)
        assert runner.run([twice], [array], ROUNDS)[0].seconds


def test_a_device_that_is_gone_is_one_sentence(array: Path, twice: Program, tmp_path: Path) -> None:
    with device(tmp_path / "store") as served, closing(RemoteRunner(served.remote, wait=1)) as runner:
        end(served.process)
        with pytest.raises(HarnessError, match="no device answers at"):
            runner.run([twice], [array], ROUNDS)
