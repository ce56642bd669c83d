"""Parts of parallel loops go to whichever thread is free; errors are told; older libraries run as they did."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from harness.runtime.loading import HAND_OUT_PARTS, open_library
from harness.schedules.common.kernel import Argument, prim_func
from harness.targets import HOST
from harness.targets.compiling import build_library
from harness.targets.parallel import parts_of_loop
from perf.launching import LAUNCH, PART, VARIABLE, launched_by, on_threads

TASKS = 64
NAP_SECONDS = 0.01


def library_of(body: Callable[..., None], folder: Path) -> Path:
    """A library with a function `loop`, which gets a tensor [TASKS]."""
    function = prim_func("loop", [Argument("result", (TASKS,))], body)
    library = folder / "loop.so"
    build_library(tvm.IRModule({"loop": function.with_attr("global_symbol", "loop")}), HOST.tvm_target(), library)
    return library


def tensor() -> tvm.runtime.Tensor:
    return tvm.runtime.empty((TASKS,), "float32")


def sleeping(result: tirx.Buffer) -> None:
    """The first half of the tasks sleeps, as on a core that another process uses."""
    with T.parallel(0, TASKS) as task:
        with T.If(task < TASKS // 2), T.Then():
            T.evaluate(T.call_extern("int32", "usleep", int(NAP_SECONDS * 1e6)))
        T.buffer_store(result, tirx.Cast("float32", task), [task])


@contextmanager
def handed_out(library: Path, threads: int) -> Iterator[tvm.runtime.Module]:
    """A library that hands out parts to so many threads, however many TVM's pool has."""
    module = tvm.runtime.load_module(str(library))
    with on_threads(threads) as launch, launched_by(library, launch):
        module.get_function(HAND_OUT_PARTS, query_imports=True)()
        yield module


@pytest.mark.parametrize("threads", [2, 3])
def test_a_thread_that_is_free_takes_what_a_late_one_has_not_begun(threads: int, tmp_path: Path) -> None:
    library, result = library_of(sleeping, tmp_path), tensor()
    naps = TASKS // 2 * NAP_SECONDS
    with handed_out(library, threads) as module:
        start = time.perf_counter()
        module.get_function("loop", query_imports=True)(result)
        # All threads share the naps but for a part; TVM's own distribution leaves them to half of the threads.
        assert time.perf_counter() - start < naps / threads + 2 * naps / parts_of_loop(threads) + naps / 10
    assert result.numpy().tolist() == list(range(TASKS))


def launch_of(library: Path, part: Callable[[int, int], int]) -> int:
    """Runs a loop by the function that runs a library's loops; `part` gets its number and how many there are."""
    run = PART(lambda number, group, _data: part(number, group.contents.num_task))
    launch = LAUNCH(ctypes.c_void_p.in_dll(ctypes.CDLL(str(library)), VARIABLE).value)
    return int(launch(ctypes.cast(run, ctypes.c_void_p), None, 0))


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 16, 64])
def test_a_loop_has_so_many_parts_each_of_them_once(threads: int, tmp_path: Path) -> None:
    library, done = library_of(sleeping, tmp_path), []
    with handed_out(library, threads):
        assert launch_of(library, lambda number, count: bool(done.append((number, count)))) == 0
    count = parts_of_loop(threads)
    assert sorted(done) == [(number, count) for number in range(count)]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_part_that_fails_is_told_and_the_next_loop_works(threads: int, tmp_path: Path) -> None:
    library = library_of(sleeping, tmp_path)
    last = parts_of_loop(threads) - 1
    with handed_out(library, threads):
        assert launch_of(library, lambda number, count: -1 if number == last else 0) != 0
        assert launch_of(library, lambda number, count: 0) == 0


def test_a_library_that_is_loaded_twice_hands_out_once(tmp_path: Path) -> None:
    library, result = library_of(sleeping, tmp_path), tensor()
    for _ in range(2):
        open_library(library).get_function("loop", query_imports=True)(result)
    assert result.numpy().tolist() == list(range(TASKS))


def test_a_library_that_hands_out_nothing_is_run_by_tvm(tmp_path: Path) -> None:
    function = prim_func("loop", [Argument("result", (TASKS,))], sleeping).with_attr("global_symbol", "loop")
    library = tmp_path / "old.so"
    tvm.compile(tvm.IRModule({"loop": function}), HOST.tvm_target()).export_library(str(library))
    result = tensor()
    open_library(library)["loop"](result)
    assert result.numpy().tolist() == list(range(TASKS))
