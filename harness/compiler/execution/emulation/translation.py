"""Generated GPU source as C++ that a CPU runs: the source itself, and for each kernel what TVM's host code calls."""

from __future__ import annotations

import re

from harness.compiler.execution.emulation.device_module import DeviceModule
from harness.compiler.targets.metal_source import one_file, split_kernels
from harness.compiler.targets.serialized import Launch

_WAITS = re.compile(
    r"\b(?:__sync\w+|__shfl_\w+|__activemask|\w+_matrix_sync|threadgroup_barrier|simdgroup_barrier|simd_shuffle\w*)\("
)
"""Calls in which a thread waits for others."""

_DYNAMIC = re.compile(r"extern __shared__ (__align__\(\d+\) \w+ \w+)\[\];")

_EXTENTS = {
    f"{kind}.{axis}": f"{letter}{axis}" for kind, letter in (("blockIdx", "g"), ("threadIdx", "b")) for axis in "xyz"
}
"""Extents as `emulated::launch` reads them: of the grid, of the block."""

_DYNAMIC_BYTES = "tirx.use_dyn_shared_memory"
"""The last extent of a launch with dynamic shared memory: its bytes."""


def cuda_to_cpp(module: DeviceModule) -> str:
    """Translates generated CUDA source to C++ over `headers/cuda/cuda.h`, with a packed function for each kernel.

    Raises:
        RuntimeError: A kernel is launched in a way that is not emulated.
    """
    source = _DYNAMIC.sub(r"static \1[emulated::MAX_DYNAMIC_BYTES];", module.source)
    parts = ["#define __CUDACC_VER_MAJOR__ 13\n#define __CUDA_ARCH__ 900\n#include <cuda.h>\n", source, _PACKED]
    for launch in module.launches:
        found = re.search(
            rf"^extern \"C\" __global__ void [^;\n]*?\b{launch.name}\(([^)]*)\) {{\n(.*?)^}}",
            source,
            re.S | re.M,
        )
        if found is None:
            raise RuntimeError(f"CUDA kernel {launch.name} was not found in its source")
        types = [parameter.replace("__restrict__", "").rpartition(" ")[0].strip() for parameter in found[1].split(",")]
        values = ", ".join(f"emulated::Exact<{kind}>::of(arguments[{i}])" for i, kind in enumerate(types))
        parts.append(_packed(launch, f"{launch.name}({values});", found[2]))
    return "\n".join(parts)


def metal_to_cpp(module: DeviceModule) -> str:
    """Translates generated Metal source to C++ over `headers/metal_stdlib`, with a packed function for each kernel.

    Raises:
        RuntimeError: A kernel is launched in a way that is not emulated.
    """
    kernels = split_kernels(module.source)
    parts = ["#define EMULATED_GPU\n", one_file(kernels), _PACKED]
    for launch in module.launches:
        text = kernels[launch.name]
        buffers = re.findall(r"^.*?device (\w+)\* \w+ \[\[ buffer\((\d+)\) \]\]", text, re.M)
        values = [f"emulated::Exact<{kind}*>::of(arguments[{i}])" for kind, i in buffers]
        scalars = re.search(rf"^struct {launch.name}_args_t {{\n(.*?)^}};", text, re.S | re.M)
        before = ""
        if scalars:
            kinds = re.findall(r"^\s*(\w+) \w+(?:\[2\])?;", scalars[1], re.M)
            cells = (f"emulated::cell<{kind}>(arguments[{i}])" for i, kind in enumerate(kinds, len(buffers)))
            before = f"const unsigned long cells[] = {{{', '.join(cells)}}};"
            before += f" {launch.name}_args_t scalars = emulated::fields<{launch.name}_args_t>(cells);"
            values.append("scalars")
        for kind, index in re.findall(r"\b(uint[23]?) (?:blockIdx|threadIdx) \[\[(\w+)\]\]", text):
            place = "emulated::block_index" if index == "threadgroup_position_in_grid" else "emulated::thread_index"
            axes = "xyz"[: int(kind[4:] or 1)]
            values.append(f"make_{kind}({', '.join(f'{place}.{axis}' for axis in axes)})" if kind[4:] else f"{place}.x")
        parts.append(_packed(launch, f"{before} {launch.name}({', '.join(values)});", text, whole=len(buffers)))
    return "\n".join(parts)


_PACKED = "static const emulated::Any* arguments;"


def _packed(launch: Launch, call: str, kernel: str, whole: int = 0) -> str:
    """Returns the packed function of a kernel.

    Args:
        launch: How the host calls it.
        call: Runs a thread.
        kernel: Its source.
        whole: How many of its arguments, from the first on, must be whole buffers.

    Raises:
        RuntimeError: The launch is not emulated.
    """
    extents = launch.extents
    if extents[-1:] == (_DYNAMIC_BYTES,):
        extents = extents[:-1]
    unknown = next((tag for tag in extents if tag not in _EXTENTS), None)
    if unknown is not None:
        raise RuntimeError(f"kernel {launch.name}: a launch with {unknown} cannot be emulated")
    name, waits = launch.name, "true" if _WAITS.search(kernel) else "false"
    tags = "".join(_EXTENTS[tag] for tag in extents)
    if extents != launch.extents:
        tags += "s"
    return f"""
static void body_of_{name}() {{ {call} }}
extern "C" __attribute__((visibility("default"))) int __tvm_ffi_{name}(
    void*, const emulated::Any* values, int, emulated::Any* result) {{
  arguments = values;
  *result = {{}};
  return emulated::launch("{name}", body_of_{name}, {waits}, values, {whole}, {launch.arguments}, "{tags}");
}}
"""
