"""Linear layers on the matrix unit of x86: what is emitted computes what the instruction does, and LLVM emits it."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from tvm.target import codegen

from conformance.support.amx import product_in_tiles, target_with_tiles, without_unit
from conformance.support.assembly import assembly
from conformance.support.bf16 import linear, rounded
from conformance.support.kernels import functions_of, lowered, machine_of, run
from conformance.support.operators import normal, rms
from conformance.support.place import executes
from harness.core.case import Case
from harness.core.outcome import VerdictKind
from harness.core.settings import SEEDED
from harness.lowering.route import Route, lower
from harness.models.registry import models, subjects
from harness.models.traced import TracedWorkload
from harness.parity.verdict import judge
from harness.runtime.cpu import MATRIX_UNIT, cpu_features
from harness.runtime.matrix_unit import matrix_unit_problem
from harness.schedules.common.kernel_info import infos_of
from harness.schedules.cpu import cpu_pipeline
from harness.schedules.cpu.amx import matrix_unit

few = settings(max_examples=6)
ANY, WITH_TILES = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"}), target_with_tiles("x86-64-v3")
emulated = pytest.mark.skipif(not executes(ANY), reason="this machine does not execute code for x86-64-v3")


def multiplied(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The layer in tiles, whose instructions are functions that this machine runs."""
    module = without_unit(lowered(linear, [x], [weight], WITH_TILES))
    machine = machine_of(module, ANY)
    loaded = machine["main_transform_params"]([tvm.runtime.tensor(weight)])
    return machine["main"](tvm.runtime.tensor(x), *loaded).numpy()


@emulated
@few
@given(
    rows=st.sampled_from([9, 16, 17, 32, 33, 75]),
    columns=st.sampled_from([1, 16, 31, 32, 33, 130]),
    steps=st.sampled_from([1, 2, 8, 18, 37]),
)
def test_a_linear_layer_is_what_numpy_emulates(rows: int, columns: int, steps: int) -> None:
    depth = 32 * steps
    x, weight = normal((rows, depth)), rounded(normal((columns, depth), 1, scale=depth**-0.5))
    np.testing.assert_array_equal(multiplied(x, weight), product_in_tiles(x, weight))


@emulated
def test_a_layer_of_many_blocks() -> None:
    x, weight = normal((2500, 64)), rounded(normal((200, 64), 1))
    np.testing.assert_array_equal(multiplied(x, weight), product_in_tiles(x, weight))


@emulated
def test_sums_are_a_thousand_times_as_accurate_as_operands() -> None:
    x, weight = normal((64, 4736)), rounded(normal((64, 4736), 1))
    right = weight.astype(np.float64).T
    exact = rounded(x).astype(np.float64) @ right
    assert rms(multiplied(x, weight) - exact) <= 1e-3 * rms(exact - x.astype(np.float64) @ right)


@pytest.mark.skipif(not set(MATRIX_UNIT) <= (cpu_features() or set()), reason="this machine has no matrix unit")
def test_the_unit_computes_it() -> None:
    if refusal := matrix_unit_problem():
        pytest.skip(f"the system refuses the matrix unit: {refusal}")
    target = target_with_tiles(codegen.llvm_get_system_cpu())
    for rows, columns, depth in ((96, 384, 1024), (17, 31, 96)):
        x, weight = normal((rows, depth)), rounded(normal((columns, depth), 1, scale=depth**-0.5))
        np.testing.assert_array_equal(run(linear, [x], [weight], target), product_in_tiles(x, weight))


@pytest.mark.parametrize("cpu", ["sapphirerapids", "graniterapids"])
@pytest.mark.parametrize(("rows", "sums", "operands"), [(96, 4, 4), (12, 2, 3)])
def test_sums_stay_in_tiles(cpu: str, rows: int, sums: int, operands: int) -> None:
    """Sums are loaded, operands and products follow each other step by step, sums are stored; nothing between."""
    target = target_with_tiles(cpu)
    text = assembly(lowered(linear, [normal((rows, 1024))], [rounded(normal((512, 1024)))], target), target)
    letters = ""
    for mnemonic, written in re.findall(r"(tileloadd|tdpbf16ps|tilestored)\s.*?(?:%tmm(\d))?$", text, re.M):
        letter = {"tileloadd": "o", "tdpbf16ps": "p", "tilestored": "w"}[mnemonic]
        letters += "s" if mnemonic == "tileloadd" and int(written) < sums else letter
    assert re.fullmatch(f"(s{{{sums}}}(o{{{operands}}}p{{{sums}}})+w{{{sums}}})+", letters), letters
    assert text.index("ldtilecfg") < text.index("tileloadd") and text.rindex("tilestored") < text.index("tilerelease")
    assert "multiply_bf16_tiles" not in re.sub(r"#.*", "", text), "it is not called, but part of the loop"


def functions_in_bf16(module: nn.Module, target: tvm.target.Target, *args: torch.Tensor) -> set[str]:
    made = lower(module.eval(), args, Route(precision="bf16"))
    return {name.rstrip("0123456789") for name in functions_of(cpu_pipeline(target)(made.module))}


def test_what_does_not_fill_tiles_stays_with_vectors() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.odd = nn.Linear(64, 48), nn.Linear(48, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.odd(self.wide(x))

    names = functions_in_bf16(Layers(), WITH_TILES, torch.randn(9, 64))
    assert {name for name in names if "matmul" in name} == {"matmul_bf16_amx_add_astype", "matmul_bf16_add"}
    assert not any("amx" in name for name in functions_in_bf16(Layers(), WITH_TILES, torch.randn(8, 64)))


def test_a_name_alone_does_not_promise_the_unit() -> None:
    """Hypervisors hide it: without being asked for, code for such a processor needs no more than its vectors."""
    named = tvm.target.Target({"kind": "llvm", "mcpu": "sapphirerapids", "mtriple": "x86_64-linux-gnu"})
    assert not matrix_unit(named) and matrix_unit(WITH_TILES)
    assert "matmul_bf16_add" in functions_in_bf16(nn.Linear(64, 64), named, torch.randn(32, 64))


def test_the_facts_tell_tiles() -> None:
    infos = infos_of(lowered(linear, [normal((32, 64))], [rounded(normal((64, 64)))], WITH_TILES))
    info = infos["matmul_bf16_amx"]
    assert info.tile == {"rows": 32, "columns": 32}
    assert info.flop == 2 * 32 * 64 * 64


@emulated
def test_a_component_in_tiles_is_as_accurate_as_autocast() -> None:
    case = Case("scoring_head", "real", "llvm", precision="bf16")
    subject = subjects()[case.component]
    with models()[subject.model].context():
        workload = subject.open(case, SEEDED)
        assert isinstance(workload, TracedWorkload)
        (program,) = workload.programs.values()
        inputs = tuple(program.example.values())
        made = lower(program.module, inputs, Route(precision="bf16"))
        module = without_unit(cpu_pipeline(WITH_TILES)(made.module))
        assert sum("amx" in name for name in functions_of(module)) >= 3
        machine = machine_of(module, ANY)
        weights = list(machine["main_transform_params"]([tvm.runtime.tensor(a) for a in made.parameters().values()]))
        (logits,) = machine["main"](*(tvm.runtime.tensor(value.numpy()) for value in inputs), *weights)
        reference, _ = workload.reference()
        (verdict,) = judge({"logits": logits.numpy()}, reference, workload.oracle(), by_oracle=True)
    assert verdict.kind is VerdictKind.ORACLE, verdict
    assert verdict.r_rms < 1
