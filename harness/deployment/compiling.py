"""A whole model compiled into a folder that runs without PyTorch, and other weights packed into such a folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.budget import NONE, Groups, check_known
from harness.core.case import DEFAULT_STRATEGY, Case
from harness.core.errors import HarnessError
from harness.core.outcome import Kernel
from harness.core.settings import SEEDED, Settings
from harness.core.weights import Weights
from harness.deployment.deployable import Deployable
from harness.deployment.packing import Parameters, pack, write_packed
from harness.files import replaced_folder
from harness.runtime.manifest import (
    DEFAULT_CAPACITY,
    LIBRARY,
    MANIFEST,
    PACKING_LIBRARY,
    Capacity,
    Entry,
    File,
    Manifest,
    read_manifest,
)
from harness.schedules import DEFAULT_SCHEDULES, ChosenSchedules
from harness.targets import HOST, TARGETS, check_precisions

if TYPE_CHECKING:
    import tvm

    from harness.runtime.loading import VirtualMachine

Announce = Callable[[str], None]


@dataclass(frozen=True)
class Compiled:
    """The result of compiling a model.

    Attributes:
        manifest: Manifest of the folder.
        kernels: Kernels of a GPU target, once per architecture.
        lost_schedules: A sentence on each schedule that could not be applied.
    """

    manifest: Manifest
    kernels: tuple[Kernel, ...] = ()
    lost_schedules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Imported:
    """An entry point as a Relax module with the function `main`, and the values of its weights as that takes them."""

    name: str
    outputs: tuple[str, ...]
    module: tvm.IRModule
    parameters: Parameters
    float32: Groups


def compile_model(
    deployable: Deployable,
    case: Case,
    out: Path,
    settings: Settings = SEEDED,
    capacity: Capacity = DEFAULT_CAPACITY,
    schedules: ChosenSchedules = DEFAULT_SCHEDULES,
    announce: Announce = lambda stage: None,
    without: Sequence[str] = (),
    float32: Groups = NONE,
) -> Manifest:
    """Compiles a whole model in a process of its own and writes the folder, or leaves what was there.

    Args:
        deployable: Which model.
        case: Its strategy, target, scale, seed, precision, frontend and weights.
        out: The folder; an artifact that is there is replaced.
        settings: Where the weights come from, and the processors to compile for.
        capacity: The longest prompt.
        schedules: What tuning found for the target.
        announce: Called with the name of each stage as it begins.
        without: Names of entry points to leave out.
        float32: Groups of products that stay float32 in a half precision.

    Raises:
        HarnessError: No entry point has one of the groups, the target does not compile in the precision, the machine
            cannot compile for the target, the checkpoint does not fit, the strategy does not get through the compiler,
            or the folder cannot be written.
    """
    check_precisions(case.target, (case.precision,))
    with _replaced(out) as folder:
        request = (deployable, case, folder, settings, capacity, schedules, without, float32)
        _isolated("compile_request", request, announce)
        return read_manifest(folder)


def pack_model(
    deployable: Deployable,
    into: Path,
    settings: Settings = SEEDED,
    seed: int = 0,
    announce: Announce = lambda stage: None,
    weights: str = Weights.SEEDED,
) -> Manifest:
    """Puts other weights into an artifact, without compiling; the folder is replaced as a whole or stays.

    Args:
        deployable: The model that the artifact was compiled from.
        into: The artifact; scale, strategy, capacity, precision and frontend are its own.
        settings: Where the weights come from.
        seed: Seed of the weights that no checkpoint has.
        announce: Called with the name of each stage as it begins.
        weights: What weights that no checkpoint has are drawn by.

    Raises:
        HarnessError: The checkpoint does not fit, or the folder cannot be written.
        Sam3Error: The folder is no artifact, or its packing library is not for this machine.
    """
    read_manifest(into)
    with _replaced(into) as folder:
        _isolated("pack_request", (deployable, into.resolve(), folder, settings, seed, weights), announce)
        return read_manifest(folder)


def _replaced(artifact: Path) -> AbstractContextManager[Path]:
    """Gives a folder to fill, which takes the place of an artifact or of nothing; see `replaced_folder`."""
    return replaced_folder(artifact, lambda folder: (folder / MANIFEST).is_file(), "a compiled model")


def _isolated(function: str, request: tuple[Any, ...], announce: Announce) -> None:
    """Calls a function of this module in a worker, so that a crash in the compiler is a sentence too."""
    from harness.processes import WorkerEnd, run_isolated

    ended = run_isolated(f"{__name__}:{function}", request, breadcrumb=announce)
    if ended.kind is not WorkerEnd.OK:
        error = ended.error
        reason = f"{error.type}: {error.message}" if error else ended.kind.value
        raise HarnessError(f"failed at the stage {ended.stage!r}: {reason}; `sam3-tvm verify` tells more")


def compile_request(
    request: tuple[Deployable, Case, Path, Settings, Capacity, ChosenSchedules, Sequence[str], Groups],
    announce: Announce,
) -> None:
    """Calls `compile_into` as `harness.processes` calls functions."""
    compile_into(*request[:6], without=request[6], float32=request[7], announce=announce)


def pack_request(request: tuple[Deployable, Path, Path, Settings, int, str], announce: Announce) -> None:
    """Calls `pack_into` as `harness.processes` calls functions."""
    pack_into(*request, announce=announce)


def compile_into(
    deployable: Deployable,
    case: Case,
    folder: Path,
    settings: Settings = SEEDED,
    capacity: Capacity = DEFAULT_CAPACITY,
    schedules: ChosenSchedules = DEFAULT_SCHEDULES,
    *,
    announce: Announce = lambda stage: None,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    for_emulation: bool = False,
    float32: Groups = NONE,
) -> Compiled:
    """Compiles a whole model in this process and fills an empty folder with it.

    Args:
        deployable: Which model.
        case: Its strategy, target, scale, seed, precision, frontend and weights.
        folder: An empty folder.
        settings: Where the weights come from, and the processors to compile for.
        capacity: The longest prompt.
        schedules: What tuning found for the target.
        announce: Called with the name of each stage as it begins.
        only: Names of the entry points to compile, all if there is none; functions written as kernels come in any case.
        without: Names of entry points to leave out.
        for_emulation: Whether the CPU of this machine is to run a GPU's kernels.
        float32: Groups of products that stay float32 in a half precision.

    Raises:
        HarnessError: No entry point has one of the groups, the machine cannot compile for the target or the processors,
            or the checkpoint does not fit.
        Exception: Whatever the strategy `none` makes the importer raise.
    """
    from harness.deployment.lowering import input_specs, merged, output_specs
    from harness.runtime.devices import runtime_libraries
    from harness.targets.compiling import platform_of, target_for

    target = case.target
    problem = TARGETS[target].compile_problem()
    if problem is not None:
        raise HarnessError(f"cannot compile for {target}: {problem}")
    imported = list(_imported(deployable, case, settings, capacity, announce, only, without, float32))
    check_known(float32, [item.float32 for item in imported], "what is compiled")
    announce("compile")
    tvm_target = target_for(TARGETS[target], settings.processors, for_emulation=for_emulation)
    modules = {item.name: item.module for item in imported}
    outputs = {item.name: item.outputs for item in imported}
    for kernel in deployable.kernels:
        modules[kernel.name], outputs[kernel.name] = kernel.module(tvm_target), kernel.outputs
    whole = merged(modules)
    entries = {
        name: Entry(input_specs(whole[name]), output_specs(whole[name], names)) for name, names in outputs.items()
    }
    del modules
    machine, kernels, lost = _build(whole, target, tvm_target, tuple(entries), folder, schedules, for_emulation)
    announce("pack")
    files: dict[str, File] = {}
    for name, parameters in _taken(imported):
        tensors = pack(machine, name, parameters)
        files |= write_packed(folder, name, tensors)
        entries[name] = replace(entries[name], weights=tuple(tensors))
    for name, source in deployable.files().items():
        shutil.copyfile(source, folder / name)
    if platform_of(tvm_target.host or tvm_target) == platform_of(HOST.tvm_target()):
        # So that the folder runs where only the small tvm_ffi package is installed.
        for library in runtime_libraries(target):
            shutil.copyfile(library, folder / library.name)
    made_of = files | _described(folder, files)
    manifest = _manifest(deployable, case, settings, capacity, schedules.origin, tvm_target, entries, made_of)
    manifest = replace(manifest, float32=tuple(sorted(float32)))
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return Compiled(manifest, kernels, lost)


def pack_into(
    deployable: Deployable,
    artifact: Path,
    folder: Path,
    settings: Settings = SEEDED,
    seed: int = 0,
    weights: str = Weights.SEEDED,
    *,
    announce: Announce = lambda stage: None,
) -> Manifest:
    """Fills an empty folder with an artifact's code and other weights; everything else is as in `pack_model`."""
    import tvm_ffi

    from harness.runtime.loading import load_library

    manifest = read_manifest(artifact)
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
    packing = artifact / PACKING_LIBRARY
    if PACKING_LIBRARY in manifest.files and not packing.exists():
        raise HarnessError(f"{artifact} has no {PACKING_LIBRARY}, which packs weights: add it or compile again")
    machine = load_library(packing, tvm_ffi.device("cpu", 0)) if packing.exists() else None
    files: dict[str, File] = {}
    kept = frozenset(manifest.float32)
    entries = tuple(manifest.entries)
    for item in _imported(deployable, case, settings, manifest.capacity, announce, entries, float32=kept):
        name = item.name
        tensors = pack(machine, name, item.parameters)
        if tuple(tensors) != manifest.entries[name].weights:
            raise HarnessError(f"{artifact} was compiled from another version of {name}: compile the model again")
        files |= write_packed(folder, name, tensors)
    others = [name for name in manifest.files if name not in files and (artifact / name).exists()]
    for name in others:
        shutil.copyfile(artifact / name, folder / name)
    manifest = replace(
        manifest,
        weights=_origin(case, settings),
        trained=settings.checkpoint is not None,
        point_prompts=_point_prompts(deployable, settings),
        made={**manifest.made, "packed": _now()},
        files={name: manifest.files[name] for name in others} | files,
    )
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def _imported(
    deployable: Deployable,
    case: Case,
    settings: Settings,
    capacity: Capacity,
    announce: Announce,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    float32: Groups = NONE,
) -> Iterator[Imported]:
    from harness.lowering.route import Route

    with deployable.context():
        announce("build")
        for program in deployable.programs(case, settings, capacity):
            if (only and program.name not in only) or program.name in without:
                continue
            strategy = case.strategy if program.uses_rope else DEFAULT_STRATEGY
            route = Route.of(replace(case, strategy=strategy), float32)
            announce(f"export {program.name}")
            exported = route.export(program.module, tuple(program.example.values()), program.axes)
            announce(f"import {program.name}")
            lowered = route.lower(exported, program.module)
            yield Imported(program.name, program.outputs, lowered.module, lowered.parameters(), lowered.float32)


