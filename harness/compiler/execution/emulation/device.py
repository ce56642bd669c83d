"""Emulates a GPU on this CPU for the rest of a process, as a device of TVM's runtime."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.compiler.execution.emulation.translation import DeviceModule, cuda_to_cpp, metal_to_cpp, read_device_module
from harness.compiler.targets.linking import HEADERS, link, run_clang
from harness.runtime.cpu import architecture

if TYPE_CHECKING:
    import tvm

_TRANSLATIONS = {"cuda": cuda_to_cpp, "metal": metal_to_cpp}

_NATIVE = "-march=native" if architecture() == "x86_64" else "-mcpu=native"
_SPEED = ("-O2", "-fno-vectorize", _NATIVE)
"""Options for speed; unrolled loops become better vectors than vectorized loops, which gather and scatter."""
_UNDEFINED = ("-Xclang", "-no-enable-noundef-analysis")
"""Permits a thread to shuffle an undefined value, as TVM's reductions for CUDA do; C++ forbids it, and clang would
optimize by that."""
_ARITHMETIC = ("-ffp-contract=fast", "-fno-math-errno", "-Xclang", "-ffloat16-excess-precision=none")
"""Options of GPU arithmetic: a multiplication and an addition after it are fused, as nvcc and Metal's compiler do, and
each operation on halves is rounded."""
OPTIONS = ("-fPIC", "-fvisibility=hidden", *_SPEED, *_UNDEFINED, *_ARITHMETIC)


def install(kind: str) -> None:
    """Makes this process's device `kind` an emulated one, if it is not yet.

    The device's memory is the CPU's, and the kernels of every loaded library are compiled for the CPU. A process cannot
    go back, so only workers call this.

    Args:
        kind: `cuda` or `metal`.

    Raises:
        RuntimeError: There is a real device.
    """
    import tvm
    import tvm_ffi

    loader = f"ffi.Module.load_from_bytes.{kind}"
    if getattr(tvm_ffi.get_global_func(loader, allow_missing=True), "emulated", False) or kind in _emulated_kinds:
        return
    if tvm.get_global_func(f"device_api.{kind}", allow_missing=True) is not None:
        raise RuntimeError(f"this machine has a runtime for {kind}: nothing needs to be emulated")

    def load(data: bytes) -> Any:
        return compile_kernels(read_device_module(kind, bytes(data)), kind)

    tvm_ffi.register_global_func(f"device_api.{kind}", tvm_ffi.get_global_func("device_api.cpu"))
    tvm_ffi.register_global_func(loader, load, override=True)
    _emulated_kinds.add(kind)


_emulated_kinds: set[str] = set()


def compile_kernels(module: DeviceModule, kind: str, *options: str) -> tvm.runtime.Module:
    """Compiles a module of packed functions that run the kernels on the CPU.

    Args:
        module: The kernels.
        kind: `cuda` or `metal`.
        options: Additional options of clang.

    Raises:
        RuntimeError: clang rejects the source, or a kernel is launched in a way that is not emulated.
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
