"""Loads a compiled model from disk and calls its entry points."""

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

from harness.runtime.devices import DEVICES, architecture_problem, compute_version, open_device, to_device, to_numpy
from harness.runtime.errors import ModelError
from harness.runtime.loading import LoadError, VirtualMachine, check_header, load_library
from harness.runtime.manifest import LIBRARY, ArtifactError, Entry, Manifest, TensorSpec, read_manifest, weights_file
from harness.runtime.preparing import prepared
from harness.runtime.weights import MappedWeights, check_files

if TYPE_CHECKING:
    import tvm_ffi

Tensors = dict[str, Any]
"""TVM's tensors by name; `harness.runtime.devices.to_numpy` turns one into an array."""


class LoadedModel(Protocol):
    """A loaded compiled model, on this machine or on a remote device; see `Artifact`."""

    folder: Path
    manifest: Manifest

    def call(self, entry: str, **inputs: Any) -> Tensors:
        """Runs an entry point."""

    def fetch(self, tensor: Any, /) -> npt.NDArray[Any]:
        """Returns the values of a tensor."""

    def reading_once(self, entry: str, /) -> AbstractContextManager[None]:
        """Releases the memory of an entry point's weights as its calls in the context read them."""


@dataclass
class _WeightReleaser:
    """Releases the weights of the current call; a virtual machine can hold it without holding the artifact."""

    weights: MappedWeights | None = None

    def release_arguments(self, _kernel: Any, _name: str, before: bool, _result: Any, *arguments: Any) -> None:
        """Releases the weights that a kernel has read; see `VirtualMachine.instrumented`."""
        import tvm_ffi

        if before or self.weights is None:
            return
        for argument in arguments:
            if isinstance(argument, tvm_ffi.Tensor):
                self.weights.release_at(argument.data_ptr(), argument.numel() * argument.dtype.itemsize)


def call_with(artifact: LoadedModel, entry: str, tensors: Tensors) -> Tensors:
    """Runs an entry point with those of the tensors that it reads; errors are those of `Artifact.call`."""
    inputs = artifact.manifest.entries[entry].inputs
    return artifact.call(entry, **{spec.name: tensors[spec.name] for spec in inputs})


