"""Packs weights for compiled code, and chooses and prepares the variant for this CPU in a folder for several CPUs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from harness.runtime.arrays import Array
from harness.runtime.cpu import MATRIX_UNIT, cpu_model, matrix_unit_problem, this_platform
from harness.runtime.devices import open_device, to_device
from harness.runtime.loading import LoadError, VirtualMachine, cpu_problem, load_library
from harness.runtime.manifest import (
    MANIFEST,
    PACKING_LIBRARY,
    VARIANT,
    ArtifactError,
    File,
    Manifest,
    is_for_several,
    read_manifest,
    read_variants,
    weights_file,
)
from harness.runtime.weights import MappedWeights, check_files, write_weights

PACKING = "_transform_params"
"""The suffix that Relax's LiftTransformParams gives to the name of a function that packs weights."""


def load_packing(folder: Path) -> VirtualMachine | None:
    """Loads the library that packs weights for a folder's code; returns None if the folder has none.

    Raises:
        LoadError: The library was compiled for another machine.
    """
    library = folder / PACKING_LIBRARY
    return load_library(library, open_device("llvm", folder)) if library.is_file() else None


def packs(machine: VirtualMachine | None, entry: str) -> bool:
    """Returns whether the weights of an entry point are packed; otherwise it takes them as imported."""
    return machine is not None and f"{entry}{PACKING}" in machine


def pack(machine: VirtualMachine | None, entry: str, weights: Iterable[tuple[Array, str]]) -> dict[str, Array]:
    """Returns the weights of an entry point in the order and layout of its compiled code, with names for this order.

    Args:
        machine: A virtual machine with the packing library; None if the folder has none.
        entry: Name of the entry point.
        weights: Its weights as imported, in order, and the names of their dtypes; bfloat16 may be bits in uint16.
    """
    if machine is not None and packs(machine, entry):
        tensors = [_tensor(value, dtype) for value, dtype in weights]
        values = [np.from_dlpack(tensor) for tensor in machine[f"{entry}{PACKING}"](tensors)]
    else:
        values = [value for value, _ in weights]
    return {f"{entry}.{index:04d}": value for index, value in enumerate(values)}


def write_packed(folder: Path, entry: str, weights: Mapping[str, Array]) -> dict[str, File]:
    """Writes the weights file of an entry point; returns its description by name, for the manifest."""
    return {weights_file(entry): write_weights(folder / weights_file(entry), weights)} if weights else {}


def _tensor(value: Array, dtype: str) -> Any:
    import tvm_ffi

    bits = value.view(np.uint16) if value.dtype.name == "bfloat16" else value
    return to_device(bits, tvm_ffi.device("cpu", 0), dtype)


_FILLING, _LOCK = ".packing", ".packing.lock"

Announce = Callable[[str], None]
"""Shows a sentence to the user."""


def prepared(folder: Path, announce: Announce = lambda sentence: None) -> Path:
    """Returns the folder to load: an ordinary folder itself, or the variant for this CPU in a folder for several CPUs.

    The weights of a variant are packed when it is first loaded, into its folder, which is an ordinary one from then on.
    Packing takes twice the memory of the largest file of weights.

    Args:
        folder: An ordinary folder, one for several CPUs, or a variant of one.
        announce: Called with a sentence before weights are packed.

    Raises:
        ArtifactError: The folder is incomplete or damaged, or cannot be written.
        LoadError: No variant runs on this machine.
    """
    if is_for_several(folder):
        folder = folder / _choose_variant(folder)
    if (folder / VARIANT).is_file() and not (folder / MANIFEST).is_file():
        _pack(folder, announce)
    return folder


def _choose_variant(folder: Path) -> str:
    """Returns the variant that uses most features of this CPU, of several such the one that was named first.

    Raises:
        LoadError: No variant runs on this machine.
    """
    manifests = {name: read_manifest(folder / name, VARIANT) for name in read_variants(folder).names}
    problems = {name: _problem(manifest) for name, manifest in manifests.items()}
    running = [name for name, problem in problems.items() if problem is None]
    if not running:
        reasons = ", ".join(f"{name} was {problem}" for name, problem in problems.items())
        raise LoadError(
            f"{folder} has no code for this {cpu_model()}: {reasons}; compile it with --cpu for this one, too"
        )
    return max(running, key=lambda name: len(manifests[name].cpu_features))


def _problem(manifest: Manifest) -> str | None:
    """Returns why this machine does not run a variant, or None."""
    if (manifest.system, manifest.architecture) != this_platform():
        return f"compiled for {manifest.system} on {manifest.architecture}"
    problem = cpu_problem(manifest.cpu, list(manifest.cpu_features))
    if problem is None and MATRIX_UNIT[0] in manifest.cpu_features and (refusal := matrix_unit_problem()):
        return f"compiled for the matrix unit (AMX), which the system refuses this process ({refusal})"
    return problem


def _pack(folder: Path, announce: Announce) -> None:
    """Packs the weights of a variant into its folder, unless another process does it meanwhile."""
    from filelock import FileLock

    filling = folder / _FILLING
    try:
        with FileLock(folder / _LOCK):
            if (folder / MANIFEST).is_file():
                return  # another process has done it
            announce(f"Packing the weights of {folder} for this CPU, once.")
            shutil.rmtree(filling, ignore_errors=True)  # left by a process that was killed
            filling.mkdir()
            try:
                _write_packed(folder, filling)
                # The manifest comes last, and after a power cut, too, it describes what is on the disk.
                for path in sorted(filling.iterdir(), key=lambda path: path.name == MANIFEST):
                    with path.open("rb+") as file:
                        os.fsync(file.fileno())
                    path.replace(folder / path.name)
            finally:
                shutil.rmtree(filling, ignore_errors=True)
    except OSError as error:
        raise ArtifactError(
            f"the weights of {folder} cannot be packed for this CPU, the folder cannot be written "
            f"({error.strerror or error}): free some space, or copy it to where it can be written"
        ) from error


def _write_packed(folder: Path, filling: Path) -> None:
    """Fills a folder with the packed weights of a variant and its manifest."""
    variants, manifest = read_variants(folder.parent), read_manifest(folder, VARIANT)
    check_files(folder.parent, variants.files, contents=True)
    check_files(folder, manifest.files, contents=True)
    machine = load_packing(folder)
    if PACKING_LIBRARY in manifest.files and machine is None:
        raise ArtifactError(f"{folder} has no {PACKING_LIBRARY}, which packs its weights: copy the whole folder")
    entries, files = dict(manifest.entries), dict(manifest.files)
    for name, order in variants.weights.items():
        file = weights_file(name)
        if machine is not None and packs(machine, name):
            mapped = MappedWeights(folder.parent / file)
            weights = pack(machine, name, [(mapped.tensors[key], mapped.dtypes[key]) for key in order])
            files |= write_packed(filling, name, weights)
            entries[name] = replace(entries[name], weights=tuple(weights))
        elif order:
            shutil.copyfile(folder.parent / file, filling / file)
            files[file] = variants.files[file]
            entries[name] = replace(entries[name], weights=order)
    made = {**manifest.made, "packed": datetime.now(UTC).isoformat(timespec="seconds")}
    complete = replace(manifest, entries=entries, files=dict(sorted(files.items())), made=made)
    (filling / MANIFEST).write_text(complete.to_json(), encoding="utf-8")
