"""Products, convolutions and what is fused with them on GPUs: emulated, against PyTorch in float64."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
import tvm
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch.nn import functional as F
from tvm import relax
from tvm.relax import op

from conformance.support.examples import examples
from conformance.support.gpu_programs import target_of
from conformance.support.operators import EPSILON, rms
from harness.compiler.schedules.common.kernel_info import PRODUCT, infos_of
from harness.compiler.schedules.gpu import product
from harness.compiler.schedules.gpu.tile import Tile, choose_tile
from harness.compiler.targets import TARGETS
from harness.compiler.targets.compiling import build_library, lower_module
from harness.core.outcome import Kernel
from harness.core.processes.call import WorkerEnd, run_isolated
from harness.core.processors import THIS_MACHINE

pytestmark = [
    pytest.mark.usefixtures("forked_processes"),
    pytest.mark.skipif(
        platform.machine() not in ("x86_64", "aarch64", "arm64"), reason="threads are emulated on x86-64 and on arm64"
    ),
]


@dataclass(frozen=True)
class Call:
    """One expression: how Relax and PyTorch write it, and the shapes of its operands."""

    relax: Callable[..., relax.Expr]
    torch: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int, ...], ...]


def module_of(calls: Sequence[Call]) -> tvm.IRModule:
    """One function with all operands as parameters and all results."""
    builder = relax.BlockBuilder()
    shapes = [shape for call in calls for shape in call.shapes]
    parameters = [relax.Var(f"x{n}", relax.TensorType(list(s), "float32")) for n, s in enumerate(shapes)]
    rest = iter(parameters)
    with builder.function("main", parameters, attrs={"num_input": len(parameters)}):
        with builder.dataflow():
            results = [builder.emit(builder.normalize(c.relax(*(next(rest) for _ in c.shapes)))) for c in calls]
            output = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(output)
    return builder.get()


def build(kind: str, calls: Sequence[Call], library: Path) -> tuple[Kernel, ...]:
    """The library with all calls, its kernels examined."""
    target = target_of(kind, THIS_MACHINE)
    return build_library(lower_module(module_of(calls), TARGETS[kind], target), target, library, keep_source=True)


def emulated(kind: str, calls: Sequence[Call], arrays: Sequence[np.ndarray], order: str = "run") -> list[np.ndarray]:
    """The results of the generated kernels, run on the CPU."""
    problem = TARGETS[kind].compile_problem()
    if problem:
        pytest.skip(problem)
    if TARGETS[kind].run_problem() is None:
        pytest.skip(f"{kind} runs on this machine, and nothing needs to be emulated")
    with TemporaryDirectory() as folder:
        build(kind, calls, Path(folder) / "model.so")
        request = (kind, str(Path(folder) / "model.so"), [], list(arrays))
        ended = run_isolated(f"conformance.support.emulated:{order}", request, timeout=600)
    assert ended.kind is WorkerEnd.OK, ended.error
    return ended.value


def operands(calls: Sequence[Call]) -> list[np.ndarray]:
    """Random operands of all calls."""
    generator = np.random.default_rng(0)
    return [generator.standard_normal(shape, np.float32) for call in calls for shape in call.shapes]


def hold(calls: Sequence[Call], arrays: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
    """Holds all results to PyTorch in float64: no element further off than the strict gate, errors like PyTorch's."""
    rest = iter(arrays)
    for call, result in zip(calls, results, strict=True):
        tensors = [torch.from_numpy(next(rest)) for _ in call.shapes]
        exact = call.torch(*(t.double() for t in tensors)).numpy()
        assert result.shape == exact.shape
        outside = np.abs(result - exact) > 1e-5 + 1e-5 * np.abs(exact)
        assert not outside.any(), f"{call.shapes}: {outside.sum()} elements outside the strict gate"
        reference = call.torch(*tensors).numpy()
        assert rms(result - exact) <= 1.5 * max(rms(reference - exact), 4 * EPSILON * rms(exact)), call.shapes


