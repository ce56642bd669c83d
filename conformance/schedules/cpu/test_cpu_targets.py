"""One set of kernels for every CPU: AVX2 runs here and is right, and for each CPU the inner loops stay in registers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import tvm
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from tvm import relax, te, tirx

from conformance.support.assembly import Instruction, ProductLoop, assembly, full_vector, product_loops
from conformance.support.cpus import target_for
from conformance.support.kernels import hold, lowered, lowered_for
from conformance.support.operators import normal
from conformance.support.place import executes
from harness.compiler.schedules.common.code_generation import generate
from harness.compiler.schedules.cpu.tile import Tile, VectorUnit, choose_tile, vector_unit
from harness.compiler.targets.llvm import required_cpu
from harness.runtime.loading import cpu_problem

op = relax.op

CPUS = ("x86-64-v4", "x86-64-v3", "neoverse-n1", "neoverse-v1", "apple-m1")
ASSEMBLED = [pytest.param(cpu, marks=[pytest.mark.wide] if cpu in CPUS[3:] else []) for cpu in CPUS]
"""The processors whose assembly is read: every night those, too, that have the vectors and tiles of neoverse-n1."""
UNITS = {"x86-64-v4": VectorUnit(16, 32), "x86-64-v3": VectorUnit(8, 16), "x86-64": VectorUnit(4, 16)}
NEON = VectorUnit(4, 32)


# --- right where it runs ---


@dataclass(frozen=True)
class Kernel:
    """An operator, PyTorch's, and what they are tried on."""

    operator: Callable[..., relax.Expr]
    reference: Callable[..., torch.Tensor]
    inputs: Sequence[np.ndarray]
    weights: Sequence[np.ndarray] = ()


def product(a: relax.Expr, b: relax.Expr) -> relax.Expr:
    return op.matmul(a, op.permute_dims(b, [0, 2, 1]))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    return functional.scaled_dot_product_attention(*heads, bias).transpose(1, 2)


def filters(*shape: int) -> np.ndarray:
    return normal(shape, 1, scale=float(np.prod(shape[1:])) ** -0.5)


TOKENS = [normal((2, length, 3, 40), seed) for seed, length in enumerate((39, 53, 53))]
KERNELS = {
    "linear-gelu": Kernel(
        lambda x, w, b: op.nn.gelu(op.add(op.matmul(x, op.permute_dims(w)), b)),
        lambda x, w, b: functional.gelu(functional.linear(x, w, b)),
        [normal((3, 37, 129))],
        [filters(45, 129), normal((45,), 2)],
    ),
    "batched-product": Kernel(
        product, lambda a, b: a @ b.mT, [normal((3, 29, 65)), normal((3, 51, 65), 1, scale=65**-0.5)]
    ),
    "conv-1x1": Kernel(op.nn.conv2d, functional.conv2d, [normal((1, 70, 9, 33))], [filters(33, 70, 1, 1)]),
    "conv-3x3": Kernel(
        lambda x, w: op.nn.relu(op.nn.conv2d(x, w, padding=(1, 1, 1, 1))),
        lambda x, w: torch.relu(functional.conv2d(x, w, padding=1)),
        [normal((2, 35, 13, 37))],
        [filters(29, 35, 3, 3)],
    ),
    "conv-3x3-filtered": Kernel(
        lambda x, w: op.nn.relu(op.nn.conv2d(x, w, padding=(1, 1, 1, 1))),
        lambda x, w: torch.relu(functional.conv2d(x, w, padding=1)),
        [normal((2, 35, 13, 37))],
        [filters(45, 35, 3, 3)],
    ),
    "conv-7x7-depthwise": Kernel(
        lambda x, w: op.nn.conv2d(x, w, padding=(3,) * 4, groups=12),
        lambda x, w: functional.conv2d(x, w, padding=3, groups=12),
        [normal((2, 12, 19, 37))],
        [filters(12, 1, 7, 7)],
    ),
    "conv-transposed": Kernel(
        lambda x, w: op.nn.conv2d_transpose(x, w, (2, 2)),
        lambda x, w: functional.conv_transpose2d(x, w, stride=2),
        [normal((2, 65, 9, 13))],
        [normal((65, 21, 2, 2), 1, scale=0.125)],
    ),
    "attention": Kernel(op.nn.attention, attention, TOKENS),
    "attention-few": Kernel(
        op.nn.attention, attention, [normal((2, length, 3, 48), seed) for seed, length in enumerate((2, 300, 300))]
    ),
    "attention-streaming": Kernel(
        op.nn.attention, attention, [normal((2, length, 3, 72), seed) for seed, length in enumerate((39, 601, 601))]
    ),
    "attention-bias": Kernel(op.nn.attention, attention, [*TOKENS, normal((2, 3, 39, 53), 7)]),
    "layer-norm": Kernel(
        lambda x, w, b: op.nn.layer_norm(x, w, b, axes=[-1]),
        lambda x, w, b: functional.layer_norm(x, x.shape[-1:], w, b),
        [normal((3, 41, 259), offset=3.0)],
        [normal((259,), 1), normal((259,), 2)],
    ),
    "softmax": Kernel(op.nn.softmax, lambda x: torch.softmax(x, -1), [normal((3, 41, 259), scale=4.0)]),
    "gelu": Kernel(op.nn.gelu, functional.gelu, [normal((7, 1021), scale=3.0)]),
}


