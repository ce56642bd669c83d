"""Targets: what they say about this machine is true, and their pipelines compile real layers, by real compilers."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
import tvm
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from tvm import relax
from tvm.target import codegen

from conformance.support.machines import file_system
from conformance.support.sentences import sentence
from harness.compiler.lowering.frontends.exporting import export_program
from harness.compiler.lowering.frontends.torch_export.importing import import_program
from harness.compiler.schedules.common.kernel_info import LostSchedule, info_of, lost_schedules
from harness.compiler.schedules.gpu.rules import schedule_kernel, schedule_kernels
from harness.compiler.targets import TARGETS, cuda, linking, llvm
from harness.compiler.targets.compiling import compile_module, examine_kernels
from harness.compiler.targets.llvm import required_cpu
from harness.compiler.targets.metal import exact_constants, survives
from harness.compiler.targets.metal_source import check_metal, complete_source
from harness.core.errors import HarnessError
from harness.core.processes.call import run_isolated
from harness.core.processes.threads import configure_threads, tvm_threads
from harness.core.processors import THIS_MACHINE, Processors
from harness.runtime import cpu
from harness.runtime.executable import Executable
from harness.runtime.threads import VARIABLE, cgroup_quota, usable_cpus

ROOT = Path(__file__).resolve().parents[2]


class Layers(nn.Module):
    """One of each kind of layer in SAM 3, small: convolution, norms, attention, GELU, reduction, a single score."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.group_norm = nn.GroupNorm(4, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.proj = nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.score = nn.Linear(16, 1)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.group_norm(self.patches(image)).flatten(2).transpose(1, 2)
        batch, length, width = tokens.shape
        q, k, v = self.qkv(self.norm(tokens)).reshape(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        tokens = tokens + self.proj(attended)
        tokens = tokens + self.down(nn.functional.gelu(self.up(self.norm(tokens))))
        return tokens, torch.sigmoid(self.score(tokens.mean(1)))


class ScoringHead(nn.Module):
    """Products of a batch of matrices with one vector each, as at the end of SAM 3's scoring head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.prompt, self.query = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, prompt: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        pooled = self.prompt(prompt).mean(dim=0)
        return torch.matmul(self.query(queries), pooled.unsqueeze(-1)).clamp(-12, 12)


class Regions(nn.Module):
    """Averages over boxes, whose inner loops have a length that depends on the box."""

    def forward(self, features: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        return torchvision.ops.roi_align(features, [boxes], 7)


BOXES = torch.tensor([[1.0, 2.0, 6.5, 8.0], [0.0, 0.0, 8.9, 4.0], [3.0, 3.0, 3.5, 3.5]])
MODULES = {
    "layers": (Layers().eval(), (torch.rand(1, 3, 24, 32, generator=torch.Generator().manual_seed(0)),)),
    "scoring": (ScoringHead().eval(), (torch.ones(7, 1, 256), torch.ones(6, 1, 200, 256))),
    "regions": (Regions().eval(), (torch.rand(1, 4, 9, 9, generator=torch.Generator().manual_seed(0)), BOXES)),
}


def compile_for(name: str, module: nn.Module, args: tuple, processors: Processors = THIS_MACHINE) -> relax.VMExecutable:
    target = TARGETS[name].tvm_target(processors)
    program, _ = import_program(export_program(module, args))
    with target, tvm.transform.PassContext(opt_level=3):
        return relax.build(TARGETS[name].pipeline(target)(program), target, relax_pipeline=None)


def device_source(executable: relax.VMExecutable, kind: str) -> str:
    """Source of the device module inside the compiled library."""
    waiting = [executable.mod]
    for module in waiting:  # grows while it is walked
        if module.kind == kind:
            return module.inspect_source(kind)
        waiting.extend(module.imports)
    raise AssertionError(f"no {kind} module was generated")


def test_the_registry_is_light():
    """Names of targets, strategies and components load neither torch nor tvm."""
    code = (
        "import sys, harness, harness.compiler.targets, harness.compiler.lowering.rope, harness.models.sam3.components;"
        "print([m for m in ('torch', 'tvm', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Upsampled(nn.Module):
    """A convolution of an image that nearest neighbours make twice as large."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 40, 3, padding=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.conv(nn.functional.interpolate(image, scale_factor=2.0, mode="nearest"))


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_says_whether_an_upsampled_image_is_made(name: str) -> None:
    target = TARGETS[name].tvm_target()
    program, _ = import_program(export_program(Upsampled().eval(), (torch.rand(1, 64, 12, 16),)))
    with target, tvm.transform.PassContext(opt_level=3):
        lowered = TARGETS[name].pipeline(target)(program)
    functions = [function for _, function in lowered.functions_items() if isinstance(function, tvm.tirx.PrimFunc)]
    shapes = {tuple(map(int, buffer.ty.shape)) for function in functions for buffer in function.params}
    assert ((1, 64, 24, 32) in shapes) != TARGETS[name].upsampling


@pytest.mark.parametrize("name", TARGETS)
def test_problems_are_none_or_one_sentence(name):
    target = TARGETS[name]
    assert target.name == name
    for problem in (target.compile_problem(), target.run_problem()):
        assert problem is None or (problem.strip() == problem and "\n" not in problem and len(problem) > 10)
    if target.run_problem() is None:
        assert target.device().exist


# --- llvm ---


def test_llvm_compiles_for_this_cpu_and_no_more():
    target = llvm.llvm_target()
    assert int(target.attrs["num-cores"]) == usable_cpus()
    promised = set(codegen.llvm_get_cpu_features(target)) & set(cpu.VECTOR_FEATURES)
    present = cpu.cpu_features()
    assert present is None or promised <= present
    assert TARGETS["llvm"].compile_problem() is None
    assert TARGETS["llvm"].run_problem() is None


def test_another_cpu_can_be_named():
    named = {"x86_64": "x86-64-v3", "arm64": "apple-m2", "aarch64": "cortex-a72"}[platform.machine()]
    assert llvm.llvm_target(Processors(cpu=named)).attrs["mcpu"] == named
    with pytest.raises(HarnessError, match=sentence("unknown-cpu", name="z80", cpu_variable="SAM3_TVM_MCPU")):
        llvm.llvm_target(Processors(cpu="z80"))


@pytest.mark.skipif(platform.system() != "Linux", reason="a CPU's name tells no system, so it is Linux on both sides")
def test_a_cpu_of_the_other_architecture_can_be_named(tmp_path):
    named, triple, machine = {
        "x86_64": ("neoverse-n1", "aarch64-linux-gnu", 183),
        "aarch64": ("x86-64-v3", "x86_64-linux-gnu", 62),
    }[cpu.architecture()]
    processors = Processors(cpu=named)
    target = llvm.llvm_target(processors)
    assert (target.attrs["mcpu"], target.attrs["mtriple"]) == (named, triple)
    problem = TARGETS["llvm"].run_problem(processors)
    assert problem is not None and f"compiled for {named}, whose " in problem
    program, _ = import_program(export_program(*MODULES["scoring"]))
    library = tmp_path / "model.so"
    compile_module(program, TARGETS["llvm"], library, processors=processors)
    assert int.from_bytes(library.read_bytes()[18:20], "little") == machine  # e_machine of ELF
    assert "mtriple" not in llvm.llvm_target(Processors(cpu="generic")).attrs


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("x86-64-v3+tmx", sentence("unknown-unit", unit="tmx", units="amx")),
        ("neoverse-n1+amx", sentence("foreign-unit", unit="amx")),
        ("z80+amx", sentence("unknown-cpu", name="z80")),
    ],
)
def test_a_unit_behind_a_name_that_is_none_is_one_sentence(named, words):
    with pytest.raises(HarnessError, match=words):
        llvm.host_of(Processors(named))


