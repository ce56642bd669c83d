"""A GPU that is this CPU, for the rest of a process: TVM's runtime finds its memory and its kernels there."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.compiler.execution.emulation.device_module import DeviceModule, read_device_module
from harness.compiler.execution.emulation.translation import cuda_to_cpp, metal_to_cpp
from harness.compiler.targets.clang import HEADERS, run_clang
from harness.compiler.targets.linking import link
from harness.runtime.cpu import architecture

if TYPE_CHECKING:
    import tvm

_TRANSLATIONS = {"cuda": cuda_to_cpp, "metal": metal_to_cpp}

_NATIVE = "-march=native" if architecture() == "x86_64" else "-mcpu=native"
_SPEED = ("-O2", "-fno-vectorize", _NATIVE)
"""Unrolled loops make better vectors of a product than loops of vectors, which gather and scatter."""
_UNDEFINED = ("-Xclang", "-no-enable-noundef-analysis")
"""A thread may shuffle no value, as in TVM's reductions for CUDA: in C++ it may not, of which clang would make use."""
_ARITHMETIC = ("-ffp-contract=fast", "-fno-math-errno", "-Xclang", "-ffloat16-excess-precision=none")
"""nvcc and Metal's compiler fuse a multiplication with the addition after it, and so does clang if it is told to; each
operation on halves is rounded, as on a GPU."""
OPTIONS = ("-fPIC", "-fvisibility=hidden", *_SPEED, *_UNDEFINED, *_ARITHMETIC)


def install(kind: str) -> None:
    """Makes this process's device `kind` an emulated one, unless it is already.

    The memory of such a device is that of the CPU, and each library that is loaded has its kernels compiled for the
    CPU. A process cannot go back, so this is for workers.

    Args:
        kind: `cuda` or `metal`.

    Raises:
        RuntimeError: There is a real one.
    """
    import tvm
    import tvm_ffi

    loader = f"ffi.Module.load_from_bytes.{kind}"
    if getattr(tvm_ffi.get_global_func(loader, allow_missing=True), "emulated", False) or kind in _installed:
        return
    if tvm.get_global_func(f"device_api.{kind}", allow_missing=True) is not None:
        raise RuntimeError(f"this machine has a runtime for {kind}: nothing needs to be emulated")

    def load(data: bytes) -> Any:
        return compiled(read_device_module(kind, bytes(data)), kind)

    tvm_ffi.register_global_func(f"device_api.{kind}", tvm_ffi.get_global_func("device_api.cpu"))
    tvm_ffi.register_global_func(loader, load, override=True)
    _installed.add(kind)


_installed: set[str] = set()


def compiled(module: DeviceModule, kind: str, *options: str) -> tvm.runtime.Module:
    """Compiles a module of packed functions that run the kernels on the CPU.

    Args:
        module: The kernels.
        kind: `cuda` or `metal`.
        options: More of clang's options.

    Raises:
        RuntimeError: clang rejects the source, or it is launched in a way that is not emulated.
    """
    import tvm_ffi

    folder = Path(tempfile.mkdtemp(prefix="sam3-tvm-emulated-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    source, binary, library = (folder / f"kernels.{suffix}" for suffix in ("cpp", "o", "so"))
    source.write_text(_TRANSLATIONS[kind](module))
    messages = run_clang([*OPTIONS, f"-I{HEADERS / 'cuda'}", *options, "-c", "-o", str(binary), str(source)])
    if messages:
        raise RuntimeError(f"clang rejected the generated kernels: {messages[:4000]}")
    link(str(library), [str(binary)])
    return tvm_ffi.load_module(str(library))
