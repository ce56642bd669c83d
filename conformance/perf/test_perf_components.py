"""Components are prepared for their benchmark in the precision of their case, and on the sample that is named."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from conformance.support.benchmarked import run_benchmarks
from harness.core.case import DEFAULT_STRATEGY, Case
from harness.core.errors import HarnessError
from harness.core.outcome import VerdictKind
from harness.core.precision import PRECISIONS
from harness.core.program import Call, Output
from harness.core.settings import SEEDED
from harness.models.registry import models, subjects
from harness.models.traced import TracedWorkload
from perf.components import call_of, inputs_of, prepare
from perf.results import UNTUNED
from perf.sides import read, read_module, runner, torch_inputs, write


def test_arrays_are_read_with_their_values_dtypes_and_shapes(tmp_path: Path) -> None:
    arrays = [
        np.arange(6, dtype=dtype).reshape(shape)
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.complex64)
        for shape in ((2, 3), (6,))
    ]
    arrays += [np.array(1.5, ml_dtypes.bfloat16), np.zeros((0, 2), ml_dtypes.bfloat16), np.array([True, False])]
    write(tmp_path, "weight", arrays)
    found = read(tmp_path, "weight")
    assert [(array.dtype, array.shape) for array in found] == [(array.dtype, array.shape) for array in arrays]
    assert all(np.array_equal(*pair) for pair in zip(found, arrays, strict=True))


@pytest.mark.usefixtures("nvcc")
@pytest.mark.parametrize(("precision", "verdict"), [("fp32", VerdictKind.STRICT), ("fp16", VerdictKind.ORACLE)])
def test_the_measured_library_is_that_of_the_precision(precision: str, verdict: VerdictKind, tmp_path: Path) -> None:
    case = Case("box_head", DEFAULT_STRATEGY, "cuda", precision=precision)
    prepared = prepare(case, tmp_path, None)
    assert prepared.libraries[UNTUNED].is_file() and prepared.work[UNTUNED]

    main = prepared.module["main"]
    taken = [str(parameter.ty.dtype) for parameter in main.params[int(main.attrs["num_input"]) :]]
    weights = [array.dtype.name for array in read(tmp_path, "weight")]
    assert weights == taken
    assert ("float16" in weights) == (PRECISIONS[precision].is_half)
    assert ("float16" in prepared.module.script()) == (PRECISIONS[precision].is_half)

    # Eager fp32 is not what autocast gives, but as accurate.
    with models()[subjects()[case.component].model].context():
        outputs = runner(read_module(tmp_path), torch_inputs(tmp_path))()
    assert prepared.judge(outputs)["verdict"] == verdict


def test_the_named_sample_is_measured(tmp_path: Path) -> None:
    case = Case("object_pointers", DEFAULT_STRATEGY, "llvm")
    with models()[subjects()[case.component].model].context():
        workload = subjects()[case.component].open(case, SEEDED)
    assert isinstance(workload, TracedWorkload)
    for call in workload.trace:
        folder = tmp_path / call.name
        folder.mkdir()
        prepared = prepare(case, folder, None, sample=call.name)
        inputs = torch_inputs(folder)
        assert all(map(torch.equal, inputs, call.arguments))
        assert prepared.judge(runner(read_module(folder), inputs)())["verdict"] == VerdictKind.STRICT
    assert call_of(workload, case.component, "") is workload.trace[0]
    with pytest.raises(HarnessError, match=f"'none'.*{workload.trace[0].name}"):
        call_of(workload, case.component, "none")


def test_what_reads_the_output_of_another_call_is_not_measured_alone() -> None:
    with pytest.raises(HarnessError, match="'second'"):
        inputs_of(Call("second", "step", (Output("first", "state"),)), "object_pointers")


@pytest.mark.wide
def test_a_case_in_half_precision_runs_beside_ours_in_fp32(tmp_path: Path) -> None:
    options = ("--component", "box_head", "--target", "llvm", "--precision", "bf16", "--rounds", "2", "--untuned")
    (benchmark,) = run_benchmarks(tmp_path / "perf.json", "perf/test_components.py", *options)
    sides = benchmark["extra_info"]["sides"]
    assert {side: found["verdict"] for side, found in sides.items()} == {
        "torch": VerdictKind.ORACLE,
        "untuned": VerdictKind.ORACLE,
        "tvm fp32": VerdictKind.STRICT,
    }
    assert {len(found["seconds"]) for found in sides.values()} == {2}
    gained = sides["tvm fp32"]["median"] / sides["untuned"]["median"]
    assert benchmark["extra_info"]["ratios"]["tvm fp32_over_untuned"] == pytest.approx(gained)
