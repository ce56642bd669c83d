"""The GPU's part of a library: read from the bytes that TVM's runtime would hand to CUDA or Metal."""

from __future__ import annotations

from dataclasses import dataclass

from harness.compiler.targets.metal_source import split_kernels
from harness.compiler.targets.serialized import Launch, Reader


@dataclass(frozen=True)
class DeviceModule:
    """Generated source with the launches of its kernels.

    Attributes:
        source: Source of all kernels; Metal's as `split_kernels` takes it.
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
