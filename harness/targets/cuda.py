"""Target `cuda`: NVIDIA GPUs.

The architecture is that of the device present, or `SAM3_TVM_CUDA_ARCH`, or sm_90.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import HarnessError
from harness.schedules import UNTUNED, Schedules
from harness.targets import llvm
from harness.targets.gpu import gpu_pipeline
from harness.targets.linking import link_problem
from harness.targets.target import Target

if TYPE_CHECKING:
    import tvm

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90")
"""What the tests compile for: A100, RTX 30, RTX 40 and L40, H100."""

ARCHITECTURE_VARIABLE = "SAM3_TVM_CUDA_ARCH"


def architecture() -> str:
    """The architecture to compile for.

    Raises:
        HarnessError: `SAM3_TVM_CUDA_ARCH` does not name one.
    """
    import tvm

    chosen = os.environ.get(ARCHITECTURE_VARIABLE)
    if chosen:
        if not chosen.startswith("sm_") or not chosen[3:].rstrip("af").isdigit():
            raise HarnessError(f"{ARCHITECTURE_VARIABLE}={chosen}: not an architecture, give for instance sm_90")
        return chosen
    if tvm.cuda().exist:
        return "sm_" + str(tvm.cuda().compute_version).replace(".", "")
    return "sm_90"


def cuda_target() -> tvm.target.Target:
    """TVM's target for `architecture()`, with the CPU of this machine as host."""
    import tvm

    install_compiler()
    return tvm.target.Target(
        {
            "kind": "cuda",
            "arch": architecture(),
            "max_threads_per_block": 1024,
            "max_shared_memory_per_block": 49152,
            "thread_warp_size": 32,
            "host": {"kind": "llvm", "mcpu": llvm.host_cpu()},
        }
    )


def cuda_pipeline(target: tvm.target.Target, _schedules: Schedules = UNTUNED) -> tvm.transform.Pass:
    """DLight's GPU schedules."""
    return gpu_pipeline(target)


def find_nvcc() -> Path | None:
    """The CUDA compiler: on the PATH, below CUDA_PATH or CUDA_HOME, or in /usr/local/cuda."""
    on_path = shutil.which("nvcc")
    if on_path:
        return Path(on_path)
    homes = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    candidates = [Path(home) / "bin" / "nvcc" for home in homes if home]
    return next((path for path in candidates if os.access(path, os.X_OK)), None)


def install_compiler() -> None:
    """Lets TVM compile CUDA source by `compile_source`, in place of its own way: NVRTC with --use_fast_math.

    TVM asks for a binary only where its CUDA runtime could be loaded, which needs a driver; elsewhere it keeps the
    source unseen by any compiler. The hook for changing the source runs in both cases, and compiles there.
    """
    import tvm_ffi

    def check(source: str, target: tvm.target.Target) -> str:
        compile_source(source, str(target.attrs["arch"]))
        return source

    def compile_for_current_target(source: str) -> bytes:
        import tvm

        return compile_source(source, str(tvm.target.Target.current(allow_none=False).attrs["arch"]))

    tvm_ffi.register_global_func("tvm_callback_cuda_postproc", check, override=True)
    tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_for_current_target, override=True)


@lru_cache(maxsize=2)
def compile_source(source: str, arch: str) -> bytes:
    """Compiles CUDA source to a cubin with nvcc, without fast math.

    Fast math would turn divisions, square roots and exponentials into approximations, and subnormal numbers into zero.

    Args:
        source: What TVM generated.
        arch: For instance sm_90.

    Raises:
        RuntimeError: nvcc is missing, or rejects the source.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError("nvcc was not found")
    with tempfile.TemporaryDirectory(prefix="sam3-tvm-cuda-") as name:
        code, binary = Path(name) / "kernels.cu", Path(name) / "kernels.cubin"
        code.write_text(source)
        options = ["--cubin", f"-arch={arch}", "-O3", "--expt-relaxed-constexpr"]
        command = [str(nvcc), *options, "-o", str(binary), str(code)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"nvcc rejected the generated kernels: {done.stdout}{done.stderr}")
        return binary.read_bytes()


def compile_problem() -> str | None:
    """Why this machine cannot compile CUDA kernels, or None."""
    import tvm

    if tvm.get_global_func("target.build.cuda", allow_missing=True) is None:
        return "this build of TVM cannot generate CUDA code: install the apache-tvm wheel for Linux from PyPI"
    if find_nvcc() is None:
        return "nvcc was not found on the PATH, in CUDA_PATH or in /usr/local/cuda: install the CUDA toolkit"
    return link_problem()


def run_problem() -> str | None:
    """Why this machine cannot run CUDA kernels, or None."""
    import tvm

    if tvm.get_global_func("device_api.cuda", allow_missing=True) is None:
        return "no NVIDIA driver on this machine: TVM could not load its CUDA runtime"  # it needs libcuda.so.1
    if not tvm.cuda().exist:
        return "no NVIDIA GPU on this machine"
    return llvm.run_problem()  # the library's other half runs on the CPU


def cuda_device() -> tvm.runtime.Device:
    """TVM's device for the first NVIDIA GPU."""
    import tvm

    return tvm.cuda()


CUDA = Target(
    name="cuda",
    summary="NVIDIA GPUs (compiled with nvcc, run where there is a device)",
    tvm_target=cuda_target,
    pipeline=cuda_pipeline,
    compile_problem=compile_problem,
    run_problem=run_problem,
    device=cuda_device,
)
