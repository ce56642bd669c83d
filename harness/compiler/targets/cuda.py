"""Defines the target `cuda` of NVIDIA GPUs.

The architecture is the named one, or that of the present device. Without either, libraries carry machine code for each
of `ARCHITECTURES`, and PTX that drivers of later devices compile. TVM's target has all architectures as keys.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from harness.compiler.schedules import UNTUNED, Schedules
from harness.compiler.schedules.gpu.capabilities import TENSOR_CORES
from harness.compiler.targets import llvm
from harness.compiler.targets.linking import link_problem
from harness.compiler.targets.serialized import with_code
from harness.compiler.targets.target import Target
from harness.core.errors import HarnessError
from harness.core.files import temporary_folder
from harness.core.outcome import Kernel
from harness.core.processors import CUDA_VARIABLE, THIS_MACHINE, Processors
from harness.runtime.threads import usable_cpus

if TYPE_CHECKING:
    import tvm

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90")
"""Architectures for machines without a device: A100, RTX 30, RTX 40 and L40, H100."""

MAX_THREADS = 1024
"""Threads per block on every NVIDIA GPU (CUDA Programming Guide, technical specifications per compute capability)."""


def chosen_architectures(processors: Processors = THIS_MACHINE) -> tuple[str, ...]:
    """Returns the architectures of the machine code: the named or present one, otherwise all of `ARCHITECTURES`.

    Raises:
        HarnessError: The name is no architecture.
    """
    import tvm

    arch = processors.cuda
    if arch is not None:
        if not arch.startswith("sm_") or not arch[3:].rstrip("af").isdigit():
            raise HarnessError(
                f"{arch!r} is no architecture of NVIDIA GPUs: give --cuda-arch, or {CUDA_VARIABLE}, for instance sm_90"
            )
        return (arch,)
    if tvm.cuda().exist:
        return (architecture_of(tvm.cuda()),)
    return ARCHITECTURES


def architecture_of(device: tvm.runtime.Device) -> str:
    """Returns the architecture of an NVIDIA GPU, for instance sm_90."""
    return "sm_" + str(device.compute_version).replace(".", "")


def architectures(target: tvm.target.Target) -> tuple[str, ...]:
    """Returns the architectures of the machine code, which `cuda_target` stores among the target's keys."""
    return tuple(key for key in map(str, target.keys) if key.startswith("sm_"))


def cuda_target(processors: Processors = THIS_MACHINE) -> tvm.target.Target:
    """Returns TVM's target for the newest of `chosen_architectures`, with a CPU as host.

    Raises:
        HarnessError: A name is no architecture, or no CPU that LLVM knows.
    """
    import tvm

    install_compiler()
    archs = chosen_architectures(processors)
    return tvm.target.Target(
        {
            "kind": "cuda",
            "keys": ["cuda", "gpu", TENSOR_CORES, *archs],
            "arch": archs[-1],
            "max_threads_per_block": MAX_THREADS,
            "max_shared_memory_per_block": 49152,
            "thread_warp_size": 32,
            "host": llvm.host_of(processors),
        }
    )


def cuda_pipeline(target: tvm.target.Target, _schedules: Schedules = UNTUNED) -> tvm.transform.Pass:
    """Returns the passes of the GPU targets."""
    from harness.compiler.schedules.gpu.pipeline import gpu_pipeline

    return gpu_pipeline(target)


def find_nvcc() -> Path | None:
    """Returns the CUDA compiler on the PATH, below CUDA_PATH or CUDA_HOME, or in /usr/local/cuda."""
    on_path = shutil.which("nvcc")
    if on_path:
        return Path(on_path)
    homes = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    candidates = [Path(home) / "bin" / "nvcc" for home in homes if home]
    return next((path for path in candidates if os.access(path, os.X_OK)), None)


def install_compiler() -> None:
    """Lets TVM compile CUDA source by `compile_source` instead of NVRTC with --use_fast_math.

    TVM requests machine code only if its CUDA runtime can be loaded, which needs a driver. Otherwise it keeps the
    source, and `device_code` writes machine code into the library.
    """
    import tvm_ffi

    def compile_for_current_target(source: str) -> bytes:
        import tvm

        current = tvm.target.Target.current(allow_none=False)
        return compile_source(source, architectures(current)).binary

    tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_for_current_target, override=True)


@dataclass(frozen=True)
class Compiled:
    """The result of nvcc: a cubin, or a fatbin of several architectures, and the resources of each kernel."""

    binary: bytes
    kernels: tuple[Kernel, ...]


