"""MetaSchedule's own rules over plain loops: faster, still right, resumed, and never by a wrong or broken record."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tvm import relax

from harness.core.errors import HarnessError
from harness.parity.metrics import difference
from harness.runtime.threads import usable_cpus
from harness.targets.llvm import llvm_target
from harness.tuning.measuring import Program
from harness.tuning.rules_building import build_programs, reference_module, seeded_inputs
from harness.tuning.rules_measuring import LocalMeasurer, fault
from harness.tuning.rules_module import LAYOUT_FREE, RulesTask, extract_tasks, plain_loops, rules_pipeline
from harness.tuning.rules_records import RECORDS, WORKLOADS, open_records, opened_for_tuning, place_folder
from harness.tuning.rules_search import Bench, TaskState, search
from harness.tuning.trials import Place

Array = npt.NDArray[np.float32]

ROWS, DEPTH, COLUMNS = 96, 192, 128
HERE = Place("llvm", "this", usable_cpus(), "0.27")
TARGET = llvm_target()


def linear_layer() -> tvm.IRModule:
    """x·wᵀ + b, as the importer makes it of torch.nn.Linear: weights after the first parameter."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([ROWS, DEPTH], "float32"))
    w = relax.Var("w", relax.TensorType([COLUMNS, DEPTH], "float32"))
    b = relax.Var("b", relax.TensorType([COLUMNS], "float32"))
    with builder.function("main", [x, w, b], {"num_input": 1}):
        with builder.dataflow():
            product = builder.emit(relax.op.matmul(x, builder.emit(relax.op.permute_dims(w))))
            output = builder.emit_output(relax.op.add(product, b))
        builder.emit_func_output(output)
    return builder.get()


def the_task() -> RulesTask:
    (task,) = extract_tasks(plain_loops(linear_layer(), TARGET), TARGET)
    return task


def tune(folder: Path, trials: int, seed: int = 0) -> TaskState:
    measurer = LocalMeasurer()
    try:
        with opened_for_tuning(folder, HERE) as records:
            bench = Bench(TARGET, records, measurer, folder / "scratch", usable_cpus(), seed)
            (state,), interrupted = search([the_task()], bench, lambda done: done < trials, trials=trials)
    finally:
        measurer.close()
    assert not interrupted
    return state


def layer_inputs() -> list[Array]:
    generator = np.random.default_rng(1)
    shapes = ((ROWS, DEPTH), (COLUMNS, DEPTH), (COLUMNS,))
    return [generator.standard_normal(shape, np.float32) / np.float32(4) for shape in shapes]


def compiled(module: tvm.IRModule, records: object, inputs: list[Array]) -> Callable[[], Any]:
    with TARGET, tvm.transform.PassContext(opt_level=3):
        lowered = rules_pipeline(TARGET, records)(module)
        executable = relax.build(lowered, TARGET, relax_pipeline=None)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    x, *weights = [tvm.runtime.tensor(array) for array in inputs]
    transformed = machine["main_transform_params"](weights)
    main = machine["main"]
    return lambda: main(x, *transformed)


def run(module: tvm.IRModule, records: object, inputs: list[Array]) -> Array:
    return np.array(compiled(module, records, inputs)().numpy())


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TaskState]:
    folder = tmp_path_factory.mktemp("rules")
    return folder, tune(folder, 12)


@pytest.fixture
def measurer() -> Iterator[LocalMeasurer]:
    local = LocalMeasurer()
    yield local
    local.close()


def test_a_task_is_named_after_its_shapes_and_leaves_the_layout_of_its_weights_open() -> None:
    task = the_task()
    assert task.name.endswith(f" {ROWS}x{DEPTH} {DEPTH}x{COLUMNS} {COLUMNS} {ROWS}x{COLUMNS}")
    assert task.weight == 1
    assert [int(position) for position in task.module["main"].attrs[LAYOUT_FREE]] == [1]
    assert task.flop == pytest.approx(2 * ROWS * DEPTH * COLUMNS, rel=0.02)
    assert extract_tasks(plain_loops(linear_layer(), TARGET), TARGET, "conv2d") == ()


@pytest.mark.xfail(reason="AttachAttrLayoutFreeBuffers sees only weights that are passed as they come", strict=True)
def test_tvm_leaves_the_layout_of_a_transposed_weight_open() -> None:
    legal = relax.transform.LegalizeOps()(linear_layer())
    marked = relax.transform.AttachAttrLayoutFreeBuffers()(legal)
    product = next(f for v, f in marked.functions.items() if v.name_hint.startswith("matmul"))
    assert [int(position) for position in product.attrs[LAYOUT_FREE]] == [1]


def test_a_short_search_finds_something_faster_than_the_plain_loops(tuned: tuple[Path, TaskState]) -> None:
    folder, state = tuned
    assert (state.trials, state.problem) == (12, "")
    records = open_records(folder, HERE).records
    plain, found = (compiled(linear_layer(), chosen, layer_inputs()) for chosen in (None, records))
    # The fastest of many calls: other tests may share the processors.
    times = [(seconds(plain), seconds(found)) for _ in range(40)]
    assert min(after for _, after in times) < min(before for before, _ in times) / 2


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def test_what_was_found_compiles_and_is_right(tuned: tuple[Path, TaskState]) -> None:
    folder, _ = tuned
    records = open_records(folder, HERE).records
    x, w, b = layer_inputs()
    expected = x.astype(np.float64) @ w.T.astype(np.float64) + b
    for chosen in (None, records):
        np.testing.assert_allclose(run(linear_layer(), chosen, [x, w, b]), expected, rtol=1e-5, atol=1e-5)