def test_a_unit_is_named_behind_the_cpu():
    named, plain = (llvm.llvm_target(Processors(cpu)) for cpu in ("sapphirerapids+amx", "sapphirerapids"))
    assert (named.attrs["mcpu"], list(named.attrs["mattr"])) == ("sapphirerapids", ["+amx-tile", "+amx-bf16"])
    assert "mattr" not in plain.attrs
    assert set(required_cpu(named)[1]) - set(required_cpu(plain)[1]) == {"amx-tile", "amx-bf16"}


X86_LEVEL_FEATURES = {
    "x86-64": frozenset(),
    "x86-64-v2": frozenset({"cx16", "popcnt", "sse3", "ssse3", "sse4.1", "sse4.2"}),
    "x86-64-v3": frozenset({"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"}),
    "x86-64-v4": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
}


EVERY_FEATURE = frozenset().union(*X86_LEVEL_FEATURES.values())


@given(st.frozensets(st.sampled_from(sorted(EVERY_FEATURE))))
def test_a_cpu_whose_features_are_hidden_falls_back_to_what_is_there(hidden):
    """Whatever a hypervisor hides, the chosen CPU promises no more than is left."""
    chosen = llvm.safe_cpu("znver5", EVERY_FEATURE, EVERY_FEATURE - hidden)
    if not hidden & set(cpu.VECTOR_FEATURES):
        assert chosen == "znver5"
    else:
        levels = list(X86_LEVEL_FEATURES)
        promised = frozenset().union(*(X86_LEVEL_FEATURES[level] for level in levels[: levels.index(chosen) + 1]))
        assert not promised & hidden
        better = levels[levels.index(chosen) + 1 :]
        assert not better or X86_LEVEL_FEATURES[better[0]] & hidden


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels are those of x86-64")
def test_the_levels_are_llvms():
    """Against LLVM's own table of what each level means, for the instruction sets that it names."""
    before: set[str] = set()
    for level, added in X86_LEVEL_FEATURES.items():
        known = set(codegen.llvm_get_cpu_features(tvm.target.Target({"kind": "llvm", "mcpu": level})))
        assert added <= known - before
        assert cpu.x86_level(frozenset(known)) == level
        before = known