@lru_cache(maxsize=2)
def compile_source(source: str, architectures: tuple[str, ...]) -> Compiled:
    """Compiles CUDA source with nvcc, without fast math.

    Fast math would approximate divisions, square roots and exponentials, and flush subnormal numbers to zero.

    Args:
        source: Source that TVM generated.
        architectures: For instance sm_90. PTX of the first becomes machine code of each; a fatbin of several also has
            the PTX.

    Raises:
        RuntimeError: nvcc is missing, or rejects the source.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError("nvcc was not found")
    virtual = architectures[0].replace("sm_", "compute_")
    with temporary_folder("cuda") as name:
        code, binary = Path(name) / "kernels.cu", Path(name) / "kernels.bin"
        code.write_text(source)
        options = [
            "--cubin" if len(architectures) == 1 else "--fatbin",
            f"--generate-code=arch={virtual},code=[{','.join(code_of(architectures))}]",
            "-O3",
            f"--threads={usable_cpus()}",
            "--expt-relaxed-constexpr",
            "--disable-warnings",
            "--resource-usage",
        ]
        command = [str(nvcc), *options, "-o", str(binary), str(code)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise RuntimeError(f"nvcc rejected the generated kernels: {result.stdout}{result.stderr}")
        kernels = reported_kernels(result.stdout + result.stderr)  # architectures are in the order of their completion
        return Compiled(binary.read_bytes(), tuple(sorted(kernels, key=lambda kernel: kernel.architecture)))


def code_of(architectures: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the codes of `compile_source`: machine code of each architecture, and the PTX of the first of several."""
    return (*architectures, architectures[0].replace("sm_", "compute_")) if len(architectures) > 1 else architectures


_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>[^']+)' for '(?P<architecture>sm_\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)
"""The lines about one kernel in the report of `ptxas -v`."""


def reported_kernels(report: str) -> tuple[Kernel, ...]:
    """Returns the kernels in the output of `nvcc --resource-usage`, once for each architecture."""

    def total(pattern: str, text: str) -> int:
        return sum(map(int, re.findall(pattern, text)))

    return tuple(
        Kernel(
            name=entry["name"],
            architecture=entry["architecture"],
            shared_bytes=total(r"(\d+) bytes smem", entry["rest"]),
            registers=int(entry["registers"]),
            constant_bytes=total(r"(\d+) bytes cmem", entry["rest"]),
            stack_bytes=int(entry["stack"]),
            spill_bytes=int(entry["stores"]) + int(entry["loads"]),
        )
        for entry in _ENTRY.finditer(report)
    )


def examine(source: str, threads: Mapping[str, int], target: tvm.target.Target) -> tuple[Kernel, ...]:
    """Returns nvcc's figures for each generated kernel, on each of `architectures`.

    Raises:
        RuntimeError: nvcc rejects the source, or a launch exceeds the threads of a block.
    """
    kernels = compile_source(source, architectures(target)).kernels
    crowded = next((name for name, count in threads.items() if count > MAX_THREADS), None)
    if crowded is not None:
        raise RuntimeError(f"CUDA kernel {crowded}: {threads[crowded]} threads in a block, at most {MAX_THREADS}")
    return tuple(replace(kernel, threads=threads.get(kernel.name)) for kernel in kernels)


def device_code(saved: bytes, target: tvm.target.Target) -> bytes:
    """Returns a CUDA module in TVM's serialization, with machine code instead of source.

    Raises:
        RuntimeError: nvcc rejects the source.
    """

    def compile_code(form: str, code: bytes) -> tuple[str, bytes]:
        if form != "cuda":  # with a device, TVM has already requested machine code
            return form, code
        archs = architectures(target)
        return "cubin" if len(archs) == 1 else "fatbin", compile_source(code.decode(), archs).binary

    return with_code(saved, compile_code)


def compile_problem() -> str | None:
    """Returns why this machine cannot compile CUDA kernels, or None."""
    import tvm

    if tvm.get_global_func("target.build.cuda", allow_missing=True) is None:
        return "this build of TVM cannot generate CUDA code: install the apache-tvm wheel for Linux from PyPI"
    if find_nvcc() is None:
        return "nvcc was not found on the PATH, in CUDA_PATH or in /usr/local/cuda: install the CUDA toolkit"
    return link_problem()


def run_problem(processors: Processors = THIS_MACHINE) -> str | None:
    """Returns why this machine cannot run CUDA kernels, or None."""
    from harness.runtime.devices import device_problem

    return device_problem("cuda") or llvm.run_problem(processors)  # the library's other half runs on the CPU


CUDA = Target(
    name="cuda",
    summary="NVIDIA GPUs (compiled with nvcc, run where there is a device)",
    tvm_target=cuda_target,
    pipeline=cuda_pipeline,
    compile_problem=compile_problem,
    run_problem=run_problem,
    device_type="cuda",
    examine=examine,
    device_code=device_code,
    architectures=lambda target: code_of(architectures(target)),
    precisions=("fp32", "fp16", "bf16"),
    emulated=True,
)
