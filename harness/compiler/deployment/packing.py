"""Other weights for a folder that was compiled before."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harness.compiler.deployment.deployable import Deployable
from harness.compiler.deployment.describing import now, origin
from harness.compiler.deployment.filling import isolated, replaced
from harness.compiler.deployment.imported import Contents, OnStage, Parameters
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
from harness.runtime.variants import Variants, described, is_for_several, read_variants
from harness.runtime.weights import MappedWeights


def packed(machine: VirtualMachine | None, entry: str, parameters: Parameters) -> dict[str, Array]:
    """Returns the weights of an entry point as its compiled code takes them, by name and in that order.

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
    into: Path,
    settings: Settings = SEEDED,
    seed: int = 0,
    on_stage: OnStage = lambda stage: None,
    weights: str = Weights.SEEDED,
) -> Manifest:
    """Puts other weights into an artifact, without compiling; the folder is replaced as a whole or stays.

    Args:
        deployable: The model that the artifact was compiled from.
        into: The artifact; scale, strategy, options, precision and frontend are its own. One for several CPUs gets
            weights that are packed when they are loaded.
        settings: Where the weights come from.
        seed: Seed of the weights that no checkpoint has.
        on_stage: Called with the name of each stage as it begins.
        weights: What weights that no checkpoint has are drawn by.

    Raises:
        HarnessError: The checkpoint does not fit, or the folder cannot be written.
        ModelError: The folder is no artifact, or its packing library is not for this machine.
    """
    described(into)
    with replaced(into) as folder:
        request = (deployable, into.resolve(), folder, settings, seed, weights)
        isolated(f"{__name__}:pack_request", request, on_stage)
        return described(folder)


def pack_request(request: tuple[Deployable, Path, Path, Settings, int, str], on_stage: OnStage) -> None:
    """Calls `pack_into` as `harness.core.processes` calls functions."""
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
    manifest = described(artifact)
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
    contents = Contents(deployable, case, settings, options, entries, float32)
    if is_for_several(artifact):
        _pack_for_several(contents, artifact, folder, on_stage)
    else:
        _pack_for_one(contents, artifact, folder, on_stage)
    return described(folder)


def _pack_for_one(contents: Contents, artifact: Path, folder: Path, on_stage: OnStage) -> None:
    import tvm_ffi

    from harness.runtime.loading import load_library

    manifest, packing = read_manifest(artifact), artifact / PACKING_LIBRARY
    if PACKING_LIBRARY in manifest.files and not packing.exists():
        raise HarnessError(f"{artifact} has no {PACKING_LIBRARY}, which packs weights: add it or compile again")
    machine = load_library(packing, tvm_ffi.device("cpu", 0)) if packing.exists() else None
    files: dict[str, File] = {}
    for item in contents.imported(on_stage):
        try:
            tensors = packed(machine, item.name, item.parameters)
        except (TypeError, ValueError) as error:  # of another dtype or shape than the packing library takes
            raise _another_version(artifact, item.name) from error
        _check_same(tensors, manifest.entries[item.name].weights, artifact, item.name)
        files |= write_packed(folder, item.name, tensors)
    files = {**_copied(artifact, folder, manifest, files), **files}
    made = {**manifest.made, "packed": now()}
    manifest = replace(_with_weights(manifest, contents), made=made, files=dict(sorted(files.items())))
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


def _pack_for_several(contents: Contents, artifact: Path, folder: Path, on_stage: OnStage) -> None:
    variants, items = read_variants(artifact), list(contents.imported(on_stage))
    for item in items:
        _check_same(item.parameters, variants.weights[item.name], artifact, item.name)
    for name in variants.names:
        manifest = read_manifest(artifact / name, VARIANT)
        (folder / name).mkdir()
        _copied(artifact / name, folder / name, manifest)
        manifest = _with_weights(manifest, contents)
        (folder / name / VARIANT).write_text(manifest.to_json(), encoding="utf-8")
    variants = Variants(variants.names, *write_unpacked(folder, items))
    (folder / VARIANTS).write_text(variants.to_json(), encoding="utf-8")


def _copied(artifact: Path, folder: Path, manifest: Manifest, without: Iterable[str] = ()) -> dict[str, File]:
    """Copies the files of an artifact that are there into another folder; returns their descriptions by name."""
    names = [name for name in manifest.files if name not in without and (artifact / name).exists()]
    for name in names:
        shutil.copyfile(artifact / name, folder / name)
    return {name: manifest.files[name] for name in names}


def _check_same(found: Mapping[str, Array], expected: Sequence[str], artifact: Path, entry: str) -> None:
    """Compares the names of an entry point's weights with the artifact's, and dtypes and shapes where it has them.

    Raises:
        HarnessError: They differ: the artifact's code takes other weights.
    """
    same, path = tuple(found) == tuple(expected), artifact / weights_file(entry)
    if same and found and path.exists():
        stored = MappedWeights(path)
        here = {name: (value.dtype.name, value.shape) for name, value in found.items()}
        same = here == {name: (stored.dtypes[name], value.shape) for name, value in stored.tensors.items()}
    if not same:
        raise _another_version(artifact, entry)


def _another_version(artifact: Path, entry: str) -> HarnessError:
    return HarnessError(f"{artifact} was compiled from another version of {entry}: compile the model again")


def _with_weights(manifest: Manifest, contents: Contents) -> Manifest:
    settings = contents.settings
    return replace(
        manifest,
        weights=origin(contents.case, settings),
        trained=settings.checkpoint is not None,
        extra=contents.options.manifest_part(settings),
    )
