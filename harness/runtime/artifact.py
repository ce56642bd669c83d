"""A compiled model on disk, and calling its entry points."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from harness.runtime.checking import check_files
from harness.runtime.devices import DEVICES, architecture_problem, compute_version, open_device, to_device, to_numpy
from harness.runtime.errors import Sam3Error
from harness.runtime.loading import LoadError, VirtualMachine, check_header, load_library
from harness.runtime.manifest import (
    LIBRARY,
    ArtifactError,
    Entry,
    Manifest,
    TensorSpec,
    read_manifest,
    weights_file,
)
from harness.runtime.preparing import prepared
from harness.runtime.weights import MappedWeights

if TYPE_CHECKING:
    import tvm_ffi

Tensors = dict[str, Any]
"""TVM's tensors by name; `harness.runtime.devices.to_numpy` turns one into an array."""


class Loaded(Protocol):
    """A compiled model that is loaded, here or on a device; see `Artifact`."""

    folder: Path
    manifest: Manifest

    def call(self, entry: str, **inputs: Any) -> Tensors:
        """Runs an entry point."""

    def fetch(self, tensor: Any, /) -> npt.NDArray[Any]:
        """Returns a tensor's values."""

    def reading_once(self, entry: str, /) -> AbstractContextManager[None]:
        """Gives back the memory of an entry point's weights as its calls in the context read them."""


@dataclass
class _Reading:
    """The weights that a call reads; an object of its own, which a machine can hold without holding the artifact."""

    weights: MappedWeights | None = None

    def note(self, _kernel: Any, _name: str, before: bool, _result: Any, *arguments: Any) -> None:
        """Gives back what a kernel has read of them; see `VirtualMachine.instrumented`."""
        import tvm_ffi

        if before or self.weights is None:
            return
        for argument in arguments:
            if isinstance(argument, tvm_ffi.Tensor):
                self.weights.release_at(argument.data_ptr(), argument.numel() * argument.dtype.itemsize)


class Artifact:
    """A compiled model, loaded. Several threads may use it; calls run one after another.

    Attributes:
        folder: Where it is.
        manifest: What it says about itself.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        machine: VirtualMachine,
        weights: Mapping[str, MappedWeights],
        device: tvm_ffi.Device,
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self._machine = machine
        self._device = device
        # A GPU has copies of its own; on the CPU the mapped files are what the code reads.
        self._weights = dict(weights) if device.type == "cpu" else {}
        self._arguments = {
            name: _on_device(weights[name], entry.weights, device) if entry.weights else []
            for name, entry in manifest.entries.items()
        }
        self._lock = threading.Lock()
        self._read_once: Counter[str] = Counter()
        self._reading = _Reading()

    @classmethod
    def load(cls, folder: str | Path, *, check: bool = True) -> Artifact:
        """Loads a folder that `sam3-tvm compile` wrote; for the CPU weights are mapped and not read.

        Args:
            folder: The folder; of one for several CPUs, this CPU's is loaded (`harness.runtime.preparing`).
            check: Whether to compare every file with its checksum first: about 0.5 s per GB, on two threads.

        Raises:
            ArtifactError: It is no artifact, incomplete, damaged, or of another version.
            LoadError: It was compiled for another machine or for a device that is not there.
        """
        folder = prepared(Path(folder))
        manifest = read_manifest(folder)
        if manifest.target not in DEVICES:
            raise ArtifactError(
                f"{folder} was compiled for {manifest.target}, and only {', '.join(DEVICES)} can be loaded: "
                "compile it for one of these"
            )
        check_files(folder, manifest.files, contents=check)
        check_header(folder / LIBRARY)
        device = open_device(manifest.target, folder)
        found = compute_version(device)
        problem = architecture_problem(manifest.architectures, found) if found and manifest.architectures else None
        if problem is not None:
            raise LoadError(f"{folder} was {problem}: compile it for this GPU")
        machine = load_library(folder / LIBRARY, device)
        weighted = [name for name, entry in manifest.entries.items() if entry.weights]
        weights = {name: MappedWeights(folder / weights_file(name)) for name in weighted}
        return cls(folder, manifest, machine, weights, device)

    def call(self, entry: str, **inputs: Any) -> Tensors:
        """Runs an entry point.

        Args:
            entry: Its name, a key of `manifest.entries`.
            inputs: NumPy arrays or tensors from another call, by name. Arrays that are contiguous, writable and aligned
                are used where they are.

        Returns:
            Tensors by name, as the manifest names them; each owns its memory.

        Raises:
            Sam3Error: An input is missing, has another shape or dtype than the manifest says, or an index out of range;
                or the weights were written into since they were loaded.
        """
        signature = self.manifest.entries[entry]
        check_inputs(entry, signature, inputs, self.fetch)
        given = (inputs[spec.name] for spec in signature.inputs)
        with self._lock:
            if self._device.type == "cpu" and entry in self._weights:
                self._weights[entry].check_unchanged()
            arguments = [to_device(x, self._device) if isinstance(x, np.ndarray) else x for x in given]
            self._reading.weights = self._weights.get(entry) if self._read_once[entry] else None
            machine = self._machine if self._reading.weights is None else self._releasing
            result = machine.call(entry, *arguments, *self._arguments[entry])
        results = [result] if len(signature.outputs) == 1 and hasattr(result, "__dlpack__") else list(result)
        return {spec.name: tensor for spec, tensor in zip(signature.outputs, results, strict=True)}

    def fetch(self, tensor: Any) -> npt.NDArray[Any]:
        """Returns a tensor's values; see `harness.runtime.devices.to_numpy`."""
        return to_numpy(tensor)

    @contextmanager
    def reading_once(self, entry: str) -> Iterator[None]:
        """Gives back the memory of an entry point's weights as its calls in the context read them.

        What a kernel has read goes as soon as the kernel ends, so that the weights of one layer are in memory at a
        time. At the end of the context what TVM keeps for the next calls goes, too. The next call maps the weights
        again: 0.14 s for the 1.8 GB of the full image encoder, measured. A GPU keeps both, because copying them anew
        takes longer than the call.
        """
        with self._lock:
            self._read_once[entry] += 1
        try:
            yield
        finally:
            with self._lock:
                self._read_once[entry] -= 1
                self._give_back(entry)

    def _give_back(self, entry: str) -> None:
        import tvm_ffi

        if self._device.type == "cpu":
            if entry in self._weights:
                self._weights[entry].release()
            tvm_ffi.get_global_func("vm.builtin.memory_manager.clear")()

    @cached_property
    def _releasing(self) -> VirtualMachine:
        """A machine that gives back what a kernel has read of the weights of the entry point that it runs."""
        return self._machine.instrumented(self._reading.note)


