"""Examines the kernels of a GPU target while they are built: their threads in TensorIR, all else in their source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from harness.core.outcome import Kernel

if TYPE_CHECKING:
    import tvm


@contextmanager
def examine_kernels(target: tvm.target.Target) -> Iterator[list[Kernel]]:
    """Collects the kernels that are built for the target inside the context; empty for targets without own source.

    TVM's code generator is wrapped, because it alone sees both the kernels' TensorIR, which has their launches, and
    their source.

    Raises:
        RuntimeError: A kernel exceeds the limits of the target's devices.
    """
    import tvm_ffi

    from harness.compiler.targets import TARGETS

    kind = str(target.kind.name)
    registered = TARGETS.get(kind)
    kernels: list[Kernel] = []
    if registered is None or registered.examine is None:
        yield kernels
        return
    examine = registered.examine
    generator = f"target.build.{kind}"
    original = tvm_ffi.get_global_func(generator)

    def build(module: tvm.IRModule, device_target: tvm.target.Target) -> Any:
        generated = original(module, device_target)
        kernels.extend(examine(generated.inspect_source(kind), launched_threads(module), device_target))
        return generated

    tvm_ffi.register_global_func(generator, build, override=True)
    try:
        yield kernels
    finally:
        tvm_ffi.register_global_func(generator, original, override=True)


def launched_threads(module: tvm.IRModule) -> dict[str, int]:
    """Returns the threads per block by kernel, for kernels whose launch does not depend on a shape.

    Args:
        module: Kernels as the code generator takes them, with `thread_extent` around their bodies.
    """
    import tvm
    import tvm_ffi

    threads: dict[str, int] = {}
    for _, function in module.functions_items():
        extents: dict[str, Any] = {}

        def collect(node: Any, extents: dict[str, Any] = extents) -> None:
            if isinstance(node, tvm.tirx.AttrStmt) and node.attr_key == "thread_extent":
                extents[str(node.node.thread_tag)] = node.value

        tvm_ffi.structural_walk(function.body, collect)
        count = 1
        for tag, extent in extents.items():
            if tag.startswith("threadIdx."):
                count *= int(extent) if isinstance(extent, int | tvm.tirx.IntImm) else 0
        if count:
            threads[str(function.attrs["global_symbol"])] = count
    return threads
