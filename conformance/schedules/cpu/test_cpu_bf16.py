"""Linear layers with bfloat16 weights on the CPU: both arithmetics, bit for bit as NumPy emulates them."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from tvm import relax

from conformance.support.assembly import assembly, product_loops
from conformance.support.bf16 import ARM, SMALLEST, Processor, hold_to_upstream, linear, product, rounded
from conformance.support.cpus import target_for
from conformance.support.examples import examples
from conformance.support.instructions import AVX2, emulated, emulates
from conformance.support.kernels import functions_of, lowered, machine_of, run, run_module
from conformance.support.operators import normal
from conformance.support.place import computes, cpu_target, executes
from harness.compiler.lowering.route import Route, lower
from harness.compiler.schedules.common.kernel_info import infos_of
from harness.compiler.schedules.cpu import cpu_pipeline
from harness.compiler.schedules.cpu.bf16 import allow_bf16
from harness.compiler.schedules.cpu.microkernels.choice import choose, micro_kernels
from harness.core.precision import ROUNDED_OPERANDS

few = examples(4)
EXTENTS = st.sampled_from([1, 2, 7, 13, 32, 33, 65])
DEPTHS = st.sampled_from([2, 16, 62, 130, 256])

DOT_PRODUCTS = ("znver5", "cooperlake", "sapphirerapids")
ARM_PRODUCTS = ("neoverse-v1", "neoverse-n2", "apple-m2")
INTEGERS = ("x86-64-v3", "znver3", "cascadelake")
SHIFTS = ("x86-64-v4", "neoverse-n1", "apple-m1")
WITHOUT_INSTRUCTION = (*INTEGERS, *SHIFTS)

DAILY = ("znver5", "neoverse-n2", "x86-64-v4", "neoverse-n1")


def assembled(*cpus: str) -> pytest.MarkDecorator:
    """Names the processors whose assembly is read: every night those, too, that have the instructions of one by day."""
    marked = [pytest.param(cpu, marks=[] if cpu in DAILY else pytest.mark.wide) for cpu in cpus]
    return pytest.mark.parametrize("cpu", marked)


def runs(*cpus: str) -> pytest.MarkDecorator:
    lacking = [cpu for cpu in cpus if not computes(target_for(cpu))]
    return pytest.mark.skipif(bool(lacking), reason=f"this machine does not execute code for {' and '.join(lacking)}")


EXECUTED = [
    pytest.param("cooperlake", Processor(flushes=True), marks=runs("cooperlake"), id="dot products"),
    pytest.param("x86-64-v4", Processor(), marks=runs("x86-64-v4"), id="shifts with AVX-512"),
    pytest.param("x86-64-v3", Processor(integers=True), marks=runs("x86-64-v3"), id="integers with AVX2"),
    pytest.param("cascadelake", Processor(integers=True), marks=runs("cascadelake"), id="integers with AVX-512"),
    pytest.param("x86-64", Processor(fuses=False), marks=runs("x86-64"), id="shifts with SSE"),
    pytest.param("neoverse-n1", Processor(), marks=runs("neoverse-n1"), id="shifts with NEON"),
    pytest.param("neoverse-v1", ARM, marks=runs("neoverse-v1"), id="Arm's products"),
]
executed = pytest.mark.parametrize(("cpu", "processor"), EXECUTED)

WITH_INSTRUCTION = {"cooperlake": Processor(flushes=True), "neoverse-v1": ARM}
"""Processors by CPU, one of each instruction set whose instructions multiply more than linear layers."""
with_instruction = pytest.mark.parametrize("cpu", [pytest.param(cpu, marks=runs(cpu)) for cpu in WITH_INSTRUCTION])


# --- bit for bit ---


@executed
@few
@given(rows=EXTENTS, columns=EXTENTS, depth=DEPTHS)
def test_a_linear_layer_is_what_numpy_emulates(
    cpu: str, processor: Processor, rows: int, columns: int, depth: int
) -> None:
    x, weight = normal((rows, depth)), rounded(normal((columns, depth), 1, scale=depth**-0.5))
    actual = run(linear, [x], [weight], target_for(cpu))
    np.testing.assert_array_equal(actual, product(x, weight, processor))


@executed
def test_sums_of_several_chunks(cpu: str, processor: Processor) -> None:
    x, weight = normal((25, 1250)), rounded(normal((70, 1250), 1))
    actual = run(linear, [x], [weight], target_for(cpu))
    np.testing.assert_array_equal(actual, product(x, weight, processor))


def extreme(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Of every size that fp32 has, with zeros of both signs; a few infinite or NaN."""
    random = np.random.default_rng(seed)
    with np.errstate(over="ignore", under="ignore"):
        values = (random.standard_normal(shape) * 2.0 ** random.integers(-149, 127, shape)).astype(np.float32)
    values.flat[::37] = -0.0
    values.flat[5::997] = np.inf
    values.flat[7::997] = np.nan
    return values