def _on_device(weights: MappedWeights, names: Sequence[str], device: tvm_ffi.Device) -> list[Any]:
    """Copies the named weights to the device, and frees the memory in this process that they were read from."""
    tensors = [to_device(weights.tensors[name], device, weights.dtypes[name]) for name in names]
    if device.type != "cpu":
        weights.release()
    return tensors


def check_inputs(
    entry: str, signature: Entry, inputs: Mapping[str, Any], fetch: Callable[[Any], npt.NDArray[Any]]
) -> None:
    """Compares the inputs of an entry point with its signature; compiled code reads what an index says unasked.

    Args:
        entry: Its name.
        signature: What the manifest says.
        inputs: Arrays or tensors, by name.
        fetch: Returns the values of a tensor; called for indices alone.

    Raises:
        Sam3Error: One is missing, has another shape or dtype, or an index is out of range.
    """
    names = [spec.name for spec in signature.inputs]
    if sorted(inputs) != sorted(names):
        raise Sam3Error(f"{entry} takes {', '.join(names)}; given were {', '.join(inputs) or 'no inputs'}")
    free: dict[str, int] = {}
    for spec in signature.inputs:
        shape, dtype = tuple(inputs[spec.name].shape), str(inputs[spec.name].dtype)
        if dtype != spec.dtype or not _fits(shape, spec, free):
            wanted = f"{spec.dtype} [{', '.join(map(str, spec.shape))}]"
            raise Sam3Error(f"{entry} takes {spec.name} as {wanted}, not {dtype} {list(shape)}")
    for spec in signature.inputs:
        if spec.below is not None:
            below = free[spec.below] if isinstance(spec.below, str) else spec.below
            given = inputs[spec.name]
            values = given if isinstance(given, np.ndarray) else fetch(given)
            wrong = values[(values < 0) | (values >= below)]
            if wrong.size:
                raise Sam3Error(f"{entry} takes {spec.name} from 0 to {below - 1}, not {wrong[0]}")


def _fits(shape: tuple[int, ...], spec: TensorSpec, free: dict[str, int]) -> bool:
    """Returns whether a shape is the specified one; a letter stands for the same number everywhere."""
    return len(shape) == len(spec.shape) and all(
        extent == (free.setdefault(wanted, extent) if isinstance(wanted, str) else wanted)
        for extent, wanted in zip(shape, spec.shape, strict=True)
    )