def test_a_machine_that_does_not_tell_its_features_is_trusted():
    assert llvm.safe_cpu("apple-m1", frozenset({"fma"}), None) == "apple-m1"


@pytest.mark.parametrize("name", MODULES)
def test_llvm_runs_what_it_compiled(name, tmp_path):
    module, args = MODULES[name]
    program, parameters = import_program(export_program(module, args))
    compile_module(program, TARGETS["llvm"], tmp_path / "model.so")
    results = Executable(tmp_path / "model.so", tvm.cpu(), list(parameters.values())).run([arg.numpy() for arg in args])
    with torch.no_grad():
        expected = module(*args)
    for result, reference in zip(results, expected if isinstance(expected, tuple) else (expected,), strict=True):
        np.testing.assert_allclose(result, reference.numpy(), rtol=1e-5, atol=1e-5)


# --- cuda ---


@pytest.mark.cuda
@pytest.mark.parametrize("name", MODULES)
def test_cuda_kernels_are_compiled_by_nvcc(nvcc, name):
    processors = Processors(cuda="sm_90")
    before = cuda.compile_source.cache_info().misses
    with TARGETS["cuda"].tvm_target(processors) as target, examine_kernels(target) as kernels:
        executable = compile_for("cuda", *MODULES[name], processors)
    assert cuda.compile_source.cache_info().misses == before + 1  # nvcc ran while it was built, not here
    source = device_source(executable, "cuda")
    assert cuda.compile_source(source, ("sm_90",)).binary.startswith(b"\x7fELF")
    assert {kernel.name for kernel in kernels} == set(re.findall(r"__global__ .*?(\w+)\(float", source))
    for kernel in kernels:
        assert kernel.architecture == "sm_90"
        assert 0 < kernel.registers <= 255 and 0 < kernel.threads <= 1024
        # of the same source, ptxas aligns what the declarations add up to
        declared = re.search(rf"__global__ [^;]*?{kernel.name}\([^)]*\) {{(.*?)^}}", source, re.S | re.M)[1]
        arrays = re.findall(r"__shared__ alignas\(\d+\) (\w+) \w+\[(\d+)\]", declared)
        assert kernel.shared_bytes >= sum(int(n) * {"float": 4, "float2": 8, "int64_t": 8}[kind] for kind, n in arrays)


