"""Reads and writes named arrays in a safetensors file with a checksum, for the cache and saved outputs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from harness.core.files import explain_write_errors, write_file
from harness.core.program import Array

_FORMAT = "sam3-tvm-arrays-2"
_COMPLEX: dict[str, str] = {"complex64": "<f4", "complex128": "<f8"}


class CorruptFile(Exception):
    """Raised for a file that was truncated, changed, or written in another format or with another tag."""


def write_arrays(path: Path, arrays: Mapping[str, Array], tag: str = "") -> None:
    """Writes the arrays first under a temporary name, so that a reader never sees half a file.

    Complex arrays are stored as pairs of floats, booleans as bits. The metadata contain names, order, dtypes, shapes,
    the tag and a SHA-256 of all this and the values.

    Args:
        path: The file; its folder is created.
        arrays: Arrays of either byte order and any memory layout, including zero dimensions and zero elements.
        tag: Text that a reader must give too, for instance the key.

    Raises:
        HarnessError: The file cannot be written (no permission, disk full).
        TypeError: A value is not an array of numbers or booleans.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    normalized = {name: _normalize(name, array) for name, array in arrays.items()}
    description = [{"name": name, "dtype": a.dtype.name, "shape": list(a.shape)} for name, a in normalized.items()]
    metadata = {"format": _FORMAT, "tag": tag, "arrays": json.dumps(description)}
    metadata["sha256"] = _digest(metadata, normalized)
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with write_file(path) as temporary:
        try:
            save_file({name: _encode(array) for name, array in normalized.items()}, temporary, metadata=metadata)
        except SafetensorError as error:  # raised for a full disk
            raise OSError(str(error)) from error


def read_arrays(path: Path, tag: str = "") -> dict[str, Array]:
    """Reads a file that `write_arrays` wrote, in the same order.

    Raises:
        FileNotFoundError: The file does not exist.
        CorruptFile: The file is not exactly what was written with this tag.
    """
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        raise FileNotFoundError(path)
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        if metadata.get("format") != _FORMAT or metadata.get("tag") != tag:
            raise CorruptFile(f"{path} is of another format or belongs to another key")
        checksum = metadata.pop("sha256", "")
        arrays = {}
        for entry in json.loads(metadata["arrays"]):
            arrays[entry["name"]] = _decode(stored.pop(entry["name"]), entry["dtype"], tuple(entry["shape"]))
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptFile(f"{path} cannot be read: {error}") from error
    if stored or checksum != _digest(metadata, arrays):
        raise CorruptFile(f"the checksum of {path} is wrong")
    return arrays


def arrays_digest(arrays: Mapping[str, Array]) -> str:
    """Computes the SHA-256 of names, order, dtypes, shapes and values, for keys of caches."""
    plain = {name: _normalize(name, array) for name, array in arrays.items()}
    return _digest({"arrays": json.dumps([[name, a.dtype.name, list(a.shape)] for name, a in plain.items()])}, plain)


def _digest(metadata: Mapping[str, str], arrays: Mapping[str, Array]) -> str:
    digest = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for array in arrays.values():
        if array.size:
            digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _normalize(name: str, array: Array) -> Array:
    """Makes the array C-contiguous and little-endian, as safetensors stores it; copies only if needed."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biufcV" or array.dtype.hasobject:
        raise TypeError(f"{name} is not an array of numbers: {type(array).__name__} {getattr(array, 'dtype', '')}")
    normalized: Array = np.require(array, dtype=array.dtype.newbyteorder("<"), requirements="C")
    return normalized


def _encode(array: Array) -> Array:
    if array.dtype.name in _COMPLEX:
        return array.reshape(-1).view(np.dtype(_COMPLEX[array.dtype.name]))
    return np.packbits(array) if array.dtype == np.bool_ else array


def _decode(stored: Array, dtype: str, shape: tuple[int, ...]) -> Array:
    array = stored
    if dtype in _COMPLEX:
        array = stored.view(np.dtype(dtype)).reshape(shape)
    elif dtype == "bool":
        array = np.unpackbits(stored)[: math.prod(shape)].view(np.bool_).reshape(shape)
    if array.dtype.name != dtype or array.shape != shape:
        raise ValueError(f"{array.dtype.name} {array.shape} instead of {dtype} {shape}")
    return array
