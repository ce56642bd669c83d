"""Packs weights for the code that was compiled along with the packing library, and writes them to a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.runtime.devices import to_device
from harness.runtime.loading import VirtualMachine
from harness.runtime.manifest import File, weights_file
from harness.runtime.weights import write_weights

Array = npt.NDArray[Any]

PACKING = "_transform_params"
"""The suffix that Relax's LiftTransformParams gives to the name of a function that packs weights."""


def packs(machine: VirtualMachine | None, entry: str) -> bool:
    """Returns whether the weights of an entry point are packed; otherwise it takes them as imported."""
    return machine is not None and f"{entry}{PACKING}" in machine


def pack(machine: VirtualMachine, entry: str, weights: Iterable[tuple[Array, str]]) -> dict[str, Array]:
    """Returns the packed weights of an entry point, by name and in the order in which its compiled code takes them.

    Args:
        machine: A virtual machine with the packing library.
        entry: Name of the entry point, whose weights are packed.
        weights: Its weights as imported, in order, and the names of their dtypes; bfloat16 may be bits in uint16.
    """
    tensors = [_tensor(value, dtype) for value, dtype in weights]
    return named(entry, [np.from_dlpack(tensor) for tensor in machine[f"{entry}{PACKING}"](tensors)])


def named(entry: str, weights: Iterable[Array]) -> dict[str, Array]:
    """Returns weights with names that state their order alone."""
    return {f"{entry}.{index:04d}": value for index, value in enumerate(weights)}


def write_packed(folder: Path, entry: str, weights: Mapping[str, Array]) -> dict[str, File]:
    """Writes the weights file of an entry point; returns its description by name, for the manifest."""
    return {weights_file(entry): write_weights(folder / weights_file(entry), weights)} if weights else {}


def _tensor(value: Array, dtype: str) -> Any:
    import tvm_ffi

    bits = value.view(np.uint16) if value.dtype.name == "bfloat16" else value
    return to_device(bits, tvm_ffi.device("cpu", 0), dtype)