def test_a_search_goes_on_from_the_records(tuned: tuple[Path, TaskState]) -> None:
    folder, before = tuned
    known = len(open_records(folder, HERE).of(before.task.module))
    assert known == before.trials
    after = tune(folder, 4)
    assert after.trials == known + 4
    assert after.best <= before.best
    assert len(open_records(folder, HERE).of(before.task.module)) == after.trials


@pytest.fixture
def reference(tmp_path: Path, measurer: LocalMeasurer) -> tuple[Program, list[Path], Path]:
    """The plain loops, their inputs and their result."""
    task = the_task()
    inputs = [tmp_path / f"{n}.npy" for n in range(3)]
    for path, array in zip(inputs, seeded_inputs(task.module, 0), strict=True):
        np.save(path, array)
    (program,) = build_programs([reference_module(task.module)], TARGET, 1)
    assert isinstance(program, Program)
    measurer.reference(program, inputs, tmp_path / "expected.npy", 60)
    return program, inputs, tmp_path / "expected.npy"


def test_a_wrong_result_is_rejected_however_fast(
    reference: tuple[Program, list[Path], Path], measurer: LocalMeasurer
) -> None:
    program, inputs, expected = reference
    (right,) = measurer.measure([program], inputs, expected, math.inf)
    assert right.fault == ""
    assert right.median > 0
    result = np.load(expected)
    result[3, 5] += 1e-3
    np.save(expected, result)
    (wrong,) = measurer.measure([program], inputs, expected, math.inf)
    assert "1 of" in wrong.fault
    assert math.isinf(wrong.median)


def test_a_candidate_that_cannot_run_costs_one_trial(
    reference: tuple[Program, list[Path], Path], measurer: LocalMeasurer, tmp_path: Path
) -> None:
    program, inputs, expected = reference
    library = tmp_path / "broken.so"
    library.write_bytes(b"no library")
    broken = replace(program, library=library)
    failed, right = measurer.measure([broken, program], inputs, expected, math.inf)
    assert failed.failure
    assert math.isinf(failed.median)
    assert right.median > 0


FLOATS = st.floats(-4, 4, width=32)


@given(
    arrays.arrays(np.float32, (7,), elements=FLOATS),
    arrays.arrays(np.float32, (7,), elements=st.floats(-(2**-15), 2**-15, width=32)),
)
def test_the_quick_gate_decides_as_the_strict_gate_does(expected: Array, error: Array) -> None:
    result = expected + error
    assert (fault(result, expected) == "") == (difference(result, expected).outside == 0)


def copied(database: Path, into: Path, *names: str) -> Path:
    """A copy of some files of the records of this place."""
    folder = place_folder(into, HERE)
    folder.mkdir(parents=True)
    for name in names:
        shutil.copyfile(place_folder(database, HERE) / name, folder / name)
    return folder


def test_a_torn_line_is_cut_off_with_a_notice(tuned: tuple[Path, TaskState], tmp_path: Path) -> None:
    copy = copied(tuned[0], tmp_path, WORKLOADS, RECORDS)
    whole = (copy / RECORDS).read_bytes()
    lines = whole.count(b"\n")
    (copy / RECORDS).write_bytes(whole[:-100])
    opened = open_records(tmp_path, HERE)
    assert ["was not written to its end: the last 1 line left out" in notice for notice in opened.notices] == [True]
    assert len(opened.records) == lines - 1
    assert open_records(tmp_path, HERE).notices == ()


def test_records_without_their_function_are_cut_off(tuned: tuple[Path, TaskState], tmp_path: Path) -> None:
    copied(tuned[0], tmp_path, RECORDS)
    opened = open_records(tmp_path, HERE)
    assert len(opened.records) == 0
    assert len(opened.notices) == 1


@pytest.mark.parametrize("line", ["[0, []", "[0]", "[[], []]", "{}"])
def test_damage_in_the_middle_is_one_sentence(line: str, tmp_path: Path) -> None:
    folder = place_folder(tmp_path, HERE)
    folder.mkdir(parents=True)
    (folder / RECORDS).write_text(f"{line}\n[0, []]\n")
    with pytest.raises(HarnessError, match="damaged in line 1"):
        open_records(tmp_path, HERE)


def test_records_of_another_place_are_left_out_with_a_notice(tmp_path: Path) -> None:
    folder = place_folder(tmp_path, Place("llvm", "another", 64, "0.26"))
    folder.mkdir(parents=True)
    (folder / RECORDS).write_text("")
    with opened_for_tuning(tmp_path, HERE) as opened:
        assert len(opened.records) == 0
        (notice,) = opened.notices
        assert "llvm-another-64-threads-tvm-0.26" in notice


def test_two_searches_cannot_write_into_one_folder(tmp_path: Path) -> None:
    with (
        opened_for_tuning(tmp_path, HERE),
        pytest.raises(HarnessError, match="another process is tuning"),
        opened_for_tuning(tmp_path, HERE),
    ):
        pass


def test_a_folder_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "rules").write_text("")
    with pytest.raises(HarnessError, match="choose another folder"), opened_for_tuning(tmp_path, HERE):
        pass
