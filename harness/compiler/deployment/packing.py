"""Puts other weights into a folder that is already compiled; the old folder stays until a worker has done it."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from harness.compiler.deployment.deployable import ArtifactSpec, Deployable, ImportedEntry, OnStage, drain
from harness.compiler.deployment.describing import describe_weights, timestamp
from harness.core.case import Case, Weights
from harness.core.errors import HarnessError
from harness.core.files import replace_folder
from harness.core.settings import SEEDED, Settings
from harness.runtime.arrays import Array
from harness.runtime.manifest import (
    MANIFEST,
    PACKING_LIBRARY,
    VARIANT,
    VARIANTS,
    File,
    Manifest,
    Variants,
    is_for_several,
    read_any_manifest,
    read_manifest,
    read_variants,
    weights_file,
)
from harness.runtime.preparing import load_packing, pack, write_packed
from harness.runtime.weights import MappedWeights


def replace_artifact(artifact: Path) -> AbstractContextManager[Path]:
    """Yields an empty folder that takes the place of a compiled model or of nothing; see `replace_folder`."""

    def is_compiled(folder: Path) -> bool:
        return any((folder / name).is_file() for name in (MANIFEST, VARIANTS))

    return replace_folder(artifact, is_compiled, "a compiled model")


def run_in_worker(function: str, *arguments: Any, on_stage: OnStage) -> None:
    """Calls a function in a worker, so that even a crash of the compiler ends in a sentence.

    Args:
        function: `module:name`; takes the arguments and `on_stage`.
        arguments: Anything picklable.
        on_stage: Called with the name of each stage as it begins.

    Raises:
        HarnessError: The function fails.
    """
    from harness.core.processes.call import WorkerEnd, run_isolated

    end = run_isolated(function, *arguments, on_stage=on_stage)
    if end.kind is not WorkerEnd.OK:
        error = end.error
        reason = f"{error.type}: {error.message}" if error else end.kind.value
        raise HarnessError(f"failed at the stage {end.stage!r}: {reason}; `sam3-tvm verify` tells more")


def pack_model(
    deployable: Deployable,
    artifact: Path,
    settings: Settings = SEEDED,
    seed: int = 0,
    on_stage: OnStage = lambda stage: None,
    weights: str = Weights.SEEDED,
) -> Manifest:
    """Puts other weights into an artifact, without compiling; the folder is replaced as a whole or stays.

    Args:
        deployable: The model that the artifact was compiled from.
        artifact: The artifact; scale, strategy, options, precision and frontend are its own. One for several CPUs gets
            weights that are packed when they are loaded.
        settings: Where the weights come from.
        seed: Seed of the weights that no checkpoint has.
        on_stage: Called with the name of each stage as it begins.
        weights: Name of the distribution that weights outside the checkpoint are drawn from.

    Raises:
        HarnessError: The checkpoint does not fit, or the folder cannot be written.
        ModelError: The folder is no artifact, or its packing library is not for this machine.
    """
    read_any_manifest(artifact)
    with replace_artifact(artifact) as folder:
        arguments = (deployable, artifact.resolve(), folder, settings, seed, weights)
        run_in_worker(f"{__name__}:pack_into", *arguments, on_stage=on_stage)
        return read_any_manifest(folder)


def pack_into(
    deployable: Deployable,
    artifact: Path,
    folder: Path,
    settings: Settings = SEEDED,
    seed: int = 0,
    weights: str = Weights.SEEDED,
    on_stage: OnStage = lambda stage: None,
) -> Manifest:
    """Fills an empty folder with an artifact's code and other weights; everything else is as in `pack_model`."""
    manifest = read_any_manifest(artifact)
    if manifest.model != deployable.model:
        raise HarnessError(f"{artifact} was compiled from the model {manifest.model}, not from {deployable.model}")
    case = Case(
        manifest.model,
        manifest.strategy,
        manifest.target,
        manifest.scale,
        seed,
        manifest.precision,
        manifest.frontend,
        weights,
    )
    settings = dataclasses.replace(settings, float32=frozenset(manifest.float32))
    spec = ArtifactSpec(
        deployable, case, settings, deployable.options.read(artifact, manifest), tuple(manifest.entries)
    )
    if is_for_several(artifact):
        _pack_for_several(spec, artifact, folder, on_stage)
    else:
        _pack_for_one(spec, artifact, folder, on_stage)
    return read_any_manifest(folder)