class Artifact:
    """A loaded compiled model. Several threads may use it; calls run one after another.

    Attributes:
        folder: The folder that it was loaded from.
        manifest: The folder's manifest.
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
        # A GPU gets copies; on the CPU the code reads the mapped files.
        self._weights = dict(weights) if device.type == "cpu" else {}
        self._arguments = {
            name: _on_device(weights[name], entry.weights, device) if entry.weights else []
            for name, entry in manifest.entries.items()
        }
        self._lock = threading.Lock()
        self._read_once: Counter[str] = Counter()
        self._releaser = _WeightReleaser()

    @classmethod
    def load(cls, folder: str | Path, *, check: bool = True) -> Artifact:
        """Loads a folder that `sam3-tvm compile` wrote; for the CPU weights are mapped and not read.

        Args:
            folder: The folder. Of a folder for several CPUs, the variant for this CPU is loaded
                (`harness.runtime.preparing`).
            check: Whether to compare every file with its checksum first: about 0.5 s per GB, on two threads.

        Raises:
            ArtifactError: The folder is no artifact, incomplete, damaged, or of another version.
            LoadError: The folder was compiled for another machine or for a device that this machine lacks.
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
        capability = compute_version(device)
        problem = (
            architecture_problem(manifest.architectures, capability) if capability and manifest.architectures else None
        )
        if problem is not None:
            raise LoadError(f"{folder} was {problem}: compile it for this GPU")
        machine = load_library(folder / LIBRARY, device)
        weighted = [name for name, entry in manifest.entries.items() if entry.weights]
        weights = {name: MappedWeights(folder / weights_file(name)) for name in weighted}
        return cls(folder, manifest, machine, weights, device)

    def call(self, entry: str, **inputs: Any) -> Tensors:
        """Runs an entry point.

        Args:
            entry: Name of the entry point, a key of `manifest.entries`.
            inputs: NumPy arrays or tensors from another call, by name. Arrays that are contiguous, writable and aligned
                are used without a copy.

        Returns:
            Tensors by name, as the manifest names them; each owns its memory.

        Raises:
            ModelError: An input is missing or has another shape or dtype than the manifest says, an index is out of
                range, or the weights file was modified since it was loaded.
        """
        signature = self.manifest.entries[entry]
        check_inputs(entry, signature, inputs, self.fetch)
        values = (inputs[spec.name] for spec in signature.inputs)
        with self._lock:
            if self._device.type == "cpu" and entry in self._weights:
                self._weights[entry].check_unchanged()
            arguments = [to_device(x, self._device) if isinstance(x, np.ndarray) else x for x in values]
            self._releaser.weights = self._weights.get(entry) if self._read_once[entry] else None
            machine = self._machine if self._releaser.weights is None else self._releasing_machine
            result = machine.call(entry, *arguments, *self._arguments[entry])
        results = [result] if len(signature.outputs) == 1 and hasattr(result, "__dlpack__") else list(result)
        return {spec.name: tensor for spec, tensor in zip(signature.outputs, results, strict=True)}

    def fetch(self, tensor: Any) -> npt.NDArray[Any]:
        """Returns the values of a tensor; see `harness.runtime.devices.to_numpy`."""
        return to_numpy(tensor)

    @contextmanager
    def reading_once(self, entry: str) -> Iterator[None]:
        """Releases the memory of an entry point's weights as its calls in the context read them.

        The weights that a kernel has read are released as soon as the kernel ends, so that only the weights of one
        layer are in memory at a time. At the end of the context TVM's memory pool is cleared, too. The next call maps
        the weights again: 0.14 s for the 1.8 GB of the full image encoder, measured. A GPU keeps both, because a new
        copy takes longer than the call.
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
    def _releasing_machine(self) -> VirtualMachine:
        """Returns a machine that releases the weights that a kernel has read."""
        return self._machine.instrumented(self._releaser.release_arguments)


def _on_device(weights: MappedWeights, names: Sequence[str], device: tvm_ffi.Device) -> list[Any]:
    """Copies the named weights to the device, and releases the mapped pages that were read."""
    tensors = [to_device(weights.tensors[name], device, weights.dtypes[name]) for name in names]
    if device.type != "cpu":
        weights.release()
    return tensors


def check_inputs(
    entry: str, signature: Entry, inputs: Mapping[str, Any], fetch: Callable[[Any], npt.NDArray[Any]]
) -> None:
    """Compares the inputs of an entry point with its signature, because compiled code does not check indices.

    Args:
        entry: Name of the entry point.
        signature: Its signature in the manifest.
        inputs: Arrays or tensors, by name.
        fetch: Returns the values of a tensor; called for indices alone.

    Raises:
        ModelError: An input is missing, has another shape or dtype, or an index is out of range.
    """
    names = [spec.name for spec in signature.inputs]
    if sorted(inputs) != sorted(names):
        raise ModelError(f"{entry} takes {', '.join(names)}; given were {', '.join(inputs) or 'no inputs'}")
    free: dict[str, int] = {}
    for spec in signature.inputs:
        shape, dtype = tuple(inputs[spec.name].shape), str(inputs[spec.name].dtype)
        if dtype != spec.dtype or not _fits(shape, spec, free):
            expected = f"{spec.dtype} [{', '.join(map(str, spec.shape))}]"
            raise ModelError(f"{entry} takes {spec.name} as {expected}, not {dtype} {list(shape)}")
    for spec in signature.inputs:
        if spec.below is not None:
            below = free[spec.below] if isinstance(spec.below, str) else spec.below
            value = inputs[spec.name]
            values = value if isinstance(value, np.ndarray) else fetch(value)
            wrong = values[(values < 0) | (values >= below)]
            if wrong.size:
                raise ModelError(f"{entry} takes {spec.name} from 0 to {below - 1}, not {wrong[0]}")


def _fits(shape: tuple[int, ...], spec: TensorSpec, free: dict[str, int]) -> bool:
    """Returns whether a shape matches its specification; a letter stands for the same number everywhere."""
    return len(shape) == len(spec.shape) and all(
        extent == (free.setdefault(expected, extent) if isinstance(expected, str) else expected)
        for extent, expected in zip(shape, spec.shape, strict=True)
    )