def linear(*lead: int, terms: int, columns: int) -> Call:
    """A linear layer with the activation that follows it."""
    return Call(
        lambda x, w, b: op.nn.gelu(op.add(op.matmul(x, op.permute_dims(w)), b)),
        lambda x, w, b: F.gelu(F.linear(x, w, b)),
        ((*lead, terms), (columns, terms), (columns,)),
    )


def matrices(batch: int, rows: int, terms: int, columns: int, transposed: bool = False) -> Call:
    """A batch of products, of a transposed right operand or not."""
    right = (batch, columns, terms) if transposed else (batch, terms, columns)
    return Call(
        lambda a, b: op.matmul(a, op.permute_dims(b, [0, 2, 1]) if transposed else b),
        lambda a, b: torch.matmul(a, b.transpose(1, 2) if transposed else b),
        ((batch, rows, terms), right),
    )


def convolution(image: tuple[int, ...], weight: tuple[int, ...], strides: int = 1, padding: int = 0) -> Call:
    """A convolution with its bias and ReLU."""
    return Call(
        lambda x, w, b: op.nn.relu(op.add(op.nn.conv2d(x, w, strides=strides, padding=padding), b)),
        lambda x, w, b: F.relu(F.conv2d(x, w, stride=strides, padding=padding) + b),
        (image, weight, (1, weight[0], 1, 1)),
    )


def transposed_convolution(image: tuple[int, ...], weight: tuple[int, ...], strides: int) -> Call:
    """A transposed convolution with its bias."""
    return Call(
        lambda x, w, b: op.add(op.nn.conv2d_transpose(x, w, strides=strides), b),
        lambda x, w, b: F.conv_transpose2d(x, w, stride=strides) + b,
        (image, weight, (1, weight[1], 1, 1)),
    )


RESIDUAL = Call(
    lambda x, w, r, s: op.add(op.multiply(op.matmul(x, w), s), r),
    lambda x, w, r, s: torch.matmul(x, w) * s + r,
    ((3, 5, 44), (44, 36), (3, 5, 36), (36,)),
)
"""A projection whose layer scale and residual follow."""

CALLS = [
    linear(33, terms=70, columns=45),
    linear(2, 9, 8, terms=64, columns=72),
    linear(1, terms=96, columns=40),  # a single row
    linear(40, terms=1, columns=12),  # a single term
    linear(150, terms=33, columns=4),  # few columns
    matrices(3, 21, 35, 18),
    matrices(2, 12, 20, 16, transposed=True),
    RESIDUAL,
    convolution((1, 6, 9, 11), (10, 6, 3, 3), padding=1),
    convolution((2, 3, 28, 28), (8, 3, 14, 14), strides=14),
    convolution((1, 8, 6, 6), (12, 8, 1, 1)),
    convolution((3, 5, 7, 7), (16, 5, 7, 7)),  # a kernel as large as the image
    transposed_convolution((1, 6, 5, 7), (6, 9, 2, 2), strides=2),
    transposed_convolution((1, 4, 5, 5), (4, 3, 3, 3), strides=2),  # pixels meet: TVM's way
]
LONG = Call(op.matmul, torch.matmul, ((24, 4096), (4096, 24)))
LARGEST, SMALLER = Tile(8, 8, 16, 8), Tile(8, 8, 8, 8)
TILES = {
    "cuda": (None, "run"),
    "cuda, large tile": (LARGEST, "run_descending"),
    "metal, large tile": (SMALLER, "run_descending"),
}


@pytest.mark.parametrize("name", TILES)
def test_any_shape_with_what_is_fused_behind(name, monkeypatch):
    """Shapes that no tile divides, in both orders of threads, with the tile that is chosen and with large ones."""
    tile, order = TILES[name]
    if tile is not None:
        monkeypatch.setattr(product, "choose_tile", lambda *_: tile)
    kind, arrays = name.split(",")[0], operands(CALLS)
    hold(CALLS, arrays, emulated(kind, CALLS, arrays, order))
    infos = infos_of(lower_module(module_of(CALLS), TARGETS[kind], target_of(kind)))
    assert not [n for n, info in infos.items() if ("matmul" in n or "conv2d" in n) and info.algorithm != PRODUCT]


