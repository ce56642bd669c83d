"""Parts of parallel loops go to whichever thread is free; errors are told; older libraries run as they did."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from harness.compiler.schedules.common.kernel import Argument, prim_func
from harness.compiler.targets import HOST
from harness.compiler.targets.compiling import build_library
from harness.compiler.targets.linking import link
from harness.compiler.targets.parallel import LONG_SECONDS, SOURCE
from harness.core.processes.threads import run_on_tvm_threads
from harness.runtime.loading import HAND_OUT_PARTS, open_library
from harness.runtime.threads import BINDING_VARIABLE, affinity, affinity_mask
from perf.launching import LAUNCH, PART, VARIABLE, Loop, launched_by, on_threads
from perf.scaling import launch_nanoseconds, parts_of_loop, threads_for

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
        loop = module.get_function("loop", query_imports=True)
        loop(result)  # tells that it is long
        start = time.perf_counter()
        loop(result)
        # All threads share the naps but for a part; TVM's own distribution leaves them to half of the threads.
        assert time.perf_counter() - start < naps / threads + 2 * naps / parts_of_loop(threads) + naps / 10
    assert result.numpy().tolist() == list(range(TASKS))


def quick(result: tirx.Buffer) -> None:
    with T.parallel(0, TASKS) as task:
        T.buffer_store(result, tirx.Cast("float32", task), [task])


def launches(body: Callable[..., None], folder: Path, calls: int) -> Iterator[bool]:
    """Calls a loop, and yields whether threads were asked for, each time; its result is checked."""
    library, result = library_of(body, folder), tensor()
    seen: list[Loop] = []
    module = tvm.runtime.load_module(str(library))
    with on_threads(2) as launch:

        def noted(loop: Loop) -> None:
            seen.append(loop)
            launch(loop)

        with launched_by(library, noted):
            module.get_function(HAND_OUT_PARTS, query_imports=True)()
            loop = module.get_function("loop", query_imports=True)
            for _ in range(calls):
                seen.clear()
                result.copyfrom(np.zeros(TASKS, "float32"))
                loop(result)
                assert result.numpy().tolist() == list(range(TASKS))
                yield bool(seen)


def test_a_loop_of_little_work_runs_on_the_calling_thread(tmp_path: Path) -> None:
    first, *later = launches(quick, tmp_path, 200)
    assert first  # how much work it is was not known
    assert later.count(False) > 0  # unless the call before was disturbed


def test_a_loop_of_much_work_runs_on_all_threads(tmp_path: Path) -> None:
    assert all(launches(sleeping, tmp_path, 3))


WORK = st.one_of(st.integers(0, 10**6), st.integers(0, 10**9))
"""Nanoseconds: short loops, where it is decided, and any."""


@given(WORK, st.sampled_from([1, 2, 3, 4, 12, 16, 64, 96, 128]))
def test_threads_are_doubled_for_as_long_as_that_saves_time(work: int, threads: int) -> None:
    count = threads_for(work, threads)
    taken = {n: work // n + launch_nanoseconds(n) for n in (1, 2, 3, 4, 8, 12, 16, 32, 64, 96, 128) if n <= threads}
    assert 1 <= count <= threads
    assert taken[count] <= min(taken[1], taken[threads])
    assert threads_for(work + 1000, threads) >= count
    assert threads_for(10**9, threads) == threads
    assert threads_for(1000, threads) == 1


@pytest.fixture(scope="module")
def threads_in_c(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], int]:
    """The function `threads_for` of the source that each library brings along."""
    folder = tmp_path_factory.mktemp("parallel")
    exported = "int exported(int64_t work, int threads) { return threads_for(work, threads); }"
    (folder / "source.c").write_text(f'{SOURCE}\n#ifdef __cplusplus\nextern "C"\n#endif\n{exported}\n')
    link(str(folder / "source.so"), [str(folder / "source.c")])
    function = ctypes.CDLL(str(folder / "source.so")).exported
    function.argtypes = (ctypes.c_int64, ctypes.c_int)
    return function


@given(WORK, st.integers(1, 128))
def test_the_model_of_scaling_wakes_the_threads_that_libraries_wake(
    threads_in_c: Callable[[int, int], int], work: int, threads: int
) -> None:
    assert threads_in_c(work, threads) == threads_for(work, threads)


class Launched:
    """A loop of this library's, whose parts are those of a function."""

    def __init__(self, library: Path, part: Callable[[int, int], int]) -> None:
        """`part` gets its number and how many there are, and returns 0 or that it failed."""
        self._part = PART(lambda number, group, _data: part(number, group.contents.num_task))
        self._launch = LAUNCH(ctypes.c_void_p.in_dll(ctypes.CDLL(str(library)), VARIABLE).value)

    def __call__(self) -> int:
        return int(self._launch(ctypes.cast(self._part, ctypes.c_void_p), None, 0))


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 16, 64])
def test_a_loop_that_was_long_has_more_parts_and_each_of_them_once(threads: int, tmp_path: Path) -> None:
    library = library_of(sleeping, tmp_path)
    done: list[tuple[int, int]] = []

    def part(number: int, count: int) -> int:
        done.append((number, count))
        time.sleep(2 * LONG_SECONDS if count == threads else 0)
        return 0

    with handed_out(library, threads):
        loop = Launched(library, part)
        for count in (threads, parts_of_loop(threads)):
            done.clear()
            assert loop() == 0
            assert sorted(done) == [(number, count) for number in range(count)]


@pytest.mark.skipif(affinity() < 2, reason="this process may use one CPU")
@pytest.mark.parametrize("bound", [True, False])
def test_threads_of_a_long_loop_are_bound_to_a_cpu_each_unless_that_is_forbidden(
    bound: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BINDING_VARIABLE, str(int(bound)))
    library, threads, before = library_of(sleeping, tmp_path), affinity(), affinity_mask()
    masks: list[frozenset[int] | None] = []

    def part(number: int, count: int) -> int:
        masks.append(affinity_mask())
        time.sleep(2 * LONG_SECONDS if count == threads else LONG_SECONDS / 8)
        return 0

    with handed_out(library, threads):
        loop = Launched(library, part)
        for _ in range(2):
            masks.clear()
            assert loop() == 0
            assert affinity_mask() == before
    assert len(masks) == parts_of_loop(threads)
    if before is not None and bound:
        assert {frozenset([cpu]) for cpu in before} == set(masks)
    else:
        assert set(masks) == {before}


@pytest.mark.skipif(affinity() < 2, reason="this process may use one CPU")
def test_the_calling_thread_may_go_where_it_could_before_when_a_long_loop_ends(tmp_path: Path) -> None:
    library, result = library_of(sleeping, tmp_path), tensor()

    def masks() -> list[frozenset[int] | None]:
        loop = open_library(library).get_function("loop", query_imports=True)
        found = []
        for _ in range(3):  # the first tells that it is long
            loop(result)
            found.append(affinity_mask())
        return found

    first, *later = run_on_tvm_threads(affinity(), masks)
    assert later == [first, first]
    assert first is None or len(first) == affinity()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_part_that_fails_is_told_and_the_next_loop_works(threads: int, tmp_path: Path) -> None:
    library, failed = library_of(sleeping, tmp_path), -1

    def part(number: int, count: int) -> int:
        time.sleep(2 * LONG_SECONDS if count == threads else 0)
        return failed if number == count - 1 else 0

    with handed_out(library, threads):
        loop = Launched(library, part)
        assert loop() != 0
        assert loop() != 0
        failed = 0
        assert loop() == 0


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
