"""Emulates a GPU on this CPU for the rest of a process: its kernels' source, read from a library, becomes C++."""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi

from harness.compiler.targets.linking import HEADERS, link, run_clang
from harness.compiler.targets.metal_source import one_file, split_kernels
from harness.compiler.targets.serialized import Launch, Reader
from harness.runtime.cpu import architecture


@dataclass(frozen=True)
class DeviceModule:
    """The generated source of a library, with the launches of its kernels.

    Attributes:
        source: Source of all kernels; for Metal in the form that `split_kernels` takes.
        launches: One per kernel.
    """

    source: str
    launches: tuple[Launch, ...]


def read_device_module(kind: str, data: bytes) -> DeviceModule:
    """Reads the module that was saved for `cuda` or `metal`.

    Raises:
        RuntimeError: It was saved as machine code, which only the device runs.
    """
    reader = Reader(data)
    form = reader.text()
    if form != kind:
        raise RuntimeError(f"the library holds {form} for {kind}, and only source can be emulated")
    launches = reader.launches()
    if kind == "metal":
        kernels = {}
        for _ in range(reader.count()):
            key = reader.text()
            kernels[key] = reader.text()
        source = "".join(f"// Function: {key}\n{text}\n" for key, text in kernels.items())
        assert split_kernels(source).keys() == kernels.keys()
    else:
        source = reader.text()
    return DeviceModule(source, launches)


_BARRIERS = re.compile(
    r"\b(?:__sync\w+|__shfl_\w+|__activemask|\w+_matrix_sync|threadgroup_barrier|simdgroup_barrier|simd_shuffle\w*)\("
)
"""Matches calls in which a thread waits for others."""

_DYNAMIC = re.compile(r"extern __shared__ (__align__\(\d+\) \w+ \w+)\[\];")

_EXTENTS = {
    f"{kind}.{axis}": f"{letter}{axis}" for kind, letter in (("blockIdx", "g"), ("threadIdx", "b")) for axis in "xyz"
}
"""Extents of grid and block, as `emulated::launch` reads them."""

_DYNAMIC_BYTES = "tirx.use_dyn_shared_memory"
"""The last extent of a launch with dynamic shared memory: its size in bytes."""


def cuda_to_cpp(module: DeviceModule) -> str:
    """Translates generated CUDA source to C++ over `headers/cuda/cuda.h`, with a packed function for each kernel.

    Raises:
        RuntimeError: A kernel is launched in a way that is not emulated.
    """
    source = _DYNAMIC.sub(r"static \1[emulated::MAX_DYNAMIC_BYTES];", module.source)
    parts = ["#define __CUDACC_VER_MAJOR__ 13\n#define __CUDA_ARCH__ 900\n#include <cuda.h>\n", source, _ARGUMENTS]
    for launch in module.launches:
        match = re.search(
            rf"^extern \"C\" __global__ void [^;\n]*?\b{launch.name}\(([^)]*)\) {{\n(.*?)^}}", source, re.S | re.M
        )
        if match is None:
            raise RuntimeError(f"CUDA kernel {launch.name} was not found in its source")
        types = [parameter.replace("__restrict__", "").rpartition(" ")[0].strip() for parameter in match[1].split(",")]
        values = ", ".join(f"emulated::Exact<{kind}>::of(arguments[{i}])" for i, kind in enumerate(types))
        parts.append(_packed_function(launch, f"{launch.name}({values});", match[2]))
    return "\n".join(parts)


