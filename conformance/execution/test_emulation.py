"""Emulation: generated CUDA and Metal kernels, run on the CPU, compute what PyTorch does; and broken ones are told."""

from __future__ import annotations

import ctypes
import platform
import struct

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.support.gpu_programs import target_of
from conformance.targets.test_targets import MODULES
from harness.compiler.execution.emulation.device import DeviceModule, compile_kernels, read_device_module
from harness.compiler.execution.executors import is_emulated
from harness.compiler.lowering.frontends.exporting import export_program
from harness.compiler.lowering.frontends.torch_export.importing import import_program
from harness.compiler.targets import TARGETS
from harness.compiler.targets.compiling import build_library, lower_module
from harness.compiler.targets.serialized import Launch
from harness.core.case import Case
from harness.core.processes.call import WorkerEnd, run_isolated
from harness.models.registry import subjects

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64", "arm64"), reason="threads are emulated on x86-64 and on arm64"
)


# --- one kernel ---


def launched(body: str, grid: int, block: int, arrays: list[np.ndarray], *options: str, scalars: tuple = ()) -> None:
    """Runs a CUDA kernel, written as TVM writes them, with the arrays as arguments `a`, `b`, … and scalars after."""
    kinds = {"float32": "float", "int32": "int", "int64": "int64_t", "int8": "signed char"}
    kinds |= {"float16": "half", "uint16": "nv_bfloat16"}
    parameters = [f"{kinds[array.dtype.name]}* __restrict__ {'abcdef'[i]}" for i, array in enumerate(arrays)]
    parameters += [f"{'float' if isinstance(x, float) else 'int64_t'} s{i}" for i, x in enumerate(scalars)]
    signature = f'extern "C" __global__ void __launch_bounds__({block}) k({", ".join(parameters)})'
    headers = "".join(f"#include <{name}>\n" for name in ("cstdint", "cuda.h", "cuda_fp16.h", "cuda_bf16.h", "mma.h"))
    source = f"{headers}{signature};\n{signature} {{\n{body}\n}}\n"
    module = DeviceModule(source, (Launch("k", len(parameters), ("blockIdx.x", "threadIdx.x")),))
    assert all(array.flags.c_contiguous for array in arrays)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
    compile_kernels(module, "cuda", *options)["k"](*pointers, *scalars, grid, block)


def test_an_elementwise_kernel():
    x, y = np.arange(1000, dtype=np.float32), np.zeros(1000, np.float32)
    body = """  int i = blockIdx.x * 128 + (int)threadIdx.x;
  if (i < s1) { b[i] = max(a[i], 3.0f) * s0 + 1.0f; }"""
    launched(body, 8, 128, [x, y], scalars=(0.5, 1000))
    np.testing.assert_array_equal(y, np.maximum(x, 3) * np.float32(0.5) + 1)


PREFIX_SUMS = """  __shared__ alignas(64) int s[96];
  s[threadIdx.x] = a[blockIdx.x * 96 + threadIdx.x];
  for (int step = 1; step < 96; step *= 2) {
    __syncthreads();
    int value = (int)threadIdx.x >= step ? s[threadIdx.x - step] : 0;
    BARRIER
    s[threadIdx.x] += value;
  }
  __syncthreads();
  b[blockIdx.x * 96 + threadIdx.x] = s[threadIdx.x];"""


@pytest.mark.parametrize("options", [(), ("-DEMULATED_DESCENDING",)], ids=["ascending", "descending"])
def test_threads_of_a_block_wait_for_each_other(options):
    x = np.random.default_rng(0).integers(-9, 9, (5, 96), dtype=np.int32)
    y = np.zeros_like(x)
    launched(PREFIX_SUMS.replace("BARRIER", "__syncthreads();"), 5, 96, [x, y], *options)
    np.testing.assert_array_equal(y, np.cumsum(x, axis=1))


def test_a_missing_barrier_shows_in_one_of_the_orders():
    x = np.ones((1, 96), np.int32)
    wrong = []
    for options in ((), ("-DEMULATED_DESCENDING",)):
        y = np.zeros_like(x)
        launched(PREFIX_SUMS.replace("BARRIER", ""), 1, 96, [x, y], *options)
        wrong.append(not np.array_equal(y, np.cumsum(x, axis=1)))
    assert any(wrong)


