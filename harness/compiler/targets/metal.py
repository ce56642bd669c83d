"""Defines the target `metal` of Apple GPUs.

On Linux the Metal source and the arm64 macOS host code are generated and linked; running them needs macOS.

TVM's code generator for Metal writes a constant with seven digits, although a float needs nine: 1/9 becomes 0.1111111,
which is another float. Constants that would change are written by their bits instead, as `as_type<float>(…)`. The
largest float and its negative are left, because minima and maxima start with them, and TVM distributes only such
reductions over threads.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.compiler.schedules import UNTUNED, Schedules
from harness.compiler.schedules.gpu.capabilities import VECTORS_OF_FOUR
from harness.compiler.targets.linking import MACOS, MACOS_TRIPLE, link_problem
from harness.compiler.targets.metal_source import MAX_THREADGROUP_BYTES, MAX_THREADS, check_metal, complete_source
from harness.compiler.targets.target import Target
from harness.core.outcome import Kernel
from harness.core.processors import THIS_MACHINE, Processors

if TYPE_CHECKING:
    import tvm


def survives(value: float) -> bool:
    """Returns whether a float is unchanged after it was written with seven digits."""
    return struct.pack("<f", value) == struct.pack("<f", float(f"{value:e}"))


_LARGEST = struct.unpack("<f", bytes.fromhex("ffff7f7f"))[0]


def exact_constants() -> tvm.transform.Pass:
    """Returns the pass that writes float32 constants of kernels by their bits if TVM would round them."""
    import tvm
    import tvm_ffi
    from tvm import tirx

    def by_bits(constant: Any) -> Any:
        value = float(constant.value)
        if str(constant.ty) != "float32" or survives(value) or abs(value) == _LARGEST:
            return constant
        (bits,) = struct.unpack("<i", struct.pack("<f", value))
        return tirx.reinterpret("float32", tirx.IntImm("int32", bits))

    @tvm.transform.module_pass(opt_level=0, name="ExactConstants")
    def run(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        exact = module.clone()
        for variable, function in module.functions_items():
            if isinstance(function, tirx.PrimFunc):
                exact[variable] = function.with_body(tvm_ffi.structural_map(function.body, (tirx.FloatImm, by_bits)))
        return exact

    return run


def metal_target(_processors: Processors = THIS_MACHINE) -> tvm.target.Target:
    """Returns TVM's target for Apple GPUs with an arm64 macOS host, which are one kind of processors."""
    import tvm

    install_completion()
    return tvm.target.Target(
        {
            "kind": "metal",
            "keys": ["metal", "gpu", VECTORS_OF_FOUR],  # Metal Shading Language Specification 2.2
            "max_threads_per_block": MAX_THREADS,
            "max_shared_memory_per_block": MAX_THREADGROUP_BYTES,
            "thread_warp_size": 32,
            "host": {"kind": "llvm", "mtriple": MACOS_TRIPLE, "mcpu": "apple-m1"},
        }
    )


def install_completion() -> None:
    """Lets TVM store the source of `complete_source` in the library, which the device compiles."""
    import tvm_ffi

    def complete(source: str, _target: tvm.target.Target) -> tuple[str, str]:
        return complete_source(source), "metal"

    tvm_ffi.register_global_func("tvm_callback_metal_compile", complete, override=True)


def metal_pipeline(target: tvm.target.Target, _schedules: Schedules = UNTUNED) -> tvm.transform.Pass:
    """Returns the GPU targets' passes, and a pass that makes Metal's compiler read constants exactly."""
    from harness.compiler.schedules.gpu.pipeline import gpu_pipeline

    return gpu_pipeline(target, finish=[exact_constants()])


def compile_problem() -> str | None:
    """Returns why this machine cannot generate Metal code, or None."""
    import tvm
    from tvm.target import codegen

    if tvm.get_global_func("target.build.metal", allow_missing=True) is None:
        return "this build of TVM cannot generate Metal code: install the apache-tvm wheel from PyPI"
    if not codegen.llvm_is_valid_cpu("apple-m1", MACOS_TRIPLE):
        return "the LLVM in this build of TVM has no arm64 code generator, which the macOS host code needs"
    return link_problem(MACOS)


def examine(source: str, threads: Mapping[str, int], _target: tvm.target.Target) -> tuple[Kernel, ...]:
    """Returns the examined kernels; raises RuntimeError for a kernel that clang or every Apple GPU rejects."""
    return check_metal(complete_source(source), threads)


def run_problem(_processors: Processors = THIS_MACHINE) -> str | None:
    """Returns why this machine cannot run Metal code, or None."""
    from harness.runtime.devices import device_problem

    return device_problem("metal")


METAL = Target(
    name="metal",
    summary="Apple GPUs (source is generated anywhere, run on macOS)",
    tvm_target=metal_target,
    pipeline=metal_pipeline,
    compile_problem=compile_problem,
    run_problem=run_problem,
    device_type="metal",
    examine=examine,
    precisions=("fp32", "fp16"),
    emulated=True,
)
