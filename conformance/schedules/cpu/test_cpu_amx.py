"""The matrix unit of x86: what is emitted computes what the instruction does, and LLVM emits it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import tvm
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from tvm import relax
from tvm.target import codegen

from conformance.schedules.cpu.test_cpu_attention_bf16 import hold_rounded, masks_of
from conformance.support.amx import product_in_tiles, target_with_tiles
from conformance.support.assembly import assembly
from conformance.support.attention import attention_bf16, operands
from conformance.support.bf16 import linear, rounded
from conformance.support.convolutions import (
    AROUND,
    PLAIN,
    Geometry,
    as_product,
    filters,
    of_upsampled,
    transposed_by_taps,
    upsampled_by_places,
)
from conformance.support.examples import examples
from conformance.support.kernels import Arrays, Operator, functions_of, lowered, machine_of, run, run_module
from conformance.support.operators import normal, rms
from harness.compiler.deployment.code import select_reachable
from harness.compiler.execution.emulation.matrix_unit import emulate, emulated_products, emulation_problem
from harness.compiler.lowering.route import Route, lower
from harness.compiler.schedules.common.kernel_info import infos_of
from harness.compiler.schedules.cpu import cpu_pipeline
from harness.compiler.schedules.cpu.bf16 import allow_bf16
from harness.compiler.schedules.cpu.blocking import Extents
from harness.compiler.schedules.cpu.microkernels.amx import AMX
from harness.compiler.schedules.cpu.microkernels.choice import micro_kernels
from harness.compiler.schedules.cpu.schedule import blocking_of
from harness.compiler.schedules.cpu.tile import VectorUnit
from harness.compiler.targets.compiling import build_library
from harness.core.case import Case
from harness.core.outcome import Verdict, VerdictKind
from harness.core.settings import SEEDED
from harness.models.registry import models, subjects
from harness.models.traced import TracedWorkload
from harness.parity.references import Reference
from harness.parity.verdict import judge
from harness.runtime.cpu import MATRIX_UNIT, cpu_features, matrix_unit_problem
from harness.runtime.executable import TRANSFORM_PARAMETERS

few = examples(6)
ANY, WITH_TILES = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"}), target_with_tiles("x86-64-v3")
emulated = pytest.mark.skipif(emulation_problem() is not None, reason=str(emulation_problem()))


def in_tiles(operator: Operator, inputs: Arrays, weights: Arrays = ()) -> np.ndarray:
    """The result of an operator in tiles; where this machine has none, or may not use them, they are emulated."""
    module = lowered(operator, inputs, weights, WITH_TILES)
    assert any("_amx" in name for name in functions_of(module)), functions_of(module)
    emulate()
    before = emulated_products()
    result = run_module(module, inputs, weights, WITH_TILES)
    assert emulated_products() > before or matrix_unit_problem() is None
    return result


def multiplied(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The layer in tiles."""
    return in_tiles(linear, [x], [weight])


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


@emulated
@pytest.mark.parametrize(("rows", "columns"), [(37, 90), (90, 37)])
def test_a_product_of_activations_is_what_numpy_emulates(rows: int, columns: int) -> None:
    """Of which the larger one streams."""
    x, y = normal((3, rows, 64)), normal((3, 64, columns), 1)
    actual = in_tiles(lambda *operands: allow_bf16(relax.op.matmul(*operands)), [x, y])
    expected = np.stack([product_in_tiles(a, rounded(b.T)) for a, b in zip(x, y, strict=True)])
    np.testing.assert_array_equal(actual, expected)


# --- convolutions ---


def convolved(x: np.ndarray, weight: np.ndarray, at: Geometry = PLAIN) -> np.ndarray:
    """What the unit makes of the columns that PyTorch gathers."""
    return as_product(x, weight, at, lambda columns, rows: product_in_tiles(columns, rounded(rows)))


