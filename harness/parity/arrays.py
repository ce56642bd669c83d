"""Named arrays in one safetensors file with a checksum: what the cache and the saved outputs are written in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.files import unfinished, writing

Array = npt.NDArray[Any]

_FORMAT = "sam3-tvm-arrays-1"
_COMPLEX: dict[str, str] = {"complex64": "<f4", "complex128": "<f8"}


class CorruptFile(Exception):
    """The file exists, but is not what was written: truncated, changed, or of another format or tag."""


def write_arrays(path: Path, arrays: Mapping[str, Array], tag: str = "") -> None:
    """Writes the arrays, first under a temporary name, so that a reader never sees half a file.

    Complex arrays are stored as pairs of floats; names, order, dtypes, shapes, the tag and a SHA-256 over all of it and
    the values go into the metadata.

    Args:
        path: The file; its folder is made.
        arrays: Little- or big-endian, any memory layout, zero dimensions and zero elements included.
        tag: Anything that a reader should insist on, for instance the key.

    Raises:
        HarnessError: If the file cannot be written (no permission, disk full).
        TypeError: If a value is not an array of numbers or booleans.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    plain = {name: _plain(name, array) for name, array in arrays.items()}
    description = [{"name": name, "dtype": a.dtype.name, "shape": list(a.shape)} for name, a in plain.items()]
    metadata = {"format": _FORMAT, "tag": tag, "arrays": json.dumps(description)}
    metadata["sha256"] = _digest(metadata, plain)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with unfinished(path) as temporary:
        try:
            save_file({name: _stored(array) for name, array in plain.items()}, temporary, metadata=metadata)
        except SafetensorError as error:  # how it tells of a full disk
            raise OSError(str(error)) from error


def read_arrays(path: Path, tag: str = "") -> dict[str, Array]:
    """Reads what `write_arrays` wrote, in the same order.

    Raises:
        FileNotFoundError: If there is no such file.
        CorruptFile: If it is not exactly what was written under this tag.
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
            arrays[entry["name"]] = _restored(stored.pop(entry["name"]), entry["dtype"], tuple(entry["shape"]))
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptFile(f"{path} cannot be read: {error}") from error
    if stored or checksum != _digest(metadata, arrays):
        raise CorruptFile(f"the checksum of {path} is wrong")
    return arrays


def arrays_digest(arrays: Mapping[str, Array]) -> str:
    """Computes the SHA-256 over names, order, dtypes, shapes and values, for keys of caches."""
    plain = {name: _plain(name, array) for name, array in arrays.items()}
    return _digest({"arrays": json.dumps([[name, a.dtype.name, list(a.shape)] for name, a in plain.items()])}, plain)


def _digest(metadata: Mapping[str, str], arrays: Mapping[str, Array]) -> str:
    digest = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for array in arrays.values():
        if array.size:
            digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _plain(name: str, array: Array) -> Array:
    """Makes the array C-contiguous and little-endian, as safetensors writes it; copies only where needed."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biufcV" or array.dtype.hasobject:
        raise TypeError(f"{name} is not an array of numbers: {type(array).__name__} {getattr(array, 'dtype', '')}")
    plain: Array = np.require(array, dtype=array.dtype.newbyteorder("<"), requirements="C")
    return plain


def _stored(array: Array) -> Array:
    if array.dtype.name in _COMPLEX:
        return array.reshape(-1).view(np.dtype(_COMPLEX[array.dtype.name]))
    return array


def _restored(stored: Array, dtype: str, shape: tuple[int, ...]) -> Array:
    array = stored.view(np.dtype(dtype)).reshape(shape) if dtype in _COMPLEX else stored
    if array.dtype.name != dtype or array.shape != shape:
        raise ValueError(f"{array.dtype.name} {array.shape} instead of {dtype} {shape}")
    return array