KERNEL = 'extern "C" __global__ void kernel(float* x) { x[threadIdx.x] = expf(x[threadIdx.x]) / 3.0f; }'


@pytest.mark.cuda
def test_every_listed_architecture_is_compiled_for_where_none_is_named(nvcc):
    if not tvm.cuda().exist:
        assert cuda.architectures(cuda.cuda_target()) == cuda.ARCHITECTURES
    assert cuda.architectures(cuda.cuda_target(Processors(cuda="sm_86"))) == ("sm_86",)
    compiled = cuda.compile_source(KERNEL, cuda.ARCHITECTURES)
    assert compiled.binary.startswith(b"\x50\xed\x55\xba")  # a fatbin
    assert sorted(kernel.architecture for kernel in compiled.kernels) == list(cuda.ARCHITECTURES)


SPILLING = """
extern "C" __global__ void __launch_bounds__(1024) spilling(float* x) {
  __shared__ float s[768];
  float a[160];
  for (int i = 0; i < 160; ++i) a[i] = x[i * 1024 + threadIdx.x];
  s[threadIdx.x % 768] = a[0];
  __syncthreads();
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int i = 0; i < 160; ++i) a[i] = a[(i + 1) % 160] * a[i] + s[i];
  }
  for (int i = 0; i < 160; ++i) x[i * 1024 + threadIdx.x] = a[i];
}
"""


@pytest.mark.cuda
def test_what_a_kernel_uses_is_read_from_the_compilers_report(nvcc):
    (spilling,) = cuda.compile_source(SPILLING, ("sm_90",)).kernels
    assert (spilling.name, spilling.architecture, spilling.shared_bytes) == ("spilling", "sm_90", 768 * 4)
    assert spilling.registers == 64  # 64 Ki registers of a multiprocessor for 1024 threads
    assert spilling.spill_bytes > 0 and spilling.stack_bytes > 0
    (plain,) = cuda.compile_source(KERNEL, ("sm_90",)).kernels
    assert (plain.spill_bytes, plain.stack_bytes, plain.shared_bytes) == (0, 0, 0)


@pytest.mark.cuda
def test_a_block_of_too_many_threads_is_refused(nvcc):
    with pytest.raises(RuntimeError, match="CUDA kernel kernel: 1056 threads in a block, at most 1024"):
        cuda.examine(KERNEL, {"kernel": 1056}, TARGETS["cuda"].tvm_target())


