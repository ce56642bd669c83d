"""Weights files: safetensors, with every large tensor where compiled code can use it as it lies in the file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import struct
import weakref
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.runtime.manifest import ArtifactError, File

Array = npt.NDArray[Any]

ALIGNMENT = 64
"""Bytes of alignment; compiled code may use aligned vector loads this wide (`kAllocAlignment` of TVM)."""

_DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F64": "float64",
    "I64": "int64",
    "I32": "int32",
    "U16": "uint16",
    "U8": "uint8",
    "I8": "int8",
    "BOOL": "bool",
}
"""The dtypes of the format that occur here, by their names."""
_SPELLED = {name: code for code, name in _DTYPES.items()}
_BITS = {"bfloat16": "uint16"}
"""NumPy's dtypes that hold the bits of a dtype that NumPy has not."""


def write_weights(path: Path, tensors: Mapping[str, Array]) -> File:
    """Writes tensors as a safetensors file; returns its size and checksum.

    The safetensors library aligns to 8 bytes and sorts by name. Here the data begins at a multiple of 64 bytes, and
    tensors that fill a multiple of 64 bytes come first, so that these can be mapped; the format allows any order.

    Args:
        path: The file, which must not exist.
        tensors: C-contiguous and little-endian, by name; bfloat16 is ml_dtypes'.

    Raises:
        OSError: It cannot be written.
    """
    names = sorted(tensors, key=lambda name: tensors[name].nbytes % ALIGNMENT != 0)
    header, offset = {}, 0
    for name in names:
        end = offset + tensors[name].nbytes
        header[name] = {
            "dtype": _SPELLED[tensors[name].dtype.name],
            "shape": list(tensors[name].shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    digest = hashlib.sha256()
    with path.open("xb") as file:
        parts: Iterator[Any] = chain((struct.pack("<Q", len(text)), text), (_bytes(tensors[name]) for name in names))
        for part in parts:
            digest.update(part)
            file.write(part)
        size = file.tell()
    return File(size, digest.hexdigest())


def _bytes(array: Array) -> Array:
    """Returns the array's memory; hashes and files take it as it is."""
    return array.reshape(-1).view(np.uint8)


class MappedWeights:
    """The tensors of a weights file, mapped: a page is read when it is first used, and shared between processes.

    Attributes:
        tensors: Tensors by name; writable as DLPack wants them, but what is written stays in this process. Those of
            bfloat16 are their bits, as uint16: what runs a model needs no package for a type that NumPy has not.
        dtypes: Names of the tensors' dtypes, `bfloat16` among them.
    """

    def __init__(self, path: Path) -> None:
        """Maps the file.

        Raises:
            ArtifactError: It cannot be read or is damaged.
        """
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                self._file = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._file)
            self._path, self._written = path, os.fstat(self._file).st_mtime_ns
            self.tensors: dict[str, Array]
            self.dtypes: dict[str, str]
            self.tensors, self.dtypes = _tensors(self._map)
            self._begin = np.frombuffer(self._map, np.uint8).ctypes.data
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise ArtifactError(f"{path} cannot be read as weights ({error}): compile the model again") from error

    def check_unchanged(self) -> None:
        """Checks that nobody wrote into the file, whose pages are read as they are needed.

        A file that was replaced by another one of its name is still there.

        Raises:
            ArtifactError: Somebody did.
        """
        if os.fstat(self._file).st_mtime_ns != self._written:
            raise ArtifactError(f"{self._path} was written into since it was loaded: load the model again")

    def release(self) -> None:
        """Gives the memory back; pages that are used later are read again, mostly from the system's cache."""
        self._release(0, len(self._map))

    def release_at(self, address: int, size: int) -> None:
        """Gives back whole pages of so many bytes in memory, if they are the file's."""
        begin = address - self._begin
        if begin >= 0 and begin + size <= len(self._map):
            page = mmap.PAGESIZE
            self._release(-(-begin // page) * page, (begin + size) // page * page)

    def _release(self, begin: int, end: int) -> None:
        if begin < end:
            with contextlib.suppress(AttributeError, OSError):  # not on every system
                self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _tensors(mapped: mmap.mmap) -> tuple[dict[str, Array], dict[str, str]]:
    (length,) = struct.unpack_from("<Q", mapped, 0)
    start = 8 + length
    header = json.loads(mapped[8:start])
    dtypes = {name: _DTYPES[entry["dtype"]] for name, entry in header.items()}
    tensors = {}
    for name, entry in header.items():
        dtype = np.dtype(_BITS.get(dtypes[name], dtypes[name])).newbyteorder("<")
        first, last = entry["data_offsets"]
        values = np.frombuffer(mapped, np.uint8, last - first, start + first) if last > first else np.empty(0, np.uint8)
        tensors[name] = aligned(values.view(dtype).reshape(entry["shape"]))
    return tensors, dtypes


def aligned(array: Array) -> Array:
    """Returns the array if it is contiguous, writable and aligned to 64 bytes, otherwise such a copy of it."""
    if array.flags.c_contiguous and array.flags.writeable and array.ctypes.data % ALIGNMENT == 0:
        return array
    room = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    copy: Array = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def file_digest(path: Path) -> File:
    """Returns the size and checksum of a file.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        # The pages are read once: telling so keeps hashing from evicting what is in use.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        digest = hashlib.file_digest(file, "sha256")
        return File(file.seek(0, os.SEEK_END), digest.hexdigest())