@executed
def test_denormals_infinities_and_nan(cpu: str, processor: Processor) -> None:
    """Two terms, so that no large one hides the small ones."""
    x, weight = extreme((600, 2), 0), rounded(extreme((70, 2), 1))
    expected = product(x, weight, processor)
    assert np.isnan(expected).any() and np.isinf(expected).any()
    denormal = (expected != 0) & (np.abs(expected) < SMALLEST)
    assert denormal.any() != processor.flushes, "the inputs make denormal results"
    np.testing.assert_array_equal(run(linear, [x], [weight], target_for(cpu)), expected)


@pytest.mark.smoke
@pytest.mark.parametrize("cpu", [pytest.param(cpu, marks=runs(cpu)) for cpu in ("x86-64", "neoverse-n1")])
def test_activations_are_rounded_to_the_nearest_and_ties_to_even(cpu: str) -> None:
    """Numbers between two neighbours, times ones: what is multiplied is what `ml_dtypes` rounds to."""
    bits = np.arange(0x3F800000, 0x3F830000, 0x0FFF, np.uint32)
    values = np.concatenate([bits, bits | 0x8000, [0x7F7FFFFF, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0xFF800000]])
    x = np.zeros((values.size, 2), np.float32)
    x[:, 1] = values.astype(np.uint32).view(np.float32)
    products = run(linear, [x], [rounded(np.array([[0.0, 1.0]] * 9, np.float32))], target_for(cpu))
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x[:, 1].astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(products, np.stack([expected] * 9, axis=1))


@with_instruction
@pytest.mark.parametrize(("rows", "columns"), [(37, 90), (90, 37), (1, 20)])
@pytest.mark.parametrize("depth", [64, 66])
@pytest.mark.parametrize("swapped", [(False, False), (True, False), (False, True)])
def test_a_product_of_activations_is_what_numpy_emulates(
    cpu: str, rows: int, columns: int, depth: int, swapped: tuple[bool, bool]
) -> None:
    """Of which the larger one streams, whichever way round it is stored."""
    x, y = normal((3, rows, depth)), normal((3, depth, columns), 1)

    def operator(*operands: relax.Expr) -> relax.Expr:
        turned = (relax.op.permute_dims(o, [0, 2, 1]) if s else o for o, s in zip(operands, swapped, strict=True))
        return allow_bf16(relax.op.matmul(*turned))

    stored = [array.swapaxes(1, 2) if s else array for array, s in zip((x, y), swapped, strict=True)]
    processor, panels = WITH_INSTRUCTION[cpu], not (swapped[0] and rows > columns)
    expected = np.stack([product(a, rounded(b.T), processor, panels=panels) for a, b in zip(x, y, strict=True)])
    np.testing.assert_array_equal(run(operator, stored, target=target_for(cpu)), expected)


@runs("cooperlake", "x86-64-v4")
def test_both_arithmetics_agree_where_nothing_is_denormal() -> None:
    x, weight = normal((50, 770), 3), rounded(normal((40, 770), 4))
    results = [run(linear, [x], [weight], target_for(cpu)) for cpu in ("cooperlake", "x86-64-v4")]
    tiles = [infos_of(lowered(linear, [x], [weight], target_for(cpu))) for cpu in ("cooperlake", "x86-64-v4")]
    assert tiles[0]["matmul_bf16"].tile != tiles[1]["matmul_bf16"].tile
    np.testing.assert_array_equal(*results)


# --- what is rounded anyway is stored so ---


def in_turn(x: relax.Expr, first: relax.Expr, second: relax.Expr) -> relax.Expr:
    return linear(linear(x, first), second)


