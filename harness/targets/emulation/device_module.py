"""What a library carries for its GPU: read from the bytes that TVM's runtime would hand to CUDA or Metal."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from harness.targets.metal_source import split_kernels


@dataclass(frozen=True)
class Launch:
    """How the host calls a kernel: `arguments` values, then an extent for each of `extents` (`blockIdx.x`, …)."""

    name: str
    arguments: int
    extents: tuple[str, ...]


@dataclass(frozen=True)
class DeviceModule:
    """Generated source with the launches of its kernels.

    Attributes:
        source: Of all kernels; Metal's as `split_kernels` takes it.
        launches: One per kernel.
    """

    source: str
    launches: tuple[Launch, ...]


class _Reader:
    """TVM's serialization: little endian, 64-bit counts before strings, arrays and maps."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        part = self._data[self._at : self._at + count]
        if len(part) != count:
            raise RuntimeError("the device code in the library ends too early: compile it again")
        self._at += count
        return part

    def count(self) -> int:
        (value,) = struct.unpack("<Q", self.take(8))
        return int(value)

    def text(self) -> str:
        return self.take(self.count()).decode()

    def launch(self) -> Launch:
        name = self.text()
        arguments = self.count()
        self.take(4 * arguments)  # their types, as DLDataType
        extents = tuple(self.text() for _ in range(self.count()))
        self.take(4 * self.count())  # whether an argument is a tensor map
        return Launch(name, arguments, extents)


def read_device_module(kind: str, data: bytes) -> DeviceModule:
    """The module that was saved for `cuda` or `metal`.

    Raises:
        RuntimeError: It was saved as machine code, which only the device runs.
    """
    reader = _Reader(data)
    form = reader.text()
    if form != kind:
        raise RuntimeError(f"the library holds {form} for {kind}, and only source can be emulated")
    launches: dict[str, Launch] = {}
    for _ in range(reader.count()):
        key = reader.text()
        launches[key] = reader.launch()
    if kind == "metal":
        kernels = {}
        for _ in range(reader.count()):
            key = reader.text()
            kernels[key] = reader.text()
        source = "".join(f"// Function: {key}\n{text}\n" for key, text in kernels.items())
        assert split_kernels(source).keys() == kernels.keys()
    else:
        source = reader.text()
    return DeviceModule(source, tuple(launches.values()))