def test_a_barrier_that_some_threads_leave_out_is_an_error():
    with pytest.raises(RuntimeError, match="emulated kernel k: some threads of a block are at a barrier that others"):
        launched("  if (threadIdx.x < 7) { __syncthreads(); }\n  a[0] = 1.0f;", 1, 33, [np.zeros(1, np.float32)])


def test_a_block_of_too_many_threads_is_an_error():
    with pytest.raises(RuntimeError, match="a block has more than 1024 threads"):
        launched("  a[0] = 1.0f;", 1, 1025, [np.zeros(1, np.float32)])


@pytest.mark.parametrize("width", [2, 8, 32])
@pytest.mark.parametrize("shift", [0, 1, 5])
def test_shuffles_move_values_within_their_segment(width, shift):
    x = np.arange(64, dtype=np.int64) + (1 << 40)
    down, up, xor, fixed = (np.zeros_like(x) for _ in range(4))
    body = f"""  int64_t v = a[threadIdx.x];
  b[threadIdx.x] = __shfl_down_sync(0xffffffffu, v, {shift}, {width});
  c[threadIdx.x] = __shfl_up_sync(0xffffffffu, v, {shift}, {width});
  d[threadIdx.x] = __shfl_xor_sync(0xffffffffu, v, {shift}, {width});
  e[threadIdx.x] = __shfl_sync(0xffffffffu, v, {shift}, {width});"""
    launched(body, 1, 64, [x, down, up, xor, fixed])
    lane = np.arange(64)
    inside = lane % width
    np.testing.assert_array_equal(down, x[np.where(inside + shift < width, lane + shift, lane)])
    np.testing.assert_array_equal(up, x[np.where(inside >= shift, lane - shift, lane)])
    np.testing.assert_array_equal(xor, x[np.where((lane ^ shift) // width == lane // width, lane ^ shift, lane)])
    np.testing.assert_array_equal(fixed, x[lane - inside + shift % width])


def test_a_lane_that_takes_no_part_gives_nothing_that_looks_right():
    x, y = np.ones(32, np.float32), np.zeros(32, np.float32)
    body = "  if (threadIdx.x < 16) { b[threadIdx.x] = __shfl_down_sync(65535u, a[threadIdx.x], 8, 32); }"
    launched(body, 1, 32, [x, y])
    np.testing.assert_array_equal(y[:8], 1)
    assert np.isnan(y[8:16]).all()
    np.testing.assert_array_equal(y[16:], 0)


def test_source_that_is_not_emulated_is_told():
    for body in ("  __nv_fp8_e4m3 x = a[0];", "  cp_async(a);"):
        with pytest.raises(RuntimeError, match=r"clang rejected the generated kernels: .*(undeclared|unknown type)"):
            launched(body, 1, 32, [np.zeros(1, np.float32)])


def floats_at_the_edges() -> np.ndarray:
    """Every bfloat16 that is a number, the values halfway to the next, and what lies just beside those."""
    bits = np.arange(1 << 16, dtype=np.uint32) << 16
    every = np.concatenate([bits, bits | 0x7FFF, bits | 0x8000, bits | 0x8001]).view(np.float32)
    return every[np.isfinite(every)]


def test_floats_are_rounded_to_the_nearest_half_and_bfloat16():
    x = np.concatenate(
        [floats_at_the_edges(), np.float32([np.inf, -np.inf, 65519.9, 65520, 1 + 2**-11, 1 + 3 * 2**-11])]
    )
    x = np.resize(x, -(-len(x) // 256) * 256)
    half, brain, back = np.zeros(len(x), np.float16), np.zeros(len(x), np.uint16), np.zeros_like(x)
    body = """  int i = blockIdx.x * 256 + (int)threadIdx.x;
  b[i] = (half)a[i];
  c[i] = (nv_bfloat16)a[i];
  d[i] = (float)c[i];"""
    launched(body, len(x) // 256, 256, [x, half, brain, back])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(half, x.astype(np.float16))
    expected = x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(brain, expected.view(np.uint16))
    np.testing.assert_array_equal(back, expected.astype(np.float32))


@pytest.mark.parametrize("shape", [(16, 16), (32, 8), (8, 32)])
@pytest.mark.parametrize("layout", ["row", "col"])
def test_a_warp_multiplies_matrices_with_float32_sums(shape, layout):
    m, n = shape
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-300, 300, size).astype(np.float16) for size in ((m, 16), (16, n)))
    result = np.zeros((m, n), np.float32)
    stored = b if layout == "row" else np.ascontiguousarray(b.T)
    tile = f"{m}, {n}, 16"
    body = f"""  using namespace nvcuda::wmma;
  fragment<matrix_a, {tile}, half, row_major> x;
  fragment<matrix_b, {tile}, half, {layout}_major> y;
  fragment<accumulator, {tile}, float> sums;
  fill_fragment(sums, 1.0f);
  load_matrix_sync(x, a, 16);
  load_matrix_sync(y, b, {n if layout == "row" else 16});
  mma_sync(sums, x, y, sums);
  for (int i = 0; i < sums.num_elements; ++i) sums.x[i] *= 2.0f;
  store_matrix_sync(c, sums, {n}, mem_row_major);"""
    launched(body, 1, 32, [a, stored, result])
    np.testing.assert_array_equal(result, 2 * (1 + a.astype(np.float32) @ b.astype(np.float32)))


# --- what a library carries ---

NAMES = st.text("abcxyz_", min_size=1, max_size=9)
LAUNCHES = st.builds(
    Launch, NAMES, st.integers(0, 9), st.lists(st.sampled_from(["blockIdx.x", "threadIdx.y"]), max_size=3).map(tuple)
)


def saved(kind: str, module: DeviceModule) -> bytes:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    data = text(kind) + struct.pack("<Q", len(module.launches))
    for launch in module.launches:
        data += text(launch.name) * 2 + struct.pack("<Q", launch.arguments) + b"\2\x20\1\0" * launch.arguments
        data += struct.pack("<Q", len(launch.extents)) + b"".join(map(text, launch.extents)) + struct.pack("<Q", 0)
    return data + text(module.source)


@given(st.text(max_size=40), st.lists(LAUNCHES, max_size=4, unique_by=lambda launch: launch.name))
def test_what_was_saved_is_read(source, launches):
    module = DeviceModule(source, tuple(launches))
    data = saved("cuda", module)
    assert read_device_module("cuda", data) == module
    with pytest.raises(RuntimeError, match="ends too early"):
        read_device_module("cuda", data[:-1] if source else data[:-8])


def test_machine_code_is_not_emulated():
    with pytest.raises(RuntimeError, match="the library holds cubin for cuda, and only source can be emulated"):
        read_device_module("cuda", saved("cubin", DeviceModule("", ())))


# --- layers ---


KINDS = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("cuda", "metal")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODULES)
def test_layers_compute_what_pytorch_does(kind, name, tmp_path):
    """Every kernel of `MODULES`: products, reductions over shared memory and shuffles, softmax, convolution, copies."""
    problem = TARGETS[kind].compile_problem()
    if problem:
        pytest.skip(problem)
    if TARGETS[kind].run_problem() is None:
        pytest.skip(f"{kind} runs on this machine, and nothing needs to be emulated")
    module, args = MODULES[name]
    program, parameters = import_program(export_program(module, args))
    target = target_of(kind)
    lowered = lower_module(program, TARGETS[kind], target)
    build_library(lowered, target, tmp_path / "model.so", keep_source=True)
    request = (kind, str(tmp_path / "model.so"), list(parameters.values()), [arg.numpy() for arg in args])
    ended = run_isolated("conformance.support.emulated:run", request, timeout=600)
    assert ended.kind is WorkerEnd.OK, ended.error
    with torch.no_grad():
        expected = module(*args)
    for result, reference in zip(ended.value, expected if isinstance(expected, tuple) else (expected,), strict=True):
        np.testing.assert_allclose(result, reference.numpy(), rtol=1e-5, atol=1e-5)


def test_only_cheap_components_are_emulated_and_never_beside_a_device(monkeypatch):
    def emulated(component: str, target: str, precision: str = "fp32", every: bool = False) -> bool:
        case = Case(component, "real", target, precision=precision)
        return is_emulated(case, subjects()[component].emulated, every)

    for kind in ("cuda", "metal"):
        if TARGETS[kind].run_problem() is not None:
            cheap = {name for name in subjects() if emulated(name, kind)}
            assert len(cheap) == 8 and not cheap & {"vit", "vision_backbone", "image_encoder", "end_to_end"}
            assert emulated("vit", kind, every=True)
            assert {name for name in cheap if not emulated(name, kind, "fp16")} == {"transformer_encoder"}
        monkeypatch.setitem(TARGETS, kind, TARGETS["llvm"])  # a target that runs here
        assert not emulated("box_head", kind)
    assert not emulated("box_head", "llvm", every=True)
