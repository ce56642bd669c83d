"""Defines the target `metal` of Apple GPUs.

On Linux the Metal source and the arm64 macOS host code are generated and linked; running them needs macOS.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from harness.compiler.schedules import UNTUNED, Schedules
from harness.compiler.schedules.gpu.capabilities import VECTORS_OF_FOUR
from harness.compiler.targets.linking import MACOS, MACOS_TRIPLE, link_problem
from harness.compiler.targets.metal_constants import exact_constants
from harness.compiler.targets.metal_source import MAX_THREADGROUP_BYTES, MAX_THREADS, check_metal, complete_source
from harness.compiler.targets.target import Target
from harness.core.outcome import Kernel
from harness.core.processors import THIS_MACHINE, Processors

if TYPE_CHECKING:
    import tvm


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


def metal_device() -> tvm.runtime.Device:
    """Returns TVM's device for the first Apple GPU."""
    import tvm

    return tvm.metal()


METAL = Target(
    name="metal",
    summary="Apple GPUs (source is generated anywhere, run on macOS)",
    tvm_target=metal_target,
    pipeline=metal_pipeline,
    compile_problem=compile_problem,
    run_problem=run_problem,
    device=metal_device,
    examine=examine,
    precisions=("fp32", "fp16"),
    emulated=True,
)
