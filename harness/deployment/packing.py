"""Weights as the compiled code wants them: packed by code that was compiled along with it, then written to files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.deployment.lowering import PACKING
from harness.runtime.loading import VirtualMachine
from harness.runtime.manifest import File, weights_file
from harness.runtime.weights import aligned, write_weights

Parameters = Mapping[str, npt.NDArray[Any]]
"""Values by name, in the order in which the imported function takes them."""


def packed_names(entry: str, count: int) -> tuple[str, ...]:
    """Returns the names of the packed weights of an entry point, which have no names of their own any more."""
    return tuple(f"{entry}.{index:04d}" for index in range(count))


def pack(machine: VirtualMachine | None, entry: str, parameters: Parameters) -> dict[str, npt.NDArray[Any]]:
    """Returns the weights of an entry point as its compiled code takes them, by name and in that order.

    Args:
        machine: With the packing library; None if nothing is packed for the target.
        entry: Name of the entry point.
        parameters: Its weights as imported.
    """
    values = list(parameters.values())
    if machine is not None and f"{entry}{PACKING}" in machine:
        tensors = [_tensor(value) for value in values]
        values = [np.from_dlpack(tensor) for tensor in machine[f"{entry}{PACKING}"](tensors)]
    return dict(zip(packed_names(entry, len(values)), values, strict=True))


def _tensor(value: npt.NDArray[Any]) -> Any:
    """Returns the array as a tensor on the CPU; a copy of it if it is bfloat16, which NumPy's DLPack lacks."""
    import tvm_ffi

    if value.dtype.name != "bfloat16":
        return tvm_ffi.from_dlpack(aligned(value))
    import tvm

    return tvm.runtime.tensor(value)


def write_packed(folder: Path, entry: str, tensors: Parameters) -> dict[str, File]:
    """Writes the weights file of an entry point into a folder; returns its description by name, for the manifest."""
    return {weights_file(entry): write_weights(folder / weights_file(entry), tensors)} if tensors else {}
