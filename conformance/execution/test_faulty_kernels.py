"""Emulated Metal kernels are those that a Mac gets, and strict; the judge catches broken ones."""

from __future__ import annotations

import platform
import struct
from collections.abc import Mapping

import pytest
import torch

from conformance.support.faulty_kernels import HEALTHY, Fault
from conformance.support.gpu_programs import Expression, emulated, hold, skip_unless_emulated
from conformance.targets.test_device_code import modules_of
from conformance.targets.test_targets import MODULES
from harness.compiler.execution.emulation.device import DeviceModule, read_device_module
from harness.compiler.lowering.frontends.exporting import export_program
from harness.compiler.lowering.frontends.torch_export.importing import import_program
from harness.compiler.targets import TARGETS
from harness.compiler.targets.compiling import compile_module
from harness.compiler.targets.metal_source import initialize_reductions, split_kernels
from harness.core.case import Case
from harness.core.outcome import Verdict, VerdictKind
from harness.core.processes.call import WorkerEnd, run_isolated

pytestmark = [
    pytest.mark.metal,
    pytest.mark.skipif(
        platform.machine() not in ("x86_64", "aarch64", "arm64"), reason="threads are emulated on x86-64 and on arm64"
    ),
]

BARRIER = r"threadgroup_barrier\(mem_flags::mem_threadgroup\);"
WRONG = [
    Fault("no barrier before threadgroup memory is written again", BARRIER, ""),
    Fault("no barrier before threadgroup memory is read", BARRIER, "", 1),
    Fault("threadgroup memory is read four elements on", r"(\*\(threadgroup float4\*\)\(v_\d+ \+ )", r"\g<1>4 + "),
    # The third: the first is of a mean that a second pass corrects.
    Fault("a lane exchanges with another one", r"\(\(\(int\)threadIdx\) & 31\) \^ 8", "(((int)threadIdx) & 31) ^ 4", 2),
    Fault("a scale is missing", r" \* 6\.250000e-02f", ""),
]
"""Each gives results, wrong ones."""
REFUSED = Fault("threads leave a barrier out", BARRIER, r"if (((int)threadIdx.x) < 32) { \g<0> }")


@pytest.fixture(scope="module")
def results() -> tuple[DeviceModule, Mapping[str, tuple[Verdict, ...] | str]]:
    """The kernels of `scoring_head`, whose products, normalization and sums use what threads share."""
    skip_unless_emulated("metal")
    request = (Case("scoring_head", "real", "metal"), [HEALTHY, *WRONG, REFUSED])
    ended = run_isolated("conformance.support.faulty_kernels:judged", request, timeout=600)
    assert ended.kind is WorkerEnd.OK, ended.error
    return ended.value


def test_healthy_kernels_are_strict(results):
    verdicts = results[1][HEALTHY.name]
    assert [verdict.kind for verdict in verdicts] == [VerdictKind.STRICT], verdicts


@pytest.mark.parametrize("fault", WRONG, ids=lambda fault: fault.name)
def test_the_judge_catches_broken_kernels(results, fault):
    verdicts = results[1][fault.name]
    assert not isinstance(verdicts, str), verdicts
    assert not {verdict.kind for verdict in verdicts} & {VerdictKind.STRICT, VerdictKind.ORACLE}, verdicts


def test_a_barrier_that_some_threads_leave_out_is_refused(results):
    assert "some threads of a block are at a barrier that others have left out" in results[1][REFUSED.name]


def test_the_kernels_that_are_emulated_are_those_in_the_library_of_a_mac(tmp_path):
    """Byte by byte: kernels with threadgroup memory, shuffles and constants that are given by their bits."""
    skip_unless_emulated("metal")
    module, arguments = MODULES["scoring"]
    program = import_program(export_program(module, arguments))[0]
    for name, for_emulation in (("here", True), ("mac", False)):
        compile_module(program, TARGETS["metal"], tmp_path / f"{name}.so", for_emulation=for_emulation)
    mac = (tmp_path / "mac.so").read_bytes()
    kernels = split_kernels(read_device_module("metal", modules_of(tmp_path / "here.so")["metal"]).source)
    assert any("threadgroup_barrier" in text for text in kernels.values())
    for text in kernels.values():
        source = text.removeprefix("\n").removesuffix("\n").encode()
        assert struct.pack("<Q", len(source)) + source in mac


def normalized(x: torch.Tensor) -> torch.Tensor:
    """A layer norm over four channels, as in SAM 3's memory encoder: four threads of 64 have terms, and results."""
    mean = x.mean(1, keepdim=True)
    return (x - mean) / torch.sqrt((x - mean).pow(2).mean(1, keepdim=True) + 1e-6)


REDUCTION = Expression("normalized", normalized, (torch.rand(2, 4, 9, 9),))


def test_threads_of_a_reduction_that_have_no_value_are_given_one(tmp_path):
    """Also where clang takes it for granted that no value is passed on that is not there."""
    skip_unless_emulated("metal")
    ((actual,),) = emulated([REDUCTION], "metal", tmp_path, ["run_as_cpp"])
    hold(REDUCTION, actual)
    declared = "kernel void k() {\n  thread float red_buf0_1[1];\n  thread float v[1];\n}\n"
    assert initialize_reductions(declared) == declared.replace("red_buf0_1[1];", "red_buf0_1[1] = {};")