def metal_to_cpp(module: DeviceModule) -> str:
    """Translates generated Metal source to C++ over `headers/metal_stdlib`, with a packed function for each kernel.

    Raises:
        RuntimeError: A kernel is launched in a way that is not emulated.
    """
    kernels = split_kernels(module.source)
    parts = ["#define EMULATED_GPU\n", one_file(kernels), _ARGUMENTS]
    for launch in module.launches:
        text = kernels[launch.name]
        buffers = re.findall(r"^.*?device (\w+)\* \w+ \[\[ buffer\((\d+)\) \]\]", text, re.M)
        values = [f"emulated::Exact<{kind}*>::of(arguments[{i}])" for kind, i in buffers]
        scalars = re.search(rf"^struct {launch.name}_args_t {{\n(.*?)^}};", text, re.S | re.M)
        declarations = ""
        if scalars:
            kinds = re.findall(r"^\s*(\w+) \w+(?:\[2\])?;", scalars[1], re.M)
            cells = (f"emulated::cell<{kind}>(arguments[{i}])" for i, kind in enumerate(kinds, len(buffers)))
            declarations = f"const unsigned long cells[] = {{{', '.join(cells)}}};"
            declarations += f" {launch.name}_args_t scalars = emulated::fields<{launch.name}_args_t>(cells);"
            values.append("scalars")
        for kind, index in re.findall(r"\b(uint[23]?) (?:blockIdx|threadIdx) \[\[(\w+)\]\]", text):
            position = "emulated::block_index" if index == "threadgroup_position_in_grid" else "emulated::thread_index"
            axes = "xyz"[: int(kind[4:] or 1)]
            values.append(
                f"make_{kind}({', '.join(f'{position}.{axis}' for axis in axes)})" if kind[4:] else f"{position}.x"
            )
        parts.append(
            _packed_function(
                launch, f"{declarations} {launch.name}({', '.join(values)});", text, buffer_count=len(buffers)
            )
        )
    return "\n".join(parts)


_ARGUMENTS = "static const emulated::Any* arguments;"


def _packed_function(launch: Launch, call: str, kernel: str, buffer_count: int = 0) -> str:
    """Returns the packed function of a kernel.

    Args:
        launch: The kernel's launch on the host.
        call: Statement that runs one thread.
        kernel: The kernel's source.
        buffer_count: Number of arguments, from the first on, that must be whole buffers.

    Raises:
        RuntimeError: The launch is not emulated.
    """
    extents = launch.extents
    if extents[-1:] == (_DYNAMIC_BYTES,):
        extents = extents[:-1]
    unknown_tag = next((tag for tag in extents if tag not in _EXTENTS), None)
    if unknown_tag is not None:
        raise RuntimeError(f"kernel {launch.name}: a launch with {unknown_tag} cannot be emulated")
    name, waits = launch.name, "true" if _BARRIERS.search(kernel) else "false"
    tags = "".join(_EXTENTS[tag] for tag in extents)
    if extents != launch.extents:
        tags += "s"
    return f"""
static void body_of_{name}() {{ {call} }}
extern "C" __attribute__((visibility("default"))) int __tvm_ffi_{name}(
    void*, const emulated::Any* values, int, emulated::Any* result) {{
  arguments = values;
  *result = {{}};
  return emulated::launch("{name}", body_of_{name}, {waits}, values, {buffer_count}, {launch.arguments}, "{tags}");
}}
"""


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
    if kind in _emulated_kinds:
        return
    if tvm.get_global_func(f"device_api.{kind}", allow_missing=True) is not None:
        raise RuntimeError(f"this machine has a runtime for {kind}: nothing needs to be emulated")

    def load(data: bytes) -> Any:
        return compile_kernels(read_device_module(kind, bytes(data)), kind)

    tvm_ffi.register_global_func(f"device_api.{kind}", tvm_ffi.get_global_func("device_api.cpu"))
    tvm_ffi.register_global_func(f"ffi.Module.load_from_bytes.{kind}", load, override=True)
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
    folder = Path(tempfile.mkdtemp(prefix="sam3-tvm-emulated-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    source, binary, library = (folder / f"kernels.{suffix}" for suffix in ("cpp", "o", "so"))
    source.write_text(_TRANSLATIONS[kind](module))
    messages = run_clang([*OPTIONS, f"-I{HEADERS / 'cuda'}", *options, "-c", "-o", str(binary), str(source)])
    if messages:
        raise RuntimeError(f"clang rejected the generated kernels: {messages[:4000]}")
    link(str(library), [str(binary)])
    return tvm_ffi.load_module(str(library))