def _pack_for_one(spec: ArtifactSpec, artifact: Path, folder: Path, on_stage: OnStage) -> None:
    manifest, machine = read_manifest(artifact), load_packing(artifact)
    if PACKING_LIBRARY in manifest.files and machine is None:
        raise HarnessError(f"{artifact} has no {PACKING_LIBRARY}, which packs weights: add it or compile again")
    files: dict[str, File] = {}
    for item in spec.import_entries(on_stage):
        try:
            tensors = pack(machine, item.name, [(value, value.dtype.name) for value in item.parameters.values()])
        except (TypeError, ValueError) as error:  # of another dtype or shape than the packing library takes
            raise _version_error(artifact, item.name) from error
        _check_same(tensors, manifest.entries[item.name].weights, artifact, item.name)
        files |= write_packed(folder, item.name, tensors)
    files = {**_copy_files(artifact, folder, manifest, files), **files}
    facts = {**manifest.made, "packed": timestamp()}
    manifest = replace(_describe_new_weights(manifest, spec), made=facts, files=dict(sorted(files.items())))
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


def _pack_for_several(spec: ArtifactSpec, artifact: Path, folder: Path, on_stage: OnStage) -> None:
    variants, items = read_variants(artifact), list(spec.import_entries(on_stage))
    for item in items:
        _check_same(item.parameters, variants.weights[item.name], artifact, item.name)
    for name in variants.names:
        manifest = read_manifest(artifact / name, VARIANT)
        (folder / name).mkdir()
        _copy_files(artifact / name, folder / name, manifest)
        manifest = _describe_new_weights(manifest, spec)
        (folder / name / VARIANT).write_text(manifest.to_json(), encoding="utf-8")
    write_variants(folder, variants.names, items)


def write_variants(folder: Path, names: tuple[str, ...], items: list[ImportedEntry]) -> None:
    """Writes the weights of a folder for several CPUs as they were imported, and describes the folder.

    Args:
        folder: The folder.
        names: Names of the variants.
        items: The entry points; the list is empty in the end.
    """
    order: dict[str, tuple[str, ...]] = {}
    files: dict[str, File] = {}
    for name, parameters in drain(items):
        order[name] = tuple(parameters)
        files |= write_packed(folder, name, parameters)
    (folder / VARIANTS).write_text(Variants(names, order, files).to_json(), encoding="utf-8")


def _copy_files(artifact: Path, folder: Path, manifest: Manifest, replaced: Iterable[str] = ()) -> dict[str, File]:
    """Copies the files of an artifact that are there into another folder; returns their descriptions by name."""
    names = [name for name in manifest.files if name not in replaced and (artifact / name).exists()]
    for name in names:
        shutil.copyfile(artifact / name, folder / name)
    return {name: manifest.files[name] for name in names}


def _check_same(parameters: Mapping[str, Array], names: Sequence[str], artifact: Path, entry: str) -> None:
    """Compares the names of an entry point's weights with the artifact's, and dtypes and shapes where it has them.

    Raises:
        HarnessError: They differ: the artifact's code takes other weights.
    """
    matches, path = tuple(parameters) == tuple(names), artifact / weights_file(entry)
    if matches and parameters and path.exists():
        stored = MappedWeights(path)
        kinds = {name: (value.dtype.name, value.shape) for name, value in parameters.items()}
        matches = kinds == {name: (stored.dtypes[name], value.shape) for name, value in stored.tensors.items()}
    if not matches:
        raise _version_error(artifact, entry)


def _version_error(artifact: Path, entry: str) -> HarnessError:
    return HarnessError(f"{artifact} was compiled from another version of {entry}: compile the model again")


def _describe_new_weights(manifest: Manifest, spec: ArtifactSpec) -> Manifest:
    settings = spec.settings
    return replace(
        manifest,
        weights=describe_weights(spec.case, settings),
        trained=settings.checkpoint is not None,
        extra=spec.options.manifest_part(settings),
    )