@pytest.mark.cuda
def test_cuda_is_compiled_without_fast_math(nvcc, tmp_path):
    """Rounding a division correctly takes a subroutine, which fast math leaves out: its binary is smaller."""
    source = KERNEL.replace("3.0f", "x[0]")
    (tmp_path / "kernel.cu").write_text(source)
    sizes = {}
    for flags in ((), ("--use_fast_math",)):
        options = ["--cubin", "--generate-code=arch=compute_90,code=[sm_90]", "-O3", *flags]
        command = [str(cuda.find_nvcc()), *options, "-o", "kernel.cubin", "kernel.cu"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        sizes[flags] = (tmp_path / "kernel.cubin").stat().st_size
    assert len(cuda.compile_source(source, ("sm_90",)).binary) == sizes[()] > sizes[("--use_fast_math",)]


@pytest.mark.cuda
def test_source_that_nvcc_rejects_is_an_error(nvcc):
    with pytest.raises(RuntimeError, match="nvcc rejected the generated kernels"):
        cuda.compile_source("this is not CUDA", ("sm_90",))


def test_without_nvcc_there_is_a_reason(monkeypatch):
    monkeypatch.setattr(cuda, "find_nvcc", lambda: None)
    assert "nvcc was not found" in cuda.compile_problem()


def test_nvcc_is_found_below_cuda_path(monkeypatch, tmp_path):
    compiler = tmp_path / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    assert cuda.find_nvcc() == compiler


def test_a_wrong_architecture_is_the_users_mistake():
    with pytest.raises(
        HarnessError, match=sentence("unknown-architecture", arch="hopper", cuda_variable="SAM3_TVM_CUDA_ARCH")
    ):
        cuda.cuda_target(Processors(cuda="hopper"))


# --- metal ---


@pytest.mark.metal
@pytest.mark.parametrize("name", MODULES)
def test_metal_source_is_generated_and_checked(name):
    problem = TARGETS["metal"].compile_problem()
    if problem:
        pytest.skip(problem)
    with TARGETS["metal"].tvm_target() as target, examine_kernels(target) as kernels:
        executable = compile_for("metal", *MODULES[name])
    source = device_source(executable, "metal")
    assert [kernel.name for kernel in kernels] == re.findall(r"kernel void (\w+)\(", source)
    assert "#include <metal_stdlib>" in source
    assert all(0 < kernel.threads <= 1024 and 0 < kernel.buffers <= 31 for kernel in kernels)


def metal_kernel(body: str, buffers: int = 1) -> str:
    arguments = ", ".join(f"device float* b{n} [[ buffer({n}) ]]" for n in range(buffers))
    return f"""// Function: k
#include <metal_stdlib>
using namespace metal;

kernel void k({arguments},
  uint2 blockIdx [[threadgroup_position_in_grid]],
  uint2 threadIdx [[thread_position_in_threadgroup]]
) {{
  {body}
}}
"""


METAL_ALLOWED = {
    "all threadgroup memory": (metal_kernel("threadgroup float s[8192];\n s[threadIdx.x] = b0[0];"), 1024),
    "all buffers": (metal_kernel("b30[threadIdx.x] = b0[0];", 31), 32),
    "vectors": (metal_kernel("*(device float4*)(b0 + 4) = float4(1.0f, b0[0], 2.0f, 3.0f) * 2.0f;"), 32),
    "shuffles of 64 bits": (metal_kernel("long x = 3;\n b0[0] = simd_shuffle_down(x, 16);"), 32),
}
METAL_VIOLATIONS = {
    "threadgroup memory": (
        metal_kernel("threadgroup float4 s[2048];\n threadgroup bool t[1];\n t[0] = s[0].x == b0[0];"),
        32,
        "k: 32769 bytes of threadgroup memory, at most 32768",
    ),
    "threads": (metal_kernel(""), 1025, "k: 1025 threads in a threadgroup, at most 1024"),
    "buffers": (metal_kernel("", 32), 32, "k: 32 buffers, at most 31"),
    "double": (metal_kernel("double x = b0[0];"), 32, "k: it computes in double"),
    "64-bit atomics": (metal_kernel("device atomic_ulong* x;"), 32, "k: it has 64-bit atomics"),
    "a name that Metal does not have": (metal_kernel("b0[0] = erf(b0[1]);"), 32, "k, line 9: .*erf"),
    "an ambiguous overload": (metal_kernel("long n = 1;\n b0[0] = max(n, 2);"), 32, "k, line 10: .*ambiguous"),
    "another address space": (
        metal_kernel("threadgroup float s[4];\n device float* p = (threadgroup float*)(s + 1);\n *p = 1.0f;"),
        32,
        "k, line 10: cannot initialize .* 'device float \\*' with .* 'threadgroup float \\*'",
    ),
    "no grammar": (metal_kernel("b0[0] = ;"), 32, "k, line 9: expected expression"),
}


@pytest.mark.metal
@pytest.mark.parametrize(("source", "threads"), METAL_ALLOWED.values(), ids=METAL_ALLOWED)
def test_metal_that_every_apple_gpu_takes(source, threads):
    (kernel,) = check_metal(complete_source(source), {"k": threads})
    assert (kernel.name, kernel.threads) == ("k", threads)


@pytest.mark.metal
@pytest.mark.parametrize(("source", "threads", "told"), METAL_VIOLATIONS.values(), ids=METAL_VIOLATIONS)
def test_metal_that_an_apple_gpu_would_not_take_is_refused(source, threads, told):
    with pytest.raises(RuntimeError, match=f"Metal kernel {told}"):
        check_metal(complete_source(source), {"k": threads})


@given(st.floats(width=32, allow_nan=False))
def test_a_constant_that_seven_digits_would_change_is_known(value):
    written = np.float32(f"{value:e}") if np.isfinite(value) else np.float32(value)
    assert survives(value) == (written.tobytes() == np.float32(value).tobytes())


def scaled_in_metal(*finish: tvm.transform.Pass) -> str:
    """Metal source of a multiplication with 1/9, of which seven digits are another float."""
    from tvm import te

    x = te.placeholder((64,), name="x")
    product = te.create_prim_func(
        [x, te.compute((64,), lambda i: x[i] * tvm.tirx.FloatImm("float32", 1 / 9), name="y")]
    )
    target = TARGETS["metal"].tvm_target()
    with target:
        scheduled = tvm.transform.Sequential([schedule_kernels, *finish])(tvm.IRModule({"scale": product}))
        return tvm.tirx.build(scheduled, target).imports[0].inspect_source("metal")


@pytest.mark.metal
def test_constants_keep_every_bit_in_metal():
    source = scaled_in_metal(exact_constants())
    (bits,) = re.findall(r"as_type<float>\((\d+)\)", source)
    assert np.int32(bits).view(np.float32) == np.float32(1 / 9)
    check_metal(source, {})


@pytest.mark.metal
def test_maxima_are_spread_over_threads_in_metal():
    from tvm import te, topi

    x = te.placeholder((64, 512), name="x")
    softmax = te.create_prim_func([x, topi.nn.softmax(x)])
    target = TARGETS["metal"].tvm_target()
    with target:
        passes = tvm.transform.Sequential([schedule_kernels, exact_constants()])
        source = tvm.tirx.build(passes(tvm.IRModule({"softmax": softmax})), target).imports[0].inspect_source("metal")
    assert "max(red_buf" in source and "-3.402823e+38f" in source
    check_metal(complete_source(source), {})


@pytest.mark.metal
@pytest.mark.xfail(strict=True, raises=AssertionError, reason="TVM writes float constants for Metal with seven digits")
def test_raw_constants_lose_bits_in_metal():
    (written,) = re.findall(r"[\d.]+e[-+]\d+(?=f)", scaled_in_metal())
    assert np.float32(written) == np.float32(1 / 9)


@pytest.mark.metal
@pytest.mark.xfail(strict=True, raises=RuntimeError, reason="TVM shuffles int64, which Metal cannot")
def test_raw_metal_shuffles_64_bits():
    check_metal(METAL_ALLOWED["shuffles of 64 bits"][0], {})


@pytest.mark.metal
def test_a_macos_library_is_linked_anywhere(tmp_path):
    problem = TARGETS["metal"].compile_problem()
    if problem:
        pytest.skip(problem)
    library = tmp_path / "model.so"
    program, _ = import_program(export_program(*MODULES["scoring"]))
    assert compile_module(program, TARGETS["metal"], library).kernels
    assert library.read_bytes()[:4] == b"\xcf\xfa\xed\xfe"  # 64-bit Mach-O


# --- linking ---


@pytest.mark.wide
def test_without_a_c_compiler_zig_links(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    assert "ziglang" in linking.linker()
    program, parameters = import_program(export_program(*MODULES["scoring"]))
    compile_module(program, TARGETS["llvm"], tmp_path / "model.so")
    executable = Executable(tmp_path / "model.so", tvm.cpu(), list(parameters.values()))
    module, args = MODULES["scoring"]
    (result,) = executable.run([arg.numpy() for arg in args])
    with torch.no_grad():
        np.testing.assert_allclose(result, module(*args).numpy(), rtol=1e-5, atol=1e-5)


def test_with_nothing_to_link_every_target_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(linking, "find_spec", lambda name: None)
    for target in TARGETS.values():
        assert target.compile_problem()
    assert "install a C compiler, or pip install ziglang" in linking.link_problem()
    with pytest.raises(RuntimeError, match="nothing to link"):
        linking.link(str(tmp_path / "model.so"), [])


def test_a_linker_that_fails_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"could not link .*model\.so"):
        linking.link(str(tmp_path / "model.so"), [str(tmp_path / "missing.o")])


# --- schedule rules of the GPU targets ---


class Crashing:
    """A rule as DLight's GEMV is on the scoring head."""

    def apply(self, function, target, tunable):
        raise AttributeError("'Add' object has no attribute 'value'")


class Declining:
    def apply(self, function, target, tunable):
        return None


def copy_kernel() -> tvm.tirx.PrimFunc:
    from tvm import te

    source = te.placeholder((64,), name="source")
    return te.create_prim_func([source, te.compute((64,), lambda i: source[i] * 2.0, name="result")])


def test_a_rule_that_crashes_is_passed_over_and_told():
    from tvm.s_tir import dlight

    target = TARGETS["metal"].tvm_target()
    with target:
        rules = [Declining(), Crashing(), dlight.gpu.Fallback()]
        scheduled = schedule_kernel("copy", copy_kernel(), target, rules)
    assert "threadIdx.x" in scheduled.script()
    assert bool(scheduled.attrs["tirx.is_scheduled"])
    info = info_of(scheduled)
    assert info.schedules == ("Fallback",)
    assert info.lost == (LostSchedule("Crashing", "'Add' object has no attribute 'value'"),)
    (sentence,) = lost_schedules(tvm.IRModule({"copy": scheduled}))
    assert sentence == "copy: schedule Crashing was lost: 'Add' object has no attribute 'value'"


def test_a_kernel_that_no_rule_fits_is_an_error():
    target = TARGETS["metal"].tvm_target()
    with pytest.raises(RuntimeError, match="no schedule rule fits the kernel copy"):
        schedule_kernel("copy", copy_kernel(), target, [Declining(), Crashing()])


@pytest.mark.xfail(strict=True, raises=AttributeError, reason="DLight's GEMV rule on a product with one vector")
def test_raw_dlight_crashes_on_the_scoring_head():
    from tvm.s_tir import dlight

    program, _ = import_program(export_program(*MODULES["scoring"]))
    with TARGETS["cuda"].tvm_target():
        program = relax.transform.LegalizeOps()(program)
        dlight.ApplyDefaultSchedule(dlight.gpu.Matmul(), dlight.gpu.GEMV(), dlight.gpu.Fallback())(program)


# --- threads ---


@pytest.mark.usefixtures("forked_processes")
def test_tvm_uses_every_cpu_once_it_is_told():
    for count in {1, usable_cpus()}:
        assert run_isolated("harness.compiler.doctor.probes:probe_threads", count, timeout=300).value == count


def test_threads_of_a_new_pool_follow_the_setting(monkeypatch):
    """TVM starts one pool per calling thread, so a new thread sees a new setting."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr("harness.core.processes.threads._thread_count", None)
    before = torch.get_num_threads()
    counts = {1, usable_cpus()}
    seen = {}
    try:
        for count in counts:
            assert configure_threads(count) == count == torch.get_num_threads()
            assert os.environ[VARIABLE] == os.environ["OMP_NUM_THREADS"] == str(count)
            thread = threading.Thread(target=lambda count=count: seen.update({count: tvm_threads()}))
            thread.start()
            thread.join()
    finally:
        torch.set_num_threads(before)
    assert seen == {count: count for count in counts}


QUOTAS = {
    "unlimited v2": ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
    "v2": ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 1.5),
    "v2 ancestor": (
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
        },
        2.0,
    ),
    "v2 in a container": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
    "v2 path of the host": ({"proc/self/cgroup": "0::/host/x\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3.0),
    "v1": (
        {
            "proc/self/cgroup": "4:memory:/m\n3:cpu,cpuacct:/a\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "250000\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
        },
        2.5,
    ),
    "unlimited v1": (
        {
            "proc/self/cgroup": "1:cpu:/\n0::/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        None,
    ),
    "not Linux": ({}, None),
    "garbage": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "what\n"}, None),
}


@pytest.mark.parametrize(("files", "quota"), QUOTAS.values(), ids=QUOTAS)
def test_quota_of_the_control_groups(tmp_path, files, quota):
    assert cgroup_quota(file_system(tmp_path, files)) == quota


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="macOS has no affinity masks")
def test_affinity_limits_the_usable_cpus():
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "from harness.runtime.threads import usable_cpus; print(usable_cpus())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