@emulated
@few
@given(
    channels=st.sampled_from([32, 64, 96]),
    outer=st.sampled_from([9, 16, 33, 70]),
    size=st.tuples(st.integers(3, 9), st.integers(3, 40)),
    geometry=st.sampled_from([PLAIN, AROUND, Geometry(stride=(2, 2), padding=(1, 0)), Geometry(dilation=(2, 1))]),
    kernel=st.sampled_from([(1, 1), (3, 3), (2, 3)]),
)
def test_a_convolution_is_what_numpy_emulates(
    channels: int, outer: int, size: tuple[int, int], geometry: Geometry, kernel: tuple[int, int]
) -> None:
    assume(
        all(extent > reach * (taps - 1) for extent, reach, taps in zip(size, geometry.dilation, kernel, strict=True))
    )
    x, weight = normal((2, channels, *size)), filters(outer, channels, *kernel)
    actual = in_tiles(lambda *operands: allow_bf16(geometry.conv2d(*operands)), [x], [weight])
    np.testing.assert_array_equal(actual, convolved(x, weight, geometry))


@emulated
def test_a_transposed_convolution_is_what_numpy_emulates() -> None:
    x, weight = normal((2, 64, 5, 33)), normal((64, 24, 2, 2), 1, scale=1 / 16)
    actual = in_tiles(lambda x, w: allow_bf16(relax.op.nn.conv2d_transpose(x, w, (2, 2))), [x], [weight])
    np.testing.assert_array_equal(actual, transposed_by_taps(x, weight, convolved))


@emulated
@few
@given(
    images=st.integers(1, 2),
    channels=st.sampled_from([32, 96, 256]),
    outer=st.sampled_from([32, 33, 70]),
    size=st.tuples(st.integers(1, 9), st.integers(1, 40)),
)
def test_an_upsampled_image_is_what_numpy_emulates(
    images: int, channels: int, outer: int, size: tuple[int, int]
) -> None:
    x, weight = normal((images, channels, *size)), filters(outer, channels, 3, 3)
    actual = in_tiles(of_upsampled(lambda *operands: allow_bf16(AROUND.conv2d(*operands))), [x], [weight])
    np.testing.assert_array_equal(actual, upsampled_by_places(x, weight, convolved))


# --- attention ---


@emulated
@few
@given(
    queries=st.sampled_from([9, 32, 33, 97]),
    keys=st.sampled_from([9, 37, 201, 576, 1155]),
    extents=st.sampled_from([(32, 32), (64, 64), (96, 20), (256, 64)]),
    masked=st.sampled_from([None, 0.5]),
)
def test_attention_rounds_operands_and_weights_alone(
    queries: int, keys: int, extents: tuple[int, int], masked: float | None
) -> None:
    arrays = operands(2, queries, keys, 2, *extents)
    bias = None if masked is None else masks_of((1, 2, queries, keys), masked)
    actual = in_tiles(attention_bf16(), [*arrays, *([] if bias is None else [bias])])
    hold_rounded(actual, arrays, bias)
    assert bias is None or (actual[:, 0] == 0).all()


@emulated
@pytest.mark.parametrize(("corner", "queries", "keys"), [("TopLeft", 20, 41), ("BottomRight", 41, 17)])
def test_causal_attention(corner: str, queries: int, keys: int) -> None:
    arrays = operands(2, queries, keys, 2, 64)
    offset = 0 if corner == "TopLeft" else keys - queries
    seen = np.arange(keys) <= np.arange(queries)[:, None] + offset
    hold_rounded(in_tiles(attention_bf16(corner), arrays), arrays, np.where(seen, 0.0, -np.inf))


@pytest.mark.skipif(not set(MATRIX_UNIT) <= (cpu_features() or set()), reason="this machine has no matrix unit")
def test_the_unit_computes_it() -> None:
    if refusal := matrix_unit_problem():
        pytest.skip(f"the system refuses the matrix unit: {refusal}")
    target = target_with_tiles(codegen.llvm_get_system_cpu())
    for rows, columns, depth in ((96, 384, 1024), (17, 31, 96)):
        x, weight = normal((rows, depth)), rounded(normal((columns, depth), 1, scale=depth**-0.5))
        np.testing.assert_array_equal(run(linear, [x], [weight], target), product_in_tiles(x, weight))
    x, weight = normal((1, 64, 20, 30)), filters(70, 64, 3, 3)
    actual = run(lambda *operands: allow_bf16(AROUND.conv2d(*operands)), [x], [weight], target)
    np.testing.assert_array_equal(actual, convolved(x, weight, AROUND))
    arrays = operands(1, 96, 576, 2, 64)
    hold_rounded(run(attention_bf16(), arrays, target=target), arrays)


