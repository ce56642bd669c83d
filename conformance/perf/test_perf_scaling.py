"""The model of scaling keeps the laws of scheduling, and the clock's parts are those of the loops."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm.script.ir_builder import tirx as T

from harness.compiler.schedules.common.kernel import Argument, fp32, prim_func
from harness.compiler.targets import HOST
from harness.runtime.artifact import Tensors
from perf.entry_points import Recorder
from perf.parts import measured_program
from perf.scaling import (
    CUTS,
    THREADS,
    Call,
    Machine,
    Program,
    dynamic_seconds,
    parts_of_loop,
    shared_seconds,
    static_seconds,
    together,
)

TASKS = st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=200)
COUNTS = st.integers(1, 130)
NEARLY = 1 + 1e-9


def parts(tasks: list[float], count: int) -> list[float]:
    """Tasks put together as TVM cuts a loop: ⌈tasks / count⌉ that follow each other."""
    step = -(-len(tasks) // count)
    return [sum(tasks[number * step : (number + 1) * step]) for number in range(count)]


def program(*loops: list[float], serial: float = 0.0, moved: int = 0) -> Program:
    cut = tuple({count: parts(tasks, count) for count in CUTS} for tasks in loops)
    return Program((Call("kernel", serial, cut, moved),))


@given(TASKS, COUNTS)
def test_no_distribution_is_faster_than_the_work_and_the_longest_task_allow(tasks: list[float], count: int) -> None:
    least = max(sum(tasks) / count, max(tasks))
    assert least <= static_seconds(parts(tasks, count)) * NEARLY
    assert least <= dynamic_seconds(tasks, count) * NEARLY
    assert static_seconds(parts(tasks, count)) <= sum(tasks) * NEARLY


@given(TASKS, COUNTS)
def test_dynamic_distribution_loses_a_task_at_most(tasks: list[float], count: int) -> None:
    """Graham's bound, 1966: the work in equal parts, and one task; so it is never a task behind static distribution."""
    dynamic = dynamic_seconds(tasks, count)
    assert dynamic <= (sum(tasks) / count + max(tasks)) * NEARLY
    assert dynamic <= (static_seconds(parts(tasks, count)) + max(tasks)) * NEARLY


@given(st.floats(1e-6, 1.0), st.integers(1, 300), COUNTS)
def test_equal_tasks_take_as_many_turns_as_the_fullest_thread(seconds: float, number: int, count: int) -> None:
    turns = -(-number // count)
    for found in (static_seconds(parts([seconds] * number, count)), dynamic_seconds([seconds] * number, count)):
        assert abs(found - turns * seconds) <= 1e-9 * found


@given(st.lists(TASKS, min_size=1, max_size=4), st.floats(0.0, 1.0), st.integers(0, 10**10))
def test_speedups_are_what_is_serial_and_the_threads_allow(loops: list[list[float]], serial: float, moved: int) -> None:
    machine = Machine(20e9)
    found = program(*loops, serial=serial, moved=moved)
    for threads in THREADS:
        assert found.speedup(threads, machine) <= threads * NEARLY
        total = found.seconds(1, machine)
        assert found.seconds(threads, machine) >= min(serial, total) / NEARLY
    # Amdahl's law
    computing = program(*loops, serial=serial)
    work = sum(map(sum, loops))
    for threads in THREADS:
        assert computing.seconds(threads, machine) >= (serial + work / threads) / NEARLY


@given(TASKS)
def test_more_cpus_never_make_shared_parts_slower(tasks: list[float]) -> None:
    found = [shared_seconds(tasks, cpus) for cpus in range(1, 20)]
    assert found == sorted(found, reverse=True)
    assert found[0] <= sum(tasks) * NEARLY and found[-1] >= max(tasks)


def test_memory_limits_what_computes_little() -> None:
    machine = Machine(least=20e9, per_core=5e9)
    found = program([0.001] * 128, moved=10**9)
    assert 10**9 / (64 * 5e9) <= found.seconds(64, machine) < 10**9 / (64 * 5e9) + 1e-4
    assert found.seconds(1, machine) == sum([0.001] * 128)
    assert program([0.001] * 128).speedup(64, machine) > 60


def test_programs_add_up() -> None:
    machine = Machine(20e9)
    one, other = program([0.1] * 16, serial=0.2), program([0.3] * 5)
    both = together((one, other))
    for threads in THREADS:
        assert (
            abs(both.seconds(threads, machine) - one.seconds(threads, machine) - other.seconds(threads, machine)) < 1e-9
        )
    assert both.by_function()["kernel"].busy(1) == both.busy(1)
    assert set(CUTS) >= {parts_of_loop(threads) for threads in THREADS}


def test_calls_of_entry_points_are_noted_in_order_and_made_again() -> None:
    made: list[Tensors] = []

    def call(entry: str, **inputs: Any) -> Tensors:
        made.append({"entry": entry, **inputs})
        return {"sum": inputs["x"] + 1}

    artifact: Any = SimpleNamespace(folder=Path(), manifest=None, call=call, fetch=lambda tensor: tensor)
    recorder = Recorder(artifact)
    assert recorder.call("encode", x=1) == {"sum": 2}
    recorder.call("ground", x=5)
    assert [noted.entry for noted in recorder.calls] == ["encode", "ground"]
    assert recorder.calls[1].run() == {"sum": 6}
    assert made == [{"entry": "encode", "x": 1}, {"entry": "ground", "x": 5}, {"entry": "ground", "x": 5}]
    assert len(recorder.calls) == 2


def test_a_kernel_that_is_a_program_of_its_own_is_measured_part_by_part(tmp_path: Path) -> None:
    """The virtual machine tells of what a function calls, and not of a function that is one kernel."""

    def body(result: tvm.tirx.Buffer) -> None:
        with T.parallel(0, 64) as i, T.serial(0, 20000) as j:
            T.buffer_store(result, result[i, j] + fp32(1.0), [i, j])

    function = prim_func("filling", [Argument("result", (64, 20000))], body).with_attr("global_symbol", "filling")
    library = tmp_path / "kernel.so"
    tvm.compile(tvm.IRModule({"filling": function}), HOST.tvm_target()).export_library(str(library))
    filling = tvm.runtime.load_module(str(library))["filling"]
    result = tvm.runtime.tensor(np.zeros((64, 20000), np.float32))
    machine: Any = {"set_instrument": lambda _: None}
    program = measured_program(library, machine, lambda: filling(result), 1, "filling")
    (call,) = program.calls
    assert call.name == "filling" and len(call.loops) == 1
    assert {cut: len(parts) for cut, parts in call.loops[0].items()} == {cut: cut for cut in CUTS}
    assert program.busy(64) > 0 and sum(call.loops[0][128][64:]) < sum(call.loops[0][128][:64])
    assert set(result.numpy().ravel()) == {len(CUTS)}
