"""The space of schedules: every one is accepted, computes the same, and has the same key in a model and alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax

from conformance.support.cpus import target_for
from conformance.support.examples import examples
from conformance.support.kernels import RATIO
from conformance.support.operators import EPSILON, rms
from conformance.support.place import executes
from conformance.support.sentences import sentence
from conformance.support.tuning import torch_result
from harness.compiler.schedules import Schedule
from harness.compiler.schedules.cpu import cpu_pipeline
from harness.compiler.schedules.cpu.blocking import Extents
from harness.compiler.schedules.cpu.pipeline import to_loops
from harness.compiler.schedules.cpu.rewrite import workloads
from harness.compiler.schedules.cpu.schedule import (
    RESULT_TILE,
    TILE,
    Attention,
    Convolution,
    Product,
    TransposedConvolution,
    Workload,
    decided,
    distance,
    space,
)
from harness.compiler.schedules.cpu.tile import VectorUnit, vector_unit
from harness.compiler.schedules.cpu.window import Window
from harness.compiler.targets import TARGETS
from harness.compiler.tuned.database import TUNED, open_database
from harness.core.errors import HarnessError
from harness.tuning.kernels import build, build_module, draw_arrays

TARGET = TARGETS["llvm"].tvm_target()
UNIT = vector_unit(TARGET)
UNITS = (VectorUnit(16, 32), VectorUnit(8, 16), VectorUnit(4, 32), VectorUnit(4, 16))


def window(channels: int, filters: int, size: int, kernel: int = 3, padding: int = 1, stride: int = 1) -> Window:
    out = (size + 2 * padding - kernel) // stride + 1
    return Window(
        (1, channels, size, size),
        (1, filters, out, out),
        (kernel, kernel),
        (stride, stride),
        (padding, padding),
        (1, 1),
        1,
    )


WORKLOADS: dict[str, Workload] = {
    "linear": Product(Extents(1, 77, 90, 200), "left"),
    "row": Product(Extents(1, 1, 300, 128), "left"),
    "streams-right": Product(Extents(1, 33, 190, 65), "right"),
    "batched": Product(Extents(6, 51, 29, 65), "left", 6, at_load=False),
    "shared": Product(Extents(6, 29, 51, 65), "right", 1),
    "broadcast": Product(Extents(6, 29, 51, 65), "left", 3, at_load=False),
    "transposed": Product(Extents(4, 40, 30, 64), "left", 4, at_load=False, transposed=True),
    "conv-3x3": Convolution(window(24, 40, 17)),
    "conv-filtered": Convolution(window(35, 45, 13)),
    "conv-strided": Convolution(window(3, 20, 28, 7, 0, 7)),
    "conv-1x1": Convolution(window(70, 33, 12, 1, 0)),
    "conv-activations": Convolution(window(40, 36, 9), at_load=False),
    "conv-transposed": TransposedConvolution((1, 65, 9, 13), (65, 21, 2, 2)),
    "attention": Attention(2, 3, 39, 53, 40, 40),
    "attention-wide": Attention(1, 2, 100, 70, 16, 130),
    "attention-bias": Attention(1, 3, 39, 53, 40, 40, "float32", bias_shape=(1, 3, 39, 53)),
    "attention-mask": Attention(2, 3, 39, 53, 40, 40, "bool", bias_shape=(2, 1, 39, 53)),
    "attention-causal": Attention(2, 3, 32, 32, 40, 40, causal=True),
}


HALF_TARGET = target_for("cooperlake")
HALF = {
    name: replace(workload, dtype="bfloat16")
    for name, workload in {
        **{name: WORKLOADS[name] for name in ("linear", "row", "conv-3x3", "conv-1x1", "conv-activations")},
        "streams-right": Product(Extents(1, 33, 190, 66), "right"),
        "batched": Product(Extents(6, 51, 29, 66), "left", 6, at_load=False),
        "broadcast": Product(Extents(6, 29, 51, 66), "left", 3, at_load=False),
        "transposed": Product(Extents(4, 40, 30, 64), "left", 4, at_load=False, transposed=True),
        "conv-filtered": Convolution(window(36, 45, 13)),
        "conv-transposed": TransposedConvolution((1, 66, 9, 13), (66, 21, 2, 2)),
        **{name: workload for name, workload in WORKLOADS.items() if name.startswith("attention")},
    }.items()
}
"""Workloads that multiply pairs of bfloat16, where an instruction does."""


def computed(workload: Workload, *schedules: Schedule, target: tvm.target.Target = TARGET) -> list[np.ndarray]:
    """What a workload alone computes with each of some schedules."""
    return [build(workload, schedule, str(target))().numpy() for schedule in schedules]


def hold(workload: Workload, *schedules: Schedule) -> None:
    """Holds the schedules to PyTorch: strict gate, and rms error against float64."""
    expected, exact = torch_result(workload), torch_result(workload, exact=True)
    for schedule, actual in zip(schedules, computed(workload, *schedules), strict=True):
        assert np.all(np.abs(actual - expected) <= 1e-5 + 1e-5 * np.abs(expected)), (workload.key, schedule)
        limit = RATIO * max(rms(expected - exact), 4 * EPSILON * rms(exact))
        assert rms(actual - exact) <= limit, (workload.key, schedule)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_a_workload_alone_computes_what_pytorch_computes(workload: Workload) -> None:
    schedules = space(workload, UNIT)
    hold(workload, {}, schedules[len(schedules) // 2], schedules[-1])


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Workload, Schedule]:
    """A product, a convolution or an attention of any size, and one of its schedules."""
    few, many = (st.integers(1, most) for most in (70, 130))
    kind = draw(st.sampled_from(["product", "convolution", "attention"]))
    if kind == "product":
        rows, columns, at_load = draw(many), draw(many), draw(st.booleans())
        # Of two activations the larger one streams.
        streaming = draw(st.sampled_from(["left", "right"])) if at_load else "left" if rows >= columns else "right"
        workload: Workload = Product(Extents(1, rows, columns, draw(st.integers(1, 300))), streaming, at_load=at_load)  # type: ignore[arg-type]
    elif kind == "convolution":
        workload = Convolution(window(draw(few), draw(few), draw(st.integers(4, 20))))
    else:
        channels = draw(few)
        workload = Attention(1, 2, draw(many), draw(many), channels, channels)
    return workload, draw(st.sampled_from(space(workload, UNIT)))


@examples(28)
@given(drawn())
def test_every_schedule_computes_the_same(problem: tuple[Workload, Schedule]) -> None:
    hold(*problem)


@pytest.mark.parametrize("unit", UNITS, ids=str)
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_a_space_is_complete_distinct_and_accepted(workload: Workload, unit: VectorUnit) -> None:
    schedules = space(workload, unit)
    assert schedules[0] == decided(workload, unit, {})
    assert len({tuple(sorted(schedule.items())) for schedule in schedules}) == len(schedules)
    for schedule in schedules:
        assert decided(workload, unit, schedule) == schedule
        assert distance(schedule, schedule) == 0
    if len(schedules) > 1:
        assert min(distance(schedule, schedules[0]) for schedule in schedules[1:]) == 1


def test_every_tile_of_attention_in_bfloat16_can_be_built() -> None:
    """With keys that stream, those of a tile are whole pairs."""
    workload = Attention(1, 1, 40, 577, 32, 32, dtype="bfloat16")
    assert workload.streams
    module, tiles = build_module(workload), set()
    for schedule in space(workload, vector_unit(HALF_TARGET)):
        chosen = {tuple(schedule[name] for name in names) for names in (TILE, RESULT_TILE)}
        if not chosen <= tiles:
            tiles |= chosen
            to_loops(module, HALF_TARGET, {workload.key: schedule})
    with pytest.raises(HarnessError, match=sentence("bad-schedule", key=workload.key, error="pairs")):
        decided(workload, vector_unit(HALF_TARGET), {"rows": 7, "vectors": 3})


@pytest.mark.parametrize("name", ["linear", "conv-filtered", "conv-3x3", "attention"])
def test_naming_the_default_changes_nothing(name: str) -> None:
    workload = WORKLOADS[name]
    default = space(workload, UNIT)[0]
    plain, named = (
        cpu_pipeline(TARGET, {workload.key: schedule})(build_module(workload)).script() for schedule in ({}, default)
    )
    assert plain == named == cpu_pipeline(TARGET)(build_module(workload)).script()


def test_a_schedule_changes_the_code_and_only_of_its_problem() -> None:
    workload = WORKLOADS["linear"]
    default, other = space(workload, UNIT)[0], space(workload, UNIT)[-1]
    plain = to_loops(build_module(workload), TARGET).script()
    assert other != default
    assert to_loops(build_module(workload), TARGET, {workload.key: other}).script() != plain
    assert to_loops(build_module(workload), TARGET, {"product 1x2x3x4 left": other}).script() == plain


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"rows": 100}, "fit"),
        ({"rows": 0}, "fit"),
        ({"vectors": 60}, "fit"),
        ({"row": 6}, "'row'"),
        ({"blocks": 0}, "blocks = 0"),
        ({"splits": 4000}, "splits = 4000"),
        ({"chunk": 5000}, "chunk = 5000"),
        ({"chunk": 1}, "chunk = 1"),
        ({"chunk": 51}, "chunk = 51"),
        ({"rows": -1}, "rows = -1"),
        ({"rows": 1.5}, "rows = 1.5"),
        ({"rows": True}, "rows = True"),
        ({"rows": "6"}, "rows = '6'"),
    ],
)
def test_a_bad_schedule_is_refused_with_a_sentence(schedule: Schedule, words: str) -> None:
    workload = WORKLOADS["linear"]
    with pytest.raises(HarnessError, match=sentence("bad-schedule", key=workload.key, error=words)):
        decided(workload, UNIT, schedule)
    with pytest.raises(HarnessError, match=sentence("bad-schedule", key=workload.key, error=words)):
        cpu_pipeline(TARGET, {workload.key: schedule})(build_module(workload))


def test_filtering_is_refused_where_it_is_not_possible() -> None:
    with pytest.raises(HarnessError, match=sentence("bad-schedule", error="filtering = 1")):
        decided(WORKLOADS["conv-3x3"], UNIT, {"filtering": 1})
    with pytest.raises(HarnessError, match=sentence("bad-schedule", error="lines")):
        decided(WORKLOADS["conv-filtered"], UNIT, {"filtering": 0, "lines": 2})


def test_queries_must_be_a_whole_number_of_result_tiles() -> None:
    with pytest.raises(HarnessError, match=sentence("bad-schedule", error="tiles")):
        decided(WORKLOADS["attention"], VectorUnit(16, 32), {"vectors": 2, "result_rows": 5})


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_a_workload_has_the_same_key_alone(workload: Workload) -> None:
    assert workloads(build_module(workload), TARGET) == [workload]


STORED: dict[str, Workload] = {
    "product 1x14400x256x8 left": Product(Extents(1, 14400, 8, 256), "left"),
    "attention 1x16 5184x5184x64": Attention(1, 16, 5184, 5184, 64, 64),
    "attention 1x8 201x5184x32 bias float32": Attention(1, 8, 201, 5184, 32, 32, "float32"),
}
"""Workloads by the keys that `fixtures/tuned` has had for them since before keys knew of element types."""


def test_float32_workloads_have_the_keys_that_are_stored() -> None:
    stored = {record.task for folder in TUNED.iterdir() for record in open_database(folder).records}
    assert STORED.keys() <= stored
    assert {key: workload.key for key, workload in STORED.items()} == {key: key for key in STORED}


@pytest.mark.parametrize("half", HALF.values(), ids=HALF)
def test_what_multiplies_bfloat16_is_another_task_of_the_same_numbers(half: Workload) -> None:
    workload = replace(half, dtype="float32")
    assert half.key == f"{workload.key} bfloat16" and half != workload
    for one, other in zip(draw_arrays(workload), draw_arrays(half), strict=True):
        np.testing.assert_array_equal(one, other)
    assert workloads(build_module(half), HALF_TARGET) == [half]


@pytest.mark.parametrize("half", HALF.values(), ids=HALF)
def test_without_the_instruction_nothing_of_it_is_tuned_in_bfloat16(half: Workload) -> None:
    assert [found.dtype for found in workloads(build_module(half), target_for("x86-64-v4"))] == ["float32"]


@pytest.mark.skipif(not executes(HALF_TARGET), reason="this machine does not execute code for cooperlake")
@pytest.mark.parametrize("half", HALF.values(), ids=HALF)
def test_every_schedule_of_bfloat16_is_as_accurate_as_autocast(half: Workload) -> None:
    schedules = space(half, vector_unit(HALF_TARGET))
    expected, exact = torch_result(half), torch_result(half, exact=True)
    step = max(1, len(schedules) // 3)
    chosen = ({}, *schedules[step:-1:step], schedules[-1])
    for schedule, actual in zip(chosen, computed(half, *chosen, target=HALF_TARGET), strict=True):
        filtered = bool(schedule.get("filtering"))
        assert (rms(actual - exact) < 0.01 * rms(expected - exact)) == filtered, schedule
        assert rms(actual - exact) <= 1.1 * rms(expected - exact), schedule


def test_minimal_filtering_of_bfloat16_can_be_chosen_and_is_not_the_default() -> None:
    schedules = space(HALF["conv-filtered"], UNIT)
    assert schedules[0]["filtering"] == 0
    assert {schedule["filtering"] for schedule in schedules} == {0, 1}


def test_tiles_are_one_choice() -> None:
    workload = WORKLOADS["attention"]
    schedules = space(workload, UNIT)
    names = [{name for name in a if a[name] != schedules[0][name]} for a in schedules]
    assert any(name in (set(TILE), set(RESULT_TILE)) for name in names)
    assert all(distance(a, schedules[0]) == 1 for a, n in zip(schedules, names, strict=True) if n == set(TILE))


def test_tasks_are_counted_in_a_module() -> None:
    """A linear layer with bias and GELU, applied twice, and one that only looks the same."""
    builder = relax.BlockBuilder()
    types = [relax.TensorType(shape, "float32") for shape in ([33, 64], [64, 64], [64], [64, 32])]
    x, w, b, v = (relax.Var(name, ty) for name, ty in zip("xwbv", types, strict=True))
    with builder.function("main", [x, w, b, v], attrs={"num_input": 1}):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.gelu(relax.op.add(relax.op.matmul(x, w), b)))
            y = builder.emit(relax.op.nn.gelu(relax.op.add(relax.op.matmul(y, w), b)))
            result = builder.emit_output(builder.emit(relax.op.matmul(y, v)))
        builder.emit_func_output(result)
    found = Counter(workload.key for workload in workloads(builder.get(), TARGET))
    assert found == {"product 1x33x64x64 left": 2, "product 1x33x64x32 left": 1}
