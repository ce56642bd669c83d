"""Memory of compiled functions: values share it only while they may, and a result that is dropped is free at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax, te, tirx
from tvm.relax import op
from tvm.script.ir_builder import tirx as T

from harness.compiler.schedules.common.kernel import Argument, prim_func
from harness.compiler.schedules.common.vm import lower_to_vm
from harness.compiler.schedules.cpu.arena import ALIGNMENT, Result, Value, lay_out
from harness.compiler.schedules.cpu.emit import prefetch
from harness.compiler.schedules.cpu.memory import plan_memory
from harness.compiler.schedules.cpu.pipeline import to_loops
from harness.compiler.targets import TARGETS
from harness.compiler.targets.compiling import compile_module
from harness.runtime.executable import Executable

SIDE = 96
"""Of square matrices: 36 KiB each."""
WIDTHS = (192, 96, 384, 32, 192)

sizes = st.integers(1, 40).map(lambda n: 48 * n)
steps = st.integers(0, 12)
lifetimes = st.builds(lambda size, a, b: Value(size, min(a, b), max(a, b)), sizes, steps, steps)
written = st.builds(Result, sizes, steps)


@pytest.mark.law
@given(st.lists(lifetimes, max_size=12), st.lists(written, max_size=4))
def test_values_alive_together_share_nothing(values: list[Value], results: list[Result]) -> None:
    layout = lay_out(values, results)
    assert len(layout.positions) == len(values)
    placed = list(zip(values, layout.positions, strict=True))
    for value, position in placed:
        assert position.offset % ALIGNMENT == 0
        end = position.offset + value.size
        if position.result is None:
            assert end <= layout.arena
        else:
            assert end <= results[position.result].size
            assert value.last < results[position.result].first
    for (a, at), (b, to) in itertools.combinations(placed, 2):
        if at.result == to.result and max(a.first, b.first) <= min(a.last, b.last):
            assert at.offset + a.size <= to.offset or to.offset + b.size <= at.offset


@pytest.mark.law
@given(st.lists(lifetimes, max_size=12), st.lists(written, max_size=4))
def test_the_arena_is_no_larger_than_all_values(values: list[Value], results: list[Result]) -> None:
    rounded = sum(-(-value.size // ALIGNMENT) * ALIGNMENT for value in values)
    assert lay_out(values, results).arena <= rounded
    together = max((sum(v.size for v in values if v.first <= step <= v.last) for step in range(13)), default=0)
    assert lay_out(values, []).arena >= together


def test_a_value_lies_where_a_later_result_will() -> None:
    assert lay_out([Value(64, 0, 1), Value(128, 0, 2)], [Result(128, 3)]).arena == 64


def test_small_values_lie_beside_each_other_where_a_large_one_was() -> None:
    layout = lay_out([Value(4096, 0, 1), Value(1024, 2, 4), Value(1024, 3, 5), Value(2048, 3, 5)], [])
    assert layout.arena == 4096


def chain(*widths: int) -> tvm.IRModule:
    """x [SIDE, SIDE] → products with matrices over SIDE, of these widths and back; the sum of all, and the last one."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([SIDE, SIDE], "float32"))
    with builder.function("main", [x], attrs={"num_input": 1}):
        with builder.dataflow():
            value, total = x, x
            for width in widths:
                wide = builder.emit(op.matmul(value, relax.const(weight(SIDE, width))))
                value = builder.emit(op.matmul(wide, relax.const(weight(width, SIDE))))
                total = builder.emit(op.add(total, op.reshape(value, (SIDE, SIDE))))
            result = builder.emit_output(relax.Tuple([total, value]))
        builder.emit_func_output(result)
    module: tvm.IRModule = builder.get()
    return module


def weight(rows: int, columns: int) -> np.ndarray:
    generator = np.random.default_rng(rows * columns)
    return generator.standard_normal((rows, columns)).astype(np.float32) / np.float32(np.sqrt(rows))