@pytest.mark.parametrize("cpu", ["x86-64", "x86-64-v3", "neoverse-n1"])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_kernels_for_processors_without_avx512(kernel: Kernel, cpu: str) -> None:
    if not executes(target_for(cpu)):
        pytest.skip(f"this machine does not execute code for {cpu}")
    hold(kernel.operator, kernel.reference, kernel.inputs, kernel.weights, target=target_for(cpu), large=True)


# --- what LLVM breaks ---


def biased_sums() -> tvm.IRModule:
    """Sums of four products and a bias: loops that LLVM unrolls, and of which it then makes vectors."""
    x, w, b = (te.placeholder(shape, name=name) for name, shape in (("x", (4, 9)), ("w", (4, 4)), ("b", (4,))))
    k = te.reduce_axis((0, 4))
    sums = te.compute((4, 9), lambda c, i: te.sum(x[k, i] * w[k, c], axis=k))
    function = te.create_prim_func([x, w, b, te.compute((4, 9), lambda c, i: sums[c, i] + b[c])])
    return tvm.IRModule({"main": function.with_attr("global_symbol", "main")})


@pytest.mark.xfail(strict=True, raises=tvm.error.InternalError, reason="LLVM 22 uses some vectors before it makes them")
def test_raw_tvm_adds_a_bias_to_small_sums() -> None:
    tvm.tirx.build(biased_sums(), target_for("x86-64-v3"))


