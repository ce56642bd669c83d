"""Writes, maps and checks weights files: safetensors files whose large tensors compiled code can use without a copy."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import struct
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from harness.runtime.arrays import Array
from harness.runtime.manifest import OPTIONAL, ArtifactError, File

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
"""The dtypes of the format that weights have, by the format's names."""
_CODES = {name: code for code, name in _DTYPES.items()}
_BITS = {"bfloat16": "uint16"}
"""NumPy's dtypes that hold the bits of dtypes that NumPy lacks."""


def write_weights(path: Path, tensors: Mapping[str, Array]) -> File:
    """Writes tensors as a safetensors file; returns its size and checksum.

    The safetensors library aligns to 8 bytes and sorts by name. Here the data begins at a multiple of 64 bytes, and
    tensors that fill a multiple of 64 bytes come first, so that they can be mapped. The format allows any order.

    Args:
        path: The file, which must not exist.
        tensors: C-contiguous and little-endian, by name; bfloat16 is ml_dtypes'.

    Raises:
        OSError: The file cannot be written.
    """
    names = sorted(tensors, key=lambda name: tensors[name].nbytes % ALIGNMENT != 0)
    header, offset = {}, 0
    for name in names:
        end = offset + tensors[name].nbytes
        header[name] = {
            "dtype": _CODES[tensors[name].dtype.name],
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
    """Returns the bytes of an array as a view."""
    return array.reshape(-1).view(np.uint8)


class MappedWeights:
    """The tensors of a mapped weights file: a page is read at its first use, and shared between processes.

    Attributes:
        tensors: Tensors by name. They are writable because DLPack requires it, but changes stay in this process.
            Tensors of bfloat16 are their bits in uint16, so that running a model needs no package for this dtype.
        dtypes: Names of the tensors' dtypes, `bfloat16` among them.
    """

    def __init__(self, path: Path) -> None:
        """Maps the file.

        Raises:
            ArtifactError: The file cannot be read or is damaged.
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
        except Exception as error:  # a damaged header may be any JSON, of any depth
            raise ArtifactError(f"{path} cannot be read as weights ({error}): compile the model again") from error

    def check_unchanged(self) -> None:
        """Checks that the file was not modified, because its pages are read when they are needed.

        A file that was replaced by another one of its name is still mapped.

        Raises:
            ArtifactError: The file was modified.
        """
        if os.fstat(self._file).st_mtime_ns != self._written:
            raise ArtifactError(f"{self._path} was written into since it was loaded: load the model again")

    def release(self) -> None:
        """Releases the memory; pages that are used later are read again, mostly from the system's cache."""
        self._release(0, len(self._map))

    def release_at(self, address: int, size: int) -> None:
        """Releases the whole pages of a memory range of `size` bytes, if the range is in the file's mapping."""
        begin = address - self._begin
        if begin >= 0 and begin + size <= len(self._map):
            page = mmap.PAGESIZE
            self._release(-(-begin // page) * page, (begin + size) // page * page)

    def _release(self, begin: int, end: int) -> None:
        if begin < end:
            with contextlib.suppress(AttributeError, OSError):  # not on every system
                self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _tensors(mapped: mmap.mmap) -> tuple[dict[str, Array], dict[str, str]]:
    """Returns the tensors of a mapped safetensors file, and the names of their dtypes; see `MappedWeights`."""
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
    """Returns the array if it is contiguous, writable and aligned to 64 bytes, otherwise such a copy."""
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
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        # The pages are read once; this hint keeps hashing from evicting pages in use.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        digest = hashlib.file_digest(file, "sha256")
        return File(file.seek(0, os.SEEK_END), digest.hexdigest())


def check_files(folder: Path, files: Mapping[str, File], *, contents: bool) -> None:
    """Compares files with their expected sizes, and then, if requested, with their checksums.

    Args:
        folder: The folder.
        files: Expected sizes and checksums, by file name.
        contents: Whether to compare checksums.

    Raises:
        ArtifactError: A file is missing or differs.
    """
    present = {name: file for name, file in files.items() if name not in OPTIONAL or (folder / name).exists()}
    for name, expected in present.items():
        path = folder / name
        if not path.is_file():
            raise ArtifactError(f"{folder} is incomplete: {name} is missing; copy the whole folder, or compile again")
        if path.stat().st_size != expected.bytes:
            raise ArtifactError(
                f"{path} is damaged: {path.stat().st_size} bytes instead of {expected.bytes}; "
                "copy it again, or compile again"
            )
    if contents:
        with ThreadPoolExecutor() as pool:
            actual: Mapping[str, File] = dict(
                zip(present, pool.map(lambda name: file_digest(folder / name), present), strict=True)
            )
        for name, file in actual.items():
            if file != present[name]:
                raise ArtifactError(f"{folder / name} is damaged, its checksum is wrong: copy it or compile again")