def _taken(imported: list[Imported]) -> Iterator[tuple[str, Parameters]]:
    """Yields the parameters of one entry point after the other, none of which is kept."""
    while imported:
        item = imported.pop(0)
        yield item.name, item.parameters


def _build(
    whole: tvm.IRModule,
    target: str,
    tvm_target: tvm.target.Target,
    entries: tuple[str, ...],
    folder: Path,
    schedules: ChosenSchedules,
    keep_source: bool,
) -> tuple[VirtualMachine | None, tuple[Kernel, ...], tuple[str, ...]]:
    """Writes the library, and the one that packs the weights, which is loaded; also kernels and lost schedules."""
    import tvm_ffi

    from harness.deployment.lowering import PACKING, reachable
    from harness.runtime.loading import load_library
    from harness.schedules.common.kernel_info import lost_schedules
    from harness.targets.compiling import build_library, lower_module

    lowered = lower_module(whole, TARGETS[target], tvm_target, schedules.schedules)
    lost = lost_schedules(lowered)
    kernels = build_library(reachable(lowered, entries), tvm_target, folder / LIBRARY, keep_source=keep_source)
    names = {variable.name_hint for variable in lowered.get_global_vars()}
    packers = tuple(f"{entry}{PACKING}" for entry in entries if f"{entry}{PACKING}" in names)
    if not packers:
        return None, kernels, lost
    library = folder / PACKING_LIBRARY
    build_library(reachable(lowered, packers), HOST.tvm_target(), library)
    return load_library(library, tvm_ffi.device("cpu", 0)), kernels, lost