@pytest.mark.parametrize("cpu", ["sapphirerapids", "graniterapids"])
@pytest.mark.parametrize(("rows", "sums", "operands"), [(96, 4, 4), (12, 2, 3)])
def test_sums_stay_in_tiles(cpu: str, rows: int, sums: int, operands: int) -> None:
    """Sums begin as zero or are loaded, operands and products follow each other step by step, sums are stored."""
    target = target_with_tiles(cpu)
    text = assembly(lowered(linear, [normal((rows, 1024))], [rounded(normal((512, 1024)))], target), target)
    letters = ""
    for mnemonic, written in re.findall(r"(tilezero|tileloadd|tdpbf16ps|tilestored)\s.*?(?:%tmm(\d))?$", text, re.M):
        letter = {"tilezero": "z", "tileloadd": "o", "tdpbf16ps": "p", "tilestored": "w"}[mnemonic]
        letters += "s" if mnemonic == "tileloadd" and int(written) < sums else letter
    # Loops may share what stores their sums, which LLVM puts anywhere between them.
    begun, steps, stored = f"(z{{{sums}}}|s{{{sums}}})", f"(o{{{operands}}}p{{{sums}}})+", f"(w{{{sums}}})*"
    assert re.fullmatch(f"{stored}({begun}{steps}{stored})+", letters), letters
    assert "z" in letters and "s" in letters
    assert text.index("ldtilecfg") < text.index("tileloadd") and text.rindex("tilestored") < text.index("tilerelease")
    assert "prefetcht1" in text, "the next chunk of the weights comes from memory meanwhile"


@pytest.mark.parametrize("kind", ["convolution", "attention"])
def test_a_task_has_the_unit_while_it_multiplies(kind: str) -> None:
    target = target_with_tiles("sapphirerapids")
    if kind == "attention":
        module = lowered(attention_bf16(), operands(1, 96, 576, 2, 64), target=target)
    else:
        image, weight = normal((1, 64, 24, 72)), filters(96, 64, 3, 3)
        module = lowered(lambda *pair: allow_bf16(AROUND.conv2d(*pair)), [image], [weight], target)
    text = assembly(module, target)
    assert text.count("tdpbf16ps") >= 4 * (2 if kind == "attention" else 1)
    assert text.index("ldtilecfg") < text.index("tileloadd") and text.rindex("tilestored") < text.rindex("tilerelease")
    assert "vdpbf16ps" not in text


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


def test_fp32_is_what_it_is_without_the_unit() -> None:
    made = lower(nn.Linear(64, 48).eval(), (torch.randn(96, 64),), Route())
    without = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3", "mtriple": "x86_64-linux-gnu"})
    tvm.ir.assert_structural_equal(*(cpu_pipeline(target)(made.module) for target in (WITH_TILES, without)))


def test_a_name_alone_does_not_promise_the_unit() -> None:
    """Hypervisors hide it: without being asked for, code for such a processor needs no more than its vectors."""
    named = tvm.target.Target({"kind": "llvm", "mcpu": "sapphirerapids", "mtriple": "x86_64-linux-gnu"})
    assert AMX not in micro_kernels(named) and AMX in micro_kernels(WITH_TILES)
    assert "matmul_bf16_add" in functions_in_bf16(nn.Linear(64, 64), named, torch.randn(32, 64))


def test_the_facts_tell_tiles() -> None:
    infos = infos_of(lowered(linear, [normal((32, 64))], [rounded(normal((64, 64)))], WITH_TILES))
    info = infos["matmul_bf16_amx"]
    assert info.tile == {"rows": 32, "columns": 32}
    assert info.flop == 2 * 32 * 64 * 64


