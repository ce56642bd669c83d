"""Folders for several CPUs: code for each of them, and weights once, which are packed for the CPU that loads them.

Packed weights differ from CPU to CPU, because each packs operands into panels as wide as its registers. So such a
folder has the weights as they were imported, and a folder in it, a variant, for each CPU. A variant becomes an ordinary
folder, which runs alone, when it is loaded for the first time.

    sam3-any/variants.json              names of the variants, and of the weights in order
    sam3-any/<entry>.safetensors        the weights as imported
    sam3-any/x86-64-v3/variant.json     as manifest.json, but without weights
    sam3-any/x86-64-v3/model.so         and everything else that an ordinary folder has
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.runtime.checking import check_files
from harness.runtime.cpu import MATRIX_UNIT, cpu_model, this_platform
from harness.runtime.loading import LoadError, cpu_problem, load_library
from harness.runtime.manifest import (
    FORMAT,
    MANIFEST,
    PACKING_LIBRARY,
    VARIANT,
    VARIANTS,
    ArtifactError,
    File,
    Manifest,
    read_description,
    read_manifest,
    weights_file,
)
from harness.runtime.matrix_unit import matrix_unit_problem
from harness.runtime.packing import pack, packs, write_packed
from harness.runtime.weights import MappedWeights

_FILLING, _LOCK = ".packing", ".packing.lock"

Announce = Callable[[str], None]


@dataclass(frozen=True)
class Variants:
    """What is in a folder for several CPUs.

    Attributes:
        names: Names of the variants, which are folders.
        weights: Names of the weights that each entry point takes, in the order in which its packing takes them.
        files: The files of the weights, by name.
        format: `harness.runtime.manifest.FORMAT` of the version that wrote it.
    """

    names: tuple[str, ...]
    weights: Mapping[str, tuple[str, ...]]
    files: Mapping[str, File]
    format: int = FORMAT

    def to_json(self) -> str:
        """Returns the text of `variants.json`."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


def read_variants(folder: Path) -> Variants:
    """Reads what is in a folder for several CPUs.

    Raises:
        ArtifactError: It is no such folder, or it is of another version or damaged.
    """
    return read_description(folder / VARIANTS, _variants)


def is_for_several(folder: Path) -> bool:
    """Returns whether a folder is for several CPUs."""
    return (folder / VARIANTS).is_file()


def described(folder: Path) -> Manifest:
    """Returns the manifest of a folder; of one for several CPUs, that of its first variant, which has no weights.

    Raises:
        ArtifactError: There is none, or it is of another version or damaged.
    """
    if is_for_several(folder):
        return read_manifest(folder / read_variants(folder).names[0], VARIANT)
    return read_manifest(folder)


def prepared(folder: Path, announce: Announce = lambda sentence: None) -> Path:
    """Returns the folder to load: an ordinary one as it is, of one for several CPUs the variant for this CPU.

    The weights of a variant are packed when it is asked for first, in its folder, which then is an ordinary one. It
    takes as much memory as the largest file of weights twice.

    Args:
        folder: An ordinary folder, one for several CPUs, or a variant of one.
        announce: Is told in a sentence if weights are packed, before they are.

    Raises:
        ArtifactError: The folder is incomplete or damaged, or cannot be written.
        LoadError: No variant runs on this machine.
    """
    if is_for_several(folder):
        folder = folder / _chosen(folder)
    if (folder / VARIANT).is_file() and not (folder / MANIFEST).is_file():
        _pack(folder, announce)
    return folder


def _chosen(folder: Path) -> str:
    """Returns the variant that uses most of what this CPU has, of several such the one that was named first."""
    manifests = {name: read_manifest(folder / name, VARIANT) for name in read_variants(folder).names}
    problems = {name: _problem(manifest) for name, manifest in manifests.items()}
    running = [name for name, problem in problems.items() if problem is None]
    if not running:
        told = "; ".join(f"{name} was {problem}" for name, problem in problems.items())
        raise LoadError(f"{folder} has no code for this {cpu_model()}: {told}. Compile it with --cpu for this one, too")
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
    """Packs the weights of a variant."""
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
                for path in sorted(filling.iterdir(), key=lambda path: path.name == MANIFEST):
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
    import tvm_ffi

    variants, manifest = read_variants(folder.parent), read_manifest(folder, VARIANT)
    check_files(folder.parent, variants.files, contents=True)
    check_files(folder, manifest.files, contents=True)
    library = folder / PACKING_LIBRARY
    if PACKING_LIBRARY in manifest.files and not library.is_file():
        raise ArtifactError(f"{folder} has no {PACKING_LIBRARY}, which packs its weights: copy the whole folder")
    machine = load_library(library, tvm_ffi.device("cpu", 0)) if library.is_file() else None
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


def _variants(data: dict[str, Any]) -> Variants:
    names = tuple(map(str, data["names"]))
    if not names:
        raise ValueError("no variant")
    return Variants(
        names,
        {entry: tuple(order) for entry, order in data["weights"].items()},
        {name: File(**file) for name, file in data["files"].items()},
    )