def test_what_llvm_breaks_is_generated_in_another_way() -> None:
    target = target_for("x86-64-v3")
    built = generate(lambda chosen: tvm.tirx.build(biased_sums(), chosen), target)
    if cpu_problem(*required_cpu(target)) is not None:
        pytest.skip("this machine cannot run code for AVX2, which was compiled")
    x, w, b = normal((4, 9)), normal((4, 4), 1), normal((4,), 2)
    result = tvm.runtime.tensor(np.zeros((4, 9), np.float32))
    built["main"](*(tvm.runtime.tensor(array) for array in (x, w, b)), result)
    np.testing.assert_allclose(result.numpy(), w.T @ x + b[:, None], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("what", ["LLVM module verification failed", "anything else"])
def test_what_cannot_be_generated_says_so(what: str) -> None:
    """Nothing but a broken module is tried again, once, for the same processor."""
    targets = []

    def build(target: tvm.target.Target) -> None:
        targets.append(dict(target.attrs))
        raise tvm.error.InternalError(what)

    options = {"num-cores": 3, "cl-opt": ["-unroll-count:int=3"]}
    with pytest.raises(tvm.error.InternalError, match=what):
        generate(build, tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3", **options}))
    first, *second = targets
    assert len(second) == (what != "anything else")
    assert all({**again, "cl-opt": list(again["cl-opt"])[:-1]} == {**first, **options} for again in second)


# --- what LLVM makes of the kernels, for CPUs that are not here too ---


@pytest.mark.parametrize("cpu", [*CPUS, "x86-64"])
def test_vector_registers_are_known_without_explicit_features(cpu: str) -> None:
    assert vector_unit(target_for(cpu)) == UNITS.get(cpu, NEON)


@pytest.mark.parametrize("triple", ["aarch64-linux-gnu", "arm64-apple-macos"])
def test_every_aarch64_has_neon(triple: str) -> None:
    assert vector_unit(tvm.target.Target({"kind": "llvm", "mtriple": triple})) == NEON


@given(unit=st.sampled_from([NEON, *UNITS.values()]), rows=st.integers(1, 6000), columns=st.integers(1, 6000))
def test_every_tile_fits_the_registers(unit: VectorUnit, rows: int, columns: int) -> None:
    """Accumulators, one row of the right operand and a broadcast; with 32 registers LLVM needs one to spare."""
    tile = choose_tile(unit, rows, columns)
    vectors = tile.columns // tile.lanes
    # A single row reads each vector once: on x86, with its 16 registers, that is an operand in memory.
    right = 0 if tile.rows == 1 else vectors
    assert tile.rows * vectors + right + 1 <= (31 if unit.registers == 32 else 16)


@pytest.mark.law
@pytest.mark.parametrize(
    ("unit", "rows", "vectors"), [(NEON, 6, 4), (UNITS["x86-64-v4"], 6, 4), (UNITS["x86-64"], 4, 3)]
)
def test_of_tiles_that_need_no_padding_the_one_with_the_fewest_loads_is_taken(
    unit: VectorUnit, rows: int, vectors: int
) -> None:
    assert choose_tile(unit, 240, 240 * unit.lanes) == Tile(rows, vectors * unit.lanes, unit.lanes)


@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [
        *((96, 384, 512), (96, 260, 256), (37, 65, 4736), (12, 384, 512), (6, 384, 512), (96, 8, 256), (37, 8, 300)),
        *((1, 260, 256), (2, 260, 256)),
    ],
)
@pytest.mark.parametrize("cpu", ASSEMBLED)
def test_the_product_keeps_its_tile_in_registers(cpu: str, rows: int, columns: int, depth: int) -> None:
    target = target_for(cpu)
    inputs, weights = [normal((rows, depth))], [filters(columns, depth)]
    module = lowered(lambda x, w: op.matmul(x, op.permute_dims(w)), inputs, weights, target)
    tile = choose_tile(vector_unit(target), rows, columns)
    assert_in_registers(assembly(module, target), cpu, {tile.size // tile.lanes})


@pytest.mark.parametrize("size", [(36, 36), (9, 70)])
@pytest.mark.parametrize("cpu", ASSEMBLED)
def test_a_filtered_convolution_keeps_its_tile_in_registers(cpu: str, size: tuple[int, int]) -> None:
    target = target_for(cpu)
    inputs, weights = [normal((1, 64, *size))], [filters(96, 64, 3, 3)]
    text = assembly(lowered(lambda x, w: op.nn.conv2d(x, w, padding=(1,) * 4), inputs, weights, target), target)
    # Filters are transformed in fp64, and so is added up again what is not finite.
    loops = [loop for loop in product_loops(text) if not all(is_fp64(fused) for fused in loop.fused)]
    assert_loops_in_registers(loops, cpu, set(range(8, 25)))


def is_fp64(fused: Instruction) -> bool:
    """Of one number or of several: vfmadd231sd, vfmadd231pd, d1, v1.2d, z1.d."""
    return (
        re.fullmatch(r"v\w+[sp]d", fused.mnemonic) is not None or re.search(r"^d|\.2?d$", fused.written[0]) is not None
    )


ATTENTION = [
    pytest.param(
        *(*cpu.values, length, channels),
        marks=[*cpu.marks, *([pytest.mark.xfail(strict=True, reason=reason)] if reason else [])],
    )
    for cpu in ASSEMBLED
    for length, channels in ((576, 64), (200, 32))
    for reason in ["the tile of 3 × 4 needs 17 registers" if (*cpu.values, length) == ("x86-64-v3", 576) else ""]
]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("cpu", "length", "channels"), ATTENTION)
def test_attention_keeps_its_tiles_in_registers(cpu: str, length: int, channels: int, biased: bool) -> None:
    """Scores and result: two products, each with enough sums side by side to hide the latency of an addition."""
    target = target_for(cpu)
    operands = [normal((1, length, 2, channels))] * 3 + ([normal((1, 1, length, length))] if biased else [])
    text = assembly(lowered(op.nn.attention, operands, target=target), target)
    assert len(product_loops(text)) >= 2
    assert_in_registers(text, cpu, set(range(8, 25)))


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("cpu", ASSEMBLED)
def test_attention_with_streaming_keys_keeps_its_tiles_in_registers(cpu: str, width: int) -> None:
    """For any number of keys: neither the shorter last block nor masks cost a register."""
    target, n = target_for(cpu), tirx.Var("n", "int64")
    for bias in ((), ((1, 1, 1, n),)):
        shapes = ((1, 5184, 1, 256), (1, n, 1, 256), (1, n, 1, width), *bias)
        text = assembly(lowered_for(op.nn.attention, shapes, target), target)
        assert len(product_loops(text)) >= 2
        assert_in_registers(text, cpu, {12, 24})


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("cpu", ASSEMBLED)
def test_attention_of_a_few_queries_keeps_its_sums_in_registers(cpu: str, queries: int) -> None:
    """Products with values; lanes of products with keys are added up without going through memory."""
    target = target_for(cpu)
    operands = [normal((1, length, 4, 32)) for length in (queries, 640, 640)]
    text = assembly(lowered(op.nn.attention, operands, target=target), target)
    assert_in_registers(text, cpu, {8, 16})


def assert_in_registers(text: str, cpu: str, accumulators: set[int]) -> None:
    """Every loop that sums products does so in full vector registers, all of its sums once per step, without spills."""
    assert_loops_in_registers(product_loops(text), cpu, accumulators)


def assert_loops_in_registers(loops: Sequence[ProductLoop], cpu: str, accumulators: set[int]) -> None:
    assert loops, "no loop adds products into registers that it keeps"
    for loop in loops:
        shown = "\n".join(instruction.text for instruction in loop.instructions)
        assert not loop.spills, shown
        assert len(loop.accumulators) in accumulators, shown
        assert len(loop.fused) % len(loop.accumulators) == 0, shown
        assert all(full_vector(cpu).match(instruction.written[0]) for instruction in loop.fused), shown


@pytest.mark.parametrize(("cpu", "rows", "columns"), [("x86-64-v3", 8, 24), ("neoverse-n1", 16, 16)])
def test_a_tile_that_is_too_large_is_noticed(
    cpu: str, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_for(cpu)
    tile = Tile(rows, columns, vector_unit(target).lanes)
    monkeypatch.setattr("harness.compiler.schedules.cpu.schedule.choose_tile", lambda *_: tile)
    module = lowered(lambda x, w: op.matmul(x, w), [normal((96, 512))], [filters(512, 384)], target)
    with pytest.raises(AssertionError):
        assert_in_registers(assembly(module, target), cpu, {tile.size // tile.lanes})