def verdicts_in_tiles(component: str) -> Sequence[Verdict]:
    """Verdicts on what a component gives in tiles for its main sample."""
    case = Case(component, "real", "llvm", precision="bf16")
    subject = subjects()[case.component]
    with models()[subject.model].context():
        workload = subject.open(case, SEEDED)
        assert isinstance(workload, TracedWorkload)
        (program,) = workload.programs.values()
        made = lower(program.module, tuple(program.example.values()), Route(precision=case.precision))
        module = cpu_pipeline(WITH_TILES)(made.module)
        assert sum("amx" in name for name in functions_of(module)) >= 3
        emulate()
        machine = machine_of(module, WITH_TILES)
        weights = list(machine["main_transform_params"]([tvm.runtime.tensor(a) for a in made.parameters().values()]))
        outputs = machine["main"](*(tvm.runtime.tensor(value.numpy()) for value in program.example.values()), *weights)
        arrays = [output.numpy() for output in ([outputs] if isinstance(outputs, tvm.runtime.Tensor) else outputs)]
        prefix = workload.trace[0].prefix
        actual = {f"{prefix}{name}": array for name, array in zip(program.outputs, arrays, strict=True)}
        reference = workload.reference()
        sides = ({name: values[name] for name in actual} for values in (reference.first, reference.exact))
        return judge(actual, Reference.from_run(*sides), by_oracle=True)


@emulated
def test_a_component_in_tiles_is_as_accurate_as_autocast() -> None:
    for verdict in verdicts_in_tiles("scoring_head"):
        assert verdict.kind is VerdictKind.ORACLE, verdict
        assert verdict.r_rms < 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("cpu", ["sapphirerapids", "znver4"])
def test_what_weights_alone_decide_is_computed_on_any_machine(cpu: str, precision: str, tmp_path: Path) -> None:
    """Weights are packed on the machine that compiles, which may have neither the unit nor another's vectors."""

    class Queries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.layer, self.other = (
                nn.Parameter(torch.randn(64, 64)),
                nn.Linear(64, 64),
                nn.Linear(64, 64),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query = self.layer(self.queries)[None, None]
            found = nn.functional.scaled_dot_product_attention(query, query, query)
            return self.other(x) @ (query @ found)[0, 0].T

    target = target_with_tiles(cpu) if cpu == "sapphirerapids" else tvm.target.Target({"kind": "llvm", "mcpu": cpu})
    made = lower(Queries().eval(), (torch.randn(96, 64),), Route(precision=precision))
    lowered_module = cpu_pipeline(target)(made.module)
    assert any("bf16" in name for name in functions_of(lowered_module)) == (precision == "bf16")
    at_load = select_reachable(lowered_module, [TRANSFORM_PARAMETERS])
    assert {"matmul", "attention"} <= {name.rstrip("0123456789").split("_")[0] for name in functions_of(at_load)}
    build_library(at_load, ANY, tmp_path / "packing.so")


@pytest.mark.parametrize(("depth", "columns"), [(1024, 3072), (1024, 4736), (4736, 1024)])
def test_a_block_stays_in_the_second_cache(depth: int, columns: int) -> None:
    """2 MB: of the image encoder's layers, every right panel reads a whole block of the left operand."""
    blocking = blocking_of(AMX, VectorUnit(16, 32), Extents(1, 5184, columns, depth // 2), "left", {})
    panel = blocking.tile.rows * depth // 2 * 4
    assert panel * blocking.slots < 2**21
    assert panel * (blocking.slots + 1) > 2**21 or blocking.slots >= 9


@pytest.mark.law
@given(steps=st.integers(1, 400), even=st.booleans())
def test_chunks_of_the_depth_fill_tiles_and_are_no_longer_than_sums_may_be(steps: int, even: bool) -> None:
    depth = steps * AMX.multiple
    chunk = AMX.chunk(depth, even=even)
    assert AMX.longest is not None and chunk % AMX.multiple == 0 and chunk <= AMX.longest
    assert depth % chunk == 0 or not even