@pytest.fixture(scope="module")
def executable(tmp_path_factory: pytest.TempPathFactory) -> Executable:
    library = tmp_path_factory.mktemp("library") / "chain.so"
    compile_module(chain(*WIDTHS), TARGETS["llvm"], library)
    return Executable(library, tvm.cpu(), [])


def test_what_lies_at_an_offset_is_computed_there(executable: Executable) -> None:
    for seed in range(3):
        x = np.random.default_rng(seed).standard_normal((SIDE, SIDE)).astype(np.float32)
        value = total = x.astype(np.float64)
        for width in WIDTHS:
            value = value @ weight(SIDE, width) @ weight(width, SIDE)
            total = total + value
        for actual, expected in zip(executable.run([x]), (total, value), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def allocated(planned: tvm.IRModule) -> int:
    """Bytes that `main` allocates."""
    calls = [binding.value for block in planned["main"].body.blocks for binding in block.bindings]
    storages = [call for call in calls if getattr(getattr(call, "op", None), "name", "") == "relax.vm.alloc_storage"]
    return sum(int(call.args[0].values[0]) for call in storages)


def test_less_is_allocated_than_by_the_plan_of_tvm() -> None:
    target = TARGETS["llvm"].tvm_target()
    loops = to_loops(chain(*WIDTHS), target)
    with target:
        ours, theirs = (allocated(lower_to_vm(plan)(loops)) for plan in (plan_memory, None))
    assert 0 < ours < theirs


def addresses(call: Callable[[], list[np.ndarray]]) -> set[int]:
    """Where results lie that are dropped at once."""
    return {array.ctypes.data for array in call()}


def test_results_that_are_dropped_are_free(executable: Executable) -> None:
    x = np.zeros((SIDE, SIDE), np.float32)
    assert addresses(lambda: executable.run([x])) == addresses(lambda: executable.run([x]))


@pytest.mark.xfail(strict=True, reason="TVM's virtual machine holds the last results until it has others")
def test_raw_tvm_drops_results(executable: Executable) -> None:
    x = tvm.runtime.tensor(np.zeros((SIDE, SIDE), np.float32))

    def run() -> list[np.ndarray]:
        return [np.from_dlpack(result) for result in executable._vm["main"](x)]

    assert addresses(run) == addresses(run)


@pytest.mark.xfail(strict=True, raises=ValueError, reason="TVM's compiled functions take no tensor with an offset")
def test_raw_tvm_takes_tensors_with_an_offset() -> None:
    source = te.placeholder((16,), name="source")
    double = tvm.compile(te.create_prim_func([source, te.compute((16,), lambda i: source[i] * 2)]), "llvm")
    result = tvm.runtime.tensor(np.zeros(16, np.float32))
    double(tvm.runtime.tensor(np.arange(32, dtype=np.float32))._create_view([16], "float32", 64), result)
    np.testing.assert_array_equal(result.numpy(), 2 * np.arange(16, 32))


def filled_by_a_function(touch: bool) -> tvm.IRModule:
    """A function that has another one fill a buffer of 32 numbers, and reads two of them."""

    def body(result: tirx.Buffer) -> None:
        buffer = T.alloc_buffer((1, 32), "float32")
        if touch:
            prefetch(buffer[0, 31], write=True)
        T.evaluate(tirx.call_extern("int32", "fill", tirx.address_of(buffer[0, 0])))
        with T.serial(0, 2) as i:
            T.buffer_store(result, buffer[0, i * 16], [i])

    return tvm.IRModule({"main": prim_func("main", [Argument("result", (2,))], body)})


def compacted(module: tvm.IRModule) -> str:
    return str(tvm.s_tir.transform.CompactBufferAllocation()(module)["main"].script())


def test_a_buffer_whose_last_element_is_touched_stays_as_large() -> None:
    """The matrix unit writes more sums than are read."""
    assert "alloc_buffer((1, 32))" in compacted(filled_by_a_function(touch=True))


@pytest.mark.xfail(strict=True, reason="TVM makes a buffer smaller whose address a function got")
def test_raw_tvm_leaves_a_buffer_as_large_whose_address_is_taken() -> None:
    assert "alloc_buffer((1, 32))" in compacted(filled_by_a_function(touch=False))