def stored_rounded(names: list[str]) -> bool:
    """Whether one of these kernels multiplies bfloat16 and stores it."""
    return any(name.startswith("matmul_bf16") and name.endswith("_astype") for name in names)


@executed
@few
@given(rows=EXTENTS, columns=EXTENTS, hidden=DEPTHS, depth=DEPTHS)
def test_two_layers_in_turn(cpu: str, processor: Processor, rows: int, columns: int, hidden: int, depth: int) -> None:
    x, first, second = normal((rows, depth)), rounded(normal((hidden, depth), 1)), rounded(normal((columns, hidden), 2))
    assert stored_rounded(functions_of(lowered(in_turn, [x], [first, second], target_for(cpu))))
    actual = run(in_turn, [x], [first, second], target_for(cpu))
    np.testing.assert_array_equal(actual, product(product(x, first, processor), second, processor))


@executed
def test_denormals_infinities_and_nan_between_layers(cpu: str, processor: Processor) -> None:
    """Weights are positive, so that what is infinite stays so."""
    x = extreme((600, 2), 0)
    first, second = (rounded(np.abs(normal(shape, 1))) for shape in ((4, 2), (70, 4)))
    expected = product(product(x, first, processor), second, processor)
    assert np.isnan(expected).any() and np.isinf(expected).any()
    np.testing.assert_array_equal(run(in_turn, [x], [first, second], target_for(cpu)), expected)


@executed
@pytest.mark.parametrize("axes", [None, (0, 2, 1, 3), (0, 3, 1, 2)], ids=["reshaped", "rows moved", "columns moved"])
def test_layers_with_a_move_between(cpu: str, processor: Processor, axes: tuple[int, ...] | None) -> None:
    """Rows are read where they were; columns have to be copied, which is done before anything is rounded."""
    x, first, second = normal((24, 66)), rounded(normal((32, 66), 1)), rounded(normal((20, 32), 2))

    def moved_between(x: relax.Expr, first: relax.Expr, second: relax.Expr) -> relax.Expr:
        between = relax.op.reshape(linear(x, first), (2, 3, 4, 32))
        between = between if axes is None else relax.op.permute_dims(between, axes)
        return linear(relax.op.reshape(between, (24, 32)), second)

    names = functions_of(lowered(moved_between, [x], [first, second], target_for(cpu)))
    assert stored_rounded(names) == (axes != (0, 3, 1, 2)), names
    between = product(x, first, processor).reshape(2, 3, 4, 32)
    between = between if axes is None else between.transpose(axes)
    actual = run(moved_between, [x], [first, second], target_for(cpu))
    np.testing.assert_array_equal(actual, product(between.reshape(24, 32), second, processor))


@executed
def test_what_something_else_reads_is_not_rounded(cpu: str, processor: Processor) -> None:
    x, first, second = normal((24, 66)), rounded(normal((32, 66), 1)), rounded(normal((32, 32), 2))

    def residual(x: relax.Expr, first: relax.Expr, second: relax.Expr) -> relax.Expr:
        hidden = linear(x, first)
        return relax.op.add(hidden, linear(hidden, second))

    hidden = product(x, first, processor)
    actual = run(residual, [x], [first, second], target_for(cpu))
    np.testing.assert_array_equal(actual, hidden + product(hidden, second, processor))


# --- what LLVM makes of it ---


def instructions_of(cpu: str, rows: int) -> set[str]:
    """Instructions for bfloat16 that multiply a left operand of so many rows."""
    if cpu in ARM_PRODUCTS:
        return {"bfmmla" if rows > 1 else "bfdot"}
    return {"vdpbf16ps"} if cpu in DOT_PRODUCTS else set()


SHAPES = [(96, 384, 512), (37, 65, 4736), (1, 260, 256), (2, 260, 256), (96, 8, 256)]


@assembled(*DOT_PRODUCTS, *ARM_PRODUCTS, *SHIFTS)
@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
def test_sums_stay_in_registers(cpu: str, rows: int, columns: int, depth: int) -> None:
    target = target_for(cpu)
    weight = rounded(normal((columns, depth)))
    text = assembly(lowered(linear, [normal((rows, depth))], [weight], target), target)
    loops = product_loops(text)
    assert loops and "multiply_add" not in "".join(i.text for loop in loops for i in loop.instructions)
    for loop in loops:
        shown = "\n".join(instruction.text for instruction in loop.instructions)
        assert not loop.spills, shown
        operations = {i.operation for i in loop.fused}
        products = operations & {"vdpbf16ps", "bfdot", "bfmmla"}
        assert products == instructions_of(cpu, rows), shown
        assert not products or products == operations, shown
        assert len(loop.fused) % len(loop.accumulators) == 0, shown