def _manifest(
    deployable: Deployable,
    case: Case,
    settings: Settings,
    capacity: Capacity,
    schedules: str,
    tvm_target: tvm.target.Target,
    entries: Mapping[str, Entry],
    files: Mapping[str, File],
) -> Manifest:
    from harness.machine import versions
    from harness.targets.compiling import platform_of, required_cpu

    host = tvm_target.host or tvm_target
    cpu, features = required_cpu(host)
    system, architecture = platform_of(host)
    architectures = TARGETS[case.target].architectures
    packages = {name: version for name, version in versions().items() if version}
    return Manifest(
        made={
            "compiled": _now(),
            "target": str(tvm_target),
            "schedules": schedules,
            **packages,
        },
        target=case.target,
        system=system,
        architecture=architecture,
        cpu=cpu,
        cpu_features=tuple(features),
        architectures=architectures(tvm_target) if architectures is not None else (),
        model=deployable.model,
        scale=str(case.scale),
        strategy=case.strategy,
        weights=_origin(case, settings),
        trained=settings.checkpoint is not None,
        point_prompts=_point_prompts(deployable, settings),
        precision=case.precision,
        frontend=case.frontend,
        capacity=capacity,
        vocabulary=deployable.vocabulary,
        entries=entries,
        files=dict(sorted(files.items())),
    )


def _described(folder: Path, known: Mapping[str, Any]) -> dict[str, File]:
    from harness.runtime.weights import file_digest

    return {path.name: file_digest(path) for path in folder.iterdir() if path.name not in known}


def _origin(case: Case, settings: Settings) -> str:
    """Returns where the weights are from, in words."""
    if settings.checkpoint is None:
        return f"seed {case.seed}" if case.weights == Weights.SEEDED else f"seed {case.seed}, {case.weights}"
    from harness.runtime.weights import file_digest

    rest = f", what it lacks from seed {case.seed}" if settings.allow_partial else ""
    return f"{settings.checkpoint.name}, SHA-256 {file_digest(settings.checkpoint).sha256}{rest}"


def _point_prompts(deployable: Deployable, settings: Settings) -> bool:
    return settings.checkpoint is None or deployable.knows_points(settings.checkpoint)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
