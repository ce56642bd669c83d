"""Puts other weights into a folder that is already compiled."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from harness.compiler.deployment.deployable import Deployable
from harness.compiler.deployment.describing import describe_weights, timestamp
from harness.compiler.deployment.filling import replace_artifact, run_in_worker
from harness.compiler.deployment.imported import ArtifactSpec, OnStage, Parameters
from harness.compiler.deployment.variants import write_unpacked
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.settings import SEEDED, Settings
from harness.core.weights import Weights
from harness.runtime.loading import VirtualMachine
from harness.runtime.manifest import (
    MANIFEST,
    PACKING_LIBRARY,
    VARIANT,
    VARIANTS,
    File,
    Manifest,
    read_manifest,
    weights_file,
)
from harness.runtime.packing import Array, named, pack, packs, write_packed
from harness.runtime.variants import Variants, is_for_several, read_any_manifest, read_variants
from harness.runtime.weights import MappedWeights


def pack_weights(machine: VirtualMachine | None, entry: str, parameters: Parameters) -> dict[str, Array]:
    """Returns the weights of an entry point in the order and layout of its compiled code, by name.

    Args:
        machine: With the packing library; None if nothing is packed for the target.
        entry: Name of the entry point.
        parameters: Its weights as imported.
    """
    if machine is None or not packs(machine, entry):
        return named(entry, parameters.values())
    return pack(machine, entry, [(value, value.dtype.name) for value in parameters.values()])


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
        request = (deployable, artifact.resolve(), folder, settings, seed, weights)
        run_in_worker(f"{__name__}:pack_request", request, on_stage)
        return read_any_manifest(folder)


def pack_request(request: tuple[Deployable, Path, Path, Settings, int, str], on_stage: OnStage) -> None:
    """Calls `pack_into`; `harness.core.processes` calls this function."""
    pack_into(*request, on_stage=on_stage)


def pack_into(
    deployable: Deployable,
    artifact: Path,
    folder: Path,
    settings: Settings = SEEDED,
    seed: int = 0,
    weights: str = Weights.SEEDED,
    *,
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
    entries, float32 = tuple(manifest.entries), frozenset(manifest.float32)
    options = deployable.options.read(artifact, manifest)
    spec = ArtifactSpec(deployable, case, settings, options, entries, float32)
    if is_for_several(artifact):
        _pack_for_several(spec, artifact, folder, on_stage)
    else:
        _pack_for_one(spec, artifact, folder, on_stage)
    return read_any_manifest(folder)


def _pack_for_one(spec: ArtifactSpec, artifact: Path, folder: Path, on_stage: OnStage) -> None:
    import tvm_ffi

    from harness.runtime.loading import load_library

    manifest, packing = read_manifest(artifact), artifact / PACKING_LIBRARY
    if PACKING_LIBRARY in manifest.files and not packing.exists():
        raise HarnessError(f"{artifact} has no {PACKING_LIBRARY}, which packs weights: add it or compile again")
    machine = load_library(packing, tvm_ffi.device("cpu", 0)) if packing.exists() else None
    files: dict[str, File] = {}
    for item in spec.import_entries(on_stage):
        try:
            tensors = pack_weights(machine, item.name, item.parameters)
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
    variants = Variants(variants.names, *write_unpacked(folder, items))
    (folder / VARIANTS).write_text(variants.to_json(), encoding="utf-8")


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
