"""Reads and replaces the modules that a library embeds in TVM's serialization, among them the device's code.

The format is that of TVM 0.27: little endian, 64-bit counts before strings, arrays and maps.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

EMBEDDED = "__tvm_ffi__library_bin"
"""The symbol of a library that contains the modules."""

HOST_CODE = "_lib"
"""Kind of the module that stands for the library itself, without bytes (tvm-ffi: `extra/library_module.cc`)."""


@dataclass(frozen=True)
class Launch:
    """The launch of a kernel: `arguments` values, then an extent for each of `extents` (`blockIdx.x`, …)."""

    name: str
    arguments: int
    extents: tuple[str, ...]


class Reader:
    """A reader of serialized bytes, from the front.

    Attributes:
        position: Position of the next byte.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    @property
    def finished(self) -> bool:
        """Returns whether all bytes are read."""
        return self.position == len(self._data)

    def take(self, count: int) -> bytes:
        """Reads the given number of bytes.

        Raises:
            RuntimeError: There are fewer bytes.
        """
        part = self._data[self.position : self.position + count]
        if len(part) != count:
            raise RuntimeError("the device code in the library ends too early: compile it again")
        self.position += count
        return part

    def count(self) -> int:
        """Reads a 64-bit number."""
        (value,) = struct.unpack("<Q", self.take(8))
        return int(value)

    def sized(self) -> bytes:
        """Reads bytes after their number."""
        return self.take(self.count())

    def text(self) -> str:
        """Reads a string."""
        return self.sized().decode()

    def launches(self) -> tuple[Launch, ...]:
        """Reads the kernels of a device module, by name."""
        return tuple({self.text(): self._launch() for _ in range(self.count())}.values())

    def _launch(self) -> Launch:
        name = self.text()
        arguments = self.count()
        self.take(4 * arguments)  # their types, as DLDataType
        extents = tuple(self.text() for _ in range(self.count()))
        self.take(4 * self.count())  # whether an argument is a tensor map
        return Launch(name, arguments, extents)


def sized(data: bytes) -> bytes:
    """Returns bytes after their number, in the format of `Reader.sized`."""
    return struct.pack("<Q", len(data)) + data


def with_modules(embedded: bytes, change: Callable[[str, bytes], bytes]) -> bytes:
    """Replaces the bytes of the modules that a library embeds.

    Args:
        embedded: The content of the symbol `EMBEDDED`: its own length, the imports of the modules (two arrays of
            numbers), then the kind of each module, and its bytes unless it is `HOST_CODE`.
        change: Takes kind and bytes of a module and returns the new bytes.

    Raises:
        RuntimeError: The content is truncated.
    """
    reader = Reader(Reader(embedded).sized())
    for _ in range(2):
        reader.take(8 * reader.count())
    parts = [embedded[8 : 8 + reader.position]]
    while not reader.finished:
        kind = reader.text()
        parts.append(sized(kind.encode()))
        if kind != HOST_CODE:
            parts.append(sized(change(kind, reader.sized())))
    return sized(b"".join(parts))


def with_code(saved: bytes, make: Callable[[str, bytes], tuple[str, bytes]]) -> bytes:
    """Replaces the code of an embedded CUDA module by other code for the same kernels.

    Args:
        saved: Format (`cuda` for source, `cubin`, `fatbin`), launches, code.
        make: Takes format and code and returns new ones.

    Raises:
        RuntimeError: The content is truncated.
    """
    reader = Reader(saved)
    form = reader.text()
    start = reader.position
    reader.launches()
    end = reader.position
    form, code = make(form, reader.sized())
    return sized(form.encode()) + saved[start:end] + sized(code)