SIZES = st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 150), st.integers(1, 70), st.booleans())


@examples(1, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(SIZES, min_size=8, max_size=8))
def test_products_of_any_size_and_long_sums(sizes):
    """Long sums are far more accurate than running ones."""
    calls = [*(matrices(*size[:4], transposed=size[4]) for size in sizes), LONG]
    *arrays, left, right = operands(calls)
    *results, long = emulated("cuda", calls, [*arrays, left, right], "run_descending")
    hold(calls[:-1], arrays, results)
    exact, running = left.astype(np.float64) @ right, np.zeros(long.shape, np.float32)
    for k in range(left.shape[1]):
        running += left[:, k : k + 1] * right[k]
    assert rms(long - exact) < 0.2 * rms(running - exact)


def half_calls(dtype: str) -> list[Call]:
    """Products and a convolution of operands that are rounded to half precision, sums in float32."""

    def rounded(x: relax.Expr | torch.Tensor) -> relax.Expr | torch.Tensor:
        if isinstance(x, torch.Tensor):
            return x.to(getattr(torch, dtype)).to(x.dtype)
        return op.astype(x, dtype)

    def product(left: relax.Expr, right: relax.Expr) -> relax.Expr:
        return op.matmul(left, right, out_dtype="float32")

    return [
        Call(
            lambda x, w, b: op.nn.gelu(op.add(product(rounded(x), op.permute_dims(rounded(w))), b)),
            lambda x, w, b: F.gelu(F.linear(rounded(x), rounded(w), b)),
            ((150, 136), (140, 136), (140,)),
        ),
        Call(
            lambda a, b: product(rounded(a), rounded(b)),
            lambda a, b: torch.matmul(rounded(a), rounded(b)),
            ((2, 37, 50), (2, 50, 45)),
        ),
        Call(
            lambda x, w: op.nn.conv2d(rounded(x), rounded(w), padding=1, out_dtype="float32"),
            lambda x, w: F.conv2d(rounded(x), rounded(w), padding=1),
            ((1, 40, 9, 11), (48, 40, 3, 3)),
        ),
    ]


def test_half_operands_on_tensor_cores():
    calls = [*half_calls("float16"), *half_calls("bfloat16")]
    arrays = operands(calls)
    hold(calls, arrays, emulated("cuda", calls, arrays, "run_descending"))
    infos = infos_of(lower_module(module_of(calls), TARGETS["cuda"], target_of("cuda"))).values()
    assert [info.decisions.get("multiplied on") for info in infos].count("tensor cores") == len(calls)


@given(*[st.integers(1, 9000)] * 3, st.sampled_from([32768, 49152]))
def test_a_tile_fits_a_block(batch, rows, columns, shared_bytes):
    tile = choose_tile(batch, rows, columns, shared_bytes, 1024)
    assert tile.shared_bytes <= shared_bytes and tile.threads <= 1024
    assert tile.blocks(batch, rows, columns) * tile.height * tile.width >= batch * rows * columns


@pytest.mark.cuda
def test_a_linear_layer_of_the_trunk_fits_into_registers(tmp_path):
    """What nvcc reports for the widest layer: no spills, and two blocks or more on each multiprocessor."""
    problem = TARGETS["cuda"].compile_problem()
    if problem:
        pytest.skip(problem)
    kernels = build("cuda", [linear(5184, terms=1024, columns=4736)], tmp_path / "model.so")
    products = [kernel for kernel in kernels if "matmul" in kernel.name]
    assert products
    for kernel in products:
        assert kernel.spill_bytes == 0, kernel
        assert kernel.registers is not None and kernel.threads is not None
        # Of a multiprocessor: 65536 registers, 100 KB of shared memory on sm_86 and sm_89, more on others.
        assert 2 * kernel.registers * kernel.threads <= 65536 and 2 * kernel.shared_bytes <= 100 * 1024, kernel