def test_shifts_are_for_processors_without_an_instruction() -> None:
    def shifts(cpu: str) -> bool:
        return choose(micro_kernels(target_for(cpu)), 1, 64, layer=True).layers_only

    assert not any(map(shifts, (*DOT_PRODUCTS, *ARM_PRODUCTS)))
    assert all(map(shifts, WITHOUT_INSTRUCTION))


# --- what is half ---


def test_a_sum_of_an_odd_number_of_terms_has_fp32_products() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd, self.even = nn.Linear(33, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.even(self.odd(x))

    module = lower(Layer().eval(), (torch.randn(5, 33),), Route(precision="bf16")).module
    names = functions_of(cpu_pipeline(target_for("x86-64-v3"))(module))
    assert {name for name in names if name.startswith("matmul")} == {"matmul_add_astype", "matmul_bf16_vpmaddwd_add"}


class Mixed(nn.Module):
    """A convolution, attention, and linear layers: of what is moved, that share an operand, in a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(8, 64, 3, padding=1), nn.LayerNorm(64)
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64) for _ in range(4))
        self.wide, self.narrow = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.norm(self.conv(x).flatten(2).transpose(1, 2))
        q, k, v = (layer(x).unflatten(2, (2, 32)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.narrow(nn.functional.gelu(self.wide(x))), attended @ x.mT


@pytest.mark.parametrize("cpu", ["x86-64-v4", "x86-64-v3", "neoverse-n1"])
def test_linear_layers_alone_are_half_and_the_rest_is_no_less_accurate(cpu: str) -> None:
    target, block = target_for(cpu), Mixed().eval()
    args, names = (torch.randn(1, 8, 9, 11, generator=torch.Generator().manual_seed(1)),), ("x", "scores")
    made = lower(block, args, Route(precision="bf16"))
    module = cpu_pipeline(target)(made.module)
    compiled = functions_of(module)
    assert {name for name in compiled if name.startswith("matmul_bf16")} and "matmul" in compiled
    if not computes(target):
        pytest.skip("this machine cannot run it")
    hold_to_upstream(block, made, module, args, names, target)


def names_in_bf16(module: nn.Module, *args: torch.Tensor) -> set[str]:
    """Names of the compiled functions of a module in bf16."""
    made = lower(module.eval(), args, Route(precision="bf16"))
    return {name.rstrip("0123456789") for name in functions_of(cpu_pipeline(target_for("znver5"))(made.module))}


def test_with_the_instruction_everything_that_is_multiplied_is_half() -> None:
    names = names_in_bf16(Mixed(), torch.randn(1, 8, 9, 11))
    multiply = {name for name in names if name.startswith(("matmul", "conv2d", "attention"))}
    assert {name.partition("_bf")[0] for name in multiply} == {"matmul", "conv2d", "attention"}, names
    assert all("_bf" in name for name in multiply), names


def test_an_epilogue_is_as_long_as_in_fp32() -> None:
    layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    assert names_in_bf16(layers, torch.randn(9, 64)) == {"pack", "matmul_bf16_add_relu_astype", "matmul_bf16_add"}


class Block(nn.Module):
    """Normalization, attention and the layers that read both; what lies between is a result too if it is asked for."""

    def __init__(self, between: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.out = nn.LayerNorm(64), nn.Linear(64, 64)
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))
        self.between = between

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normal = self.norm(x)
        q, k, v = (layer(normal).unflatten(2, (2, 32)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return (self.out(attended), attended, normal) if self.between else (self.out(attended),)


def test_normalization_and_attention_are_stored_as_their_readers_round_them() -> None:
    x = torch.randn(1, 70, 64, generator=torch.Generator().manual_seed(1))
    names = names_in_bf16(Block(), x)
    assert {"attention_bf16_astype", "layer_norm_astype_70x"} <= names, names
    others = names_in_bf16(Block(between=True), x)
    assert {"attention_bf", "layer_norm_70x"} <= others and "attention_bf16_astype" not in others, others
    results = []
    for block in (Block().eval(), Block(between=True).eval()):
        made, target = lower(block, (x,), Route(precision="bf16")), cpu_target()
        machine = machine_of(cpu_pipeline(target)(made.module), target)
        weights = [tvm.runtime.tensor(weight) for weight in made.parameters().values()]
        outputs = machine["main"](tvm.runtime.tensor(x.numpy()), *machine["main_transform_params"](weights))
        results.append(outputs[0].numpy())
    assert np.array_equal(*results)


class PackedProjections(nn.Module):
    """Attention whose projections share one weight, which is split: queries and keys are of another tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(64, 2)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        attended, _ = self.attention(x + positions, x + positions, x, need_weights=False)
        return attended


def test_parts_of_a_weight_are_weights() -> None:
    x, positions = torch.randn(9, 3, 64), torch.randn(9, 3, 64)
    names = names_in_bf16(PackedProjections(), x, positions)
    assert {name for name in names if "matmul" in name} == {"matmul_bf16_add"}, names


def test_a_table_stays_half_when_it_is_loaded_and_its_rows_are_exact() -> None:
    class Negative(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return -super().forward(input)

    words, tokens = Negative(1 << 14, 64).requires_grad_(False), torch.tensor([[0, 677, 16383]])
    words.weight[0, :4] = torch.tensor([SMALLEST / 8, -0.0, torch.inf, torch.nan])
    made = lower(words, (tokens,), Route(precision="bf16"))
    target = cpu_target()
    machine = machine_of(cpu_pipeline(target)(made.module), target)
    (table,) = made.parameters().values()
    (loaded,) = machine["main_transform_params"]([tvm.runtime.tensor(table)])
    assert (str(loaded.dtype), tuple(loaded.shape)) == ("uint16", words.weight.shape)
    (rows,) = (each.numpy() for each in machine["main"](tvm.runtime.tensor(tokens.numpy()), loaded))
    expected = -rounded(words.weight.numpy())[tokens.numpy()].astype(np.float32)
    np.testing.assert_array_equal(rows.view(np.uint32), expected.view(np.uint32))


def test_fp32_modules_have_no_half_in_them() -> None:
    made = lower(Mixed().eval(), (torch.randn(1, 8, 9, 11),), Route())
    text = cpu_pipeline(target_for("znver5"))(made.module).script()
    assert "bfloat16" not in text and "bf16" not in text


def test_what_falls_to_tvm_is_as_in_fp32() -> None:
    """A linear layer whose rows are counted when it runs, which this kernel does not take."""
    n = tvm.tirx.Var("n", "int64")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([n, 64], "float32"))
    w = relax.Var("w", relax.TensorType([32, 64], "bfloat16"))
    with builder.function("main", [x, w], attrs={"num_input": 1, ROUNDED_OPERANDS: "bfloat16"}):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(linear(x, w)))
        builder.emit_func_output(result)
    target = cpu_target()
    machine = machine_of(cpu_pipeline(target)(builder.get()), target)
    weight = rounded(normal((32, 64), 1))
    loaded = list(machine["main_transform_params"]([tvm.runtime.tensor(weight)]))
    actual = machine["main"](tvm.runtime.tensor(normal((5, 64))), *loaded).numpy()
    np.testing.assert_allclose(actual, normal((5, 64)) @ weight.astype(np.float32).T, rtol=1e-5, atol=1e-5)


# --- what stands in for an instruction ---


@pytest.mark.parametrize("cpu", ["cooperlake", "cascadelake"])
@pytest.mark.parametrize("make", [normal, extreme])
def test_an_emulated_instruction_is_the_instruction(
    cpu: str, make: Callable[[tuple[int, ...], int], np.ndarray]
) -> None:
    """Where the processor has it: the same bits from code for AVX2, denormal, infinite and other numbers alike."""
    target = target_for(cpu)
    if not executes(target) or not emulates(target):
        pytest.skip(f"this machine does not execute code for {cpu}")
    x, weight = make((37, 132), 0), rounded(make((90, 132), 1))
    module = lowered(linear, [x], [weight], target)
    text = assembly(emulated(module), AVX2)
    assert "vdpbf16ps" not in text and "zmm" not in text
    other = run_module(emulated(module), [x], [weight], AVX2)
    np.testing.assert_array_equal(run_module(module, [x], [weight], target).view(np.uint32), other.view(np.uint32))
