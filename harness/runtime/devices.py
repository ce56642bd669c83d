"""Opens the devices that compiled models run on, and moves NumPy arrays to and from their memory.

A GPU needs a library of TVM beside TVM's runtime; CUDA needs the driver and `CUDART` as well.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.runtime.loading import LoadError, find_library, library_name, load_runtime, runtime_library
from harness.runtime.manifest import CUDART
from harness.runtime.weights import aligned

if TYPE_CHECKING:
    import tvm_ffi

DEVICES = {"llvm": "cpu", "cuda": "cuda", "metal": "metal"}
"""TVM's names of the devices that run a target's code."""

_MISSING = {"cuda": "there is no NVIDIA driver on this machine", "metal": "Metal is there on Macs only"}
_REMEDY = "run it where there is one, or compile for llvm"
_EXISTS, _COMPUTE_VERSION = 0, 4
"""`DeviceAttrKind` of TVM's runtime."""


def open_device(target: str, folder: Path | None = None) -> tvm_ffi.Device:
    """Returns the device that runs a target's code.

    Args:
        target: Name of the target, a key of `DEVICES`.
        folder: Where to look for libraries that are not installed; an artifact has copies.

    Raises:
        LoadError: There is no such device, or TVM's runtime library is missing.
    """
    problem = device_problem(target, folder)
    if problem is not None:
        raise LoadError(f"cannot run code for {target}: {problem}; {_REMEDY}")
    import tvm_ffi

    return tvm_ffi.device(DEVICES[target], 0)


def device_problem(target: str, folder: Path | None = None) -> str | None:
    """Returns why this machine has no device for a target, or None; takes the arguments of `open_device`."""
    load_runtime(folder)
    import tvm_ffi

    name = DEVICES[target]
    if tvm_ffi.get_global_func(f"device_api.{name}", allow_missing=True) is None:
        problem = _load_device_runtime(name, folder)
        if problem is not None:
            return problem
    if not _attribute(tvm_ffi.device(name, 0), _EXISTS):
        return f"there is no {'NVIDIA GPU' if name == 'cuda' else f'{name} device'} on this machine"
    return None


def compute_version(device: tvm_ffi.Device) -> tuple[int, int] | None:
    """Returns CUDA's compute capability of a device; None for a device without one."""
    version = _attribute(device, _COMPUTE_VERSION)
    if not isinstance(version, str):
        return None
    major, _, minor = version.partition(".")
    return int(major), int(minor or 0)


def architecture_problem(compiled_for: Iterable[str], capability: tuple[int, int]) -> str | None:
    """Returns why a GPU runs none of the code in a library, or None.

    Machine code runs on devices of the same major number and no smaller minor number. PTX runs on every device that is
    not older. An architecture with a letter runs only on itself (CUDA C++ Programming Guide, "Compatibility").

    Args:
        compiled_for: `sm_86` for machine code, `compute_80` for PTX.
        capability: Compute capability of the device.
    """
    names = tuple(compiled_for)
    if any(_runs(name, capability) for name in names):
        return None
    return f"compiled for {', '.join(names)}, and this GPU is sm_{capability[0]}{capability[1]}"


def _runs(name: str, capability: tuple[int, int]) -> bool:
    """Returns whether code for an architecture runs on a GPU; see `architecture_problem`."""
    form, _, number = name.partition("_")
    digits = number.rstrip("af")
    compiled = int(digits[:-1]), int(digits[-1])
    if digits != number:
        return compiled == capability
    return compiled <= capability and (form == "compute" or compiled[0] == capability[0])


def _attribute(device: tvm_ffi.Device, kind: int) -> Any:
    import tvm_ffi

    attribute = tvm_ffi.get_global_func("runtime.GetDeviceAttr")
    return attribute(device.dlpack_device_type(), device.index, kind)


def _load_device_runtime(name: str, folder: Path | None) -> str | None:
    """Loads TVM's library for a kind of device; returns the reason if it cannot be loaded."""
    library = find_library(device_library(name), folder)
    if library is None:
        has_such_devices = (name == "metal") == (platform.system() == "Darwin")
        return f"{device_library(name)} is missing, install apache-tvm 0.27" if has_such_devices else _MISSING[name]
    if name == "cuda" and (cudart := find_cudart(folder)) is not None:
        ctypes.CDLL(str(cudart))
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        missing = str(error).partition(":")[0]
        if missing == CUDART:
            return f"CUDA's runtime library {CUDART} is missing, `pip install nvidia-cuda-runtime` brings it"
        return f"{_MISSING[name]} ({missing} is missing)"
    return None


def device_library(name: str) -> str:
    """Returns the file name of TVM's runtime library for a kind of device, a value of `DEVICES`."""
    return library_name(f"tvm_runtime_{name}")


def runtime_libraries(target: str) -> list[Path]:
    """Finds the libraries that run a target's code where TVM is not installed.

    Raises:
        LoadError: TVM's runtime library is missing.
    """
    name = DEVICES[target]
    device_runtime = [] if name == "cpu" else [find_library(device_library(name))]
    return [
        path
        for path in (runtime_library(), *device_runtime, find_cudart() if name == "cuda" else None)
        if path is not None
    ]


def find_cudart(folder: Path | None = None) -> Path | None:
    """Finds `CUDART` beside a model or in NVIDIA's package; None if only the system may have it."""
    package = find_spec("nvidia")
    installed = (package.submodule_search_locations or ()) if package else ()
    paths = [*([folder / CUDART] if folder else []), *(Path(root) / "cu13" / "lib" / CUDART for root in installed)]
    return next(filter(Path.is_file, paths), None)


def to_device(value: npt.NDArray[Any], device: tvm_ffi.Device, dtype: str | None = None) -> Any:
    """Returns a tensor with the values of an array.

    On the CPU the tensor shares the array's memory if that is contiguous, writable, aligned and of the dtype.

    Args:
        value: The array.
        device: The device of the tensor.
        dtype: The dtype of the array's bits, if it is another one of the same size: `bfloat16`.
    """
    import tvm_ffi

    dtype = dtype or value.dtype.name
    if device.type == "cpu" and dtype == value.dtype.name:
        return tvm_ffi.from_dlpack(aligned(value))
    value = np.ascontiguousarray(value)
    allocate = tvm_ffi.get_global_func("runtime.TVMTensorAllocWithScope")
    tensor = allocate(tvm_ffi.Shape(value.shape), tvm_ffi.dtype(dtype), device, None)
    if value.nbytes:
        copy = tvm_ffi.get_global_func("runtime.TVMTensorCopyFromBytes")
        copy(tensor, ctypes.c_void_p(value.ctypes.data), value.nbytes)
    return tensor


def to_numpy(tensor: Any) -> npt.NDArray[Any]:
    """Returns the values of a tensor; on the CPU the array shares the tensor's memory and keeps it alive."""
    import tvm_ffi

    if isinstance(tensor, np.ndarray):
        return tensor
    if tensor.device.type == "cpu":
        array: npt.NDArray[Any] = np.from_dlpack(tensor)
        return array
    array = np.empty(tuple(tensor.shape), np.dtype(str(tensor.dtype)))
    if array.nbytes:
        copy = tvm_ffi.get_global_func("runtime.TVMTensorCopyToBytes")
        copy(tensor, ctypes.c_void_p(array.ctypes.data), array.nbytes)
    return array
