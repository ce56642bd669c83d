"""The whole model compiled into a folder that runs without PyTorch, and other weights packed into such a folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.case import check_precisions
from harness.core.errors import HarnessError
from harness.core.outcome import Kernel
from harness.core.precision import DEFAULT_PRECISION, PRECISIONS
from harness.deployment.folder import replaced_folder
from harness.deployment.packing import Parameters, pack, write_packed
from harness.lowering.rope import STRATEGIES
from harness.models.sam3.deployed.entry_points import ENTRY_POINTS, IMAGE_FUNCTIONS, EntryPoint
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
from harness.schedules import Schedules
from harness.targets import TARGETS

if TYPE_CHECKING:
    import tvm

    from harness.runtime.loading import VirtualMachine

Announce = Callable[[str], None]


@dataclass(frozen=True)
class Model:
    """Which model: scale, strategy for rotary position encoding, weights, the longest prompt, schedules, precision.

    Attributes:
        checkpoint: File of the weights; None for seeded ones.
        allow_partial: Whether a checkpoint may lack parameters, which stay seeded.
        capacity: The longest prompt.
        database: Of tuning, whose schedules to compile with; None for the default schedules.
        precision: In what weights and operands of products are kept, a key of `PRECISIONS`.
    """

    scale: str = "full"
    strategy: str = "real"
    seed: int = 0
    checkpoint: Path | None = None
    allow_partial: bool = False
    capacity: Capacity = DEFAULT_CAPACITY
    database: Path | None = None
    precision: str = DEFAULT_PRECISION


@dataclass(frozen=True)
class Compiled:
    """What became of a model.

    Attributes:
        manifest: Of the folder.
        kernels: Those of a GPU target, once per architecture.
    """

    manifest: Manifest
    kernels: tuple[Kernel, ...] = ()


@dataclass(frozen=True)
class Imported:
    """An entry point as a Relax module with the function `main`, and the values of its weights as that takes them."""

    entry_point: EntryPoint
    module: tvm.IRModule
    parameters: Parameters


def compile_model(model: Model, target: str, out: Path, announce: Announce = lambda stage: None) -> Manifest:
    """Compiles the whole model in a process of its own and writes the folder, or leaves what was there.

    Args:
        model: Which model.
        target: Name of the target, a key of `TARGETS`.
        out: The folder; an artifact that is there is replaced.
        announce: Called with the name of each stage as it begins.

    Raises:
        HarnessError: The target does not compile in the model's precision, the machine cannot compile for the target,
            the checkpoint does not fit, the strategy does not get through the compiler, or the folder cannot be
            written.
    """
    check_precisions(target, (model.precision,))
    with replaced_folder(out) as folder:
        _isolated("compile_request", (model, target, folder), announce)
        return read_manifest(folder)


def pack_model(model: Model, into: Path, announce: Announce = lambda stage: None) -> Manifest:
    """Puts other weights into an artifact, without compiling; the folder is replaced as a whole or stays.

    Args:
        model: Whose weights; scale, strategy, capacity and precision are the artifact's.
        into: The artifact.
        announce: Called with the name of each stage as it begins.

    Raises:
        HarnessError: The checkpoint does not fit, or the folder cannot be written.
        Sam3Error: The folder is no artifact, or its packing library is not for this machine.
    """
    read_manifest(into)
    with replaced_folder(into) as folder:
        _isolated("pack_request", (model, into.resolve(), folder), announce)
        return read_manifest(folder)


def _isolated(function: str, request: tuple[Any, ...], announce: Announce) -> None:
    """Calls a function of this module in a worker, so that a crash in the compiler is a sentence too."""
    from harness.processes import WorkerEnd, run_isolated

    ended = run_isolated(f"{__name__}:{function}", request, breadcrumb=announce)
    if ended.kind is not WorkerEnd.OK:
        error = ended.error
        reason = f"{error.type}: {error.message}" if error else ended.kind.value
        raise HarnessError(f"failed at the stage {ended.stage!r}: {reason}; `sam3-tvm verify` tells more")


def compile_request(request: tuple[Model, str, Path], announce: Announce) -> None:
    """`compile_into` as `harness.processes` calls it."""
    from harness.processes.threads import configure_threads

    configure_threads()
    compile_into(*request, announce)


def pack_request(request: tuple[Model, Path, Path], announce: Announce) -> None:
    """`pack_into` as `harness.processes` calls it."""
    from harness.processes.threads import configure_threads

    configure_threads()
    pack_into(*request, announce)


def compile_into(
    model: Model,
    target: str,
    folder: Path,
    announce: Announce = lambda stage: None,
    *,
    entry_points: Sequence[EntryPoint] = ENTRY_POINTS,
    keep_source: bool = False,
) -> Compiled:
    """Compiles the whole model in this process and fills an empty folder with it.

    Args:
        model: Which model.
        target: Name of the target, a key of `TARGETS`.
        folder: An empty folder.
        announce: Called with the name of each stage as it begins.
        entry_points: What of PyTorch's model; what is done to images comes in any case.
        keep_source: Whether the library carries the source of a GPU's kernels, for emulation.

    Raises:
        HarnessError: The machine cannot compile for the target, or the checkpoint does not fit.
        Exception: Whatever the strategy `none` makes the importer raise.
    """
    from harness.deployment.lowering import input_specs, merged, output_specs
    from harness.models.sam3.vocabulary import vocabulary_path
    from harness.runtime.devices import runtime_libraries
    from harness.runtime.sam3.tokenizer import VOCABULARY_FILE
    from harness.targets.compiling import platform_of
    from harness.tuning.database import schedules_from

    problem = TARGETS[target].compile_problem()
    if problem is not None:
        raise HarnessError(f"cannot compile for {target}: {problem}")
    imported = list(_imported(model, announce, entry_points))
    announce("compile")
    tvm_target = TARGETS[target].tvm_target()
    modules = {item.entry_point.name: item.module for item in imported}
    outputs = {item.entry_point.name: item.entry_point.outputs for item in imported}
    kind = str(tvm_target.kind.name)
    for kernel in IMAGE_FUNCTIONS:
        modules[kernel.name], outputs[kernel.name] = kernel.module(kind), kernel.outputs
    whole = merged(modules)
    entries = {
        name: Entry(input_specs(whole[name]), output_specs(whole[name], names)) for name, names in outputs.items()
    }
    del modules
    schedules = schedules_from(model.database, target)
    machine, kernels = _build(whole, target, tvm_target, tuple(entries), folder, schedules, keep_source)
    announce("pack")
    files: dict[str, File] = {}
    for name, parameters in _taken(imported):
        tensors = pack(machine, name, parameters)
        files |= write_packed(folder, name, tensors)
        entries[name] = replace(entries[name], weights=tuple(tensors))
    shutil.copyfile(vocabulary_path(), folder / VOCABULARY_FILE)
    if platform_of(tvm_target.host or tvm_target) == platform_of(TARGETS["llvm"].tvm_target()):
        # So that the folder runs where only the small tvm_ffi package is installed.
        for library in runtime_libraries(target):
            shutil.copyfile(library, folder / library.name)
    manifest = _manifest(model, target, tvm_target, entries, files | _described(folder, files))
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return Compiled(manifest, kernels)


def pack_into(model: Model, artifact: Path, folder: Path, announce: Announce = lambda stage: None) -> Manifest:
    """Fills an empty folder with an artifact's code and other weights; everything else is as in `pack_model`."""
    import tvm_ffi

    from harness.runtime.loading import load_library

    manifest = read_manifest(artifact)
    model = replace(
        model,
        scale=manifest.scale,
        strategy=manifest.strategy,
        capacity=manifest.capacity,
        precision=manifest.precision,
    )
    packing = artifact / PACKING_LIBRARY
    if PACKING_LIBRARY in manifest.files and not packing.exists():
        raise HarnessError(f"{artifact} has no {PACKING_LIBRARY}, which packs weights: add it or compile again")
    machine = load_library(packing, tvm_ffi.device("cpu", 0)) if packing.exists() else None
    files: dict[str, File] = {}
    for item in _imported(model, announce, ENTRY_POINTS):
        name = item.entry_point.name
        tensors = pack(machine, name, item.parameters)
        if tuple(tensors) != manifest.entries[name].weights:
            raise HarnessError(f"{artifact} was compiled from another version of {name}: compile the model again")
        files |= write_packed(folder, name, tensors)
    kept = [name for name in manifest.files if name not in files and (artifact / name).exists()]
    for name in kept:
        shutil.copyfile(artifact / name, folder / name)
    manifest = replace(
        manifest,
        weights=_origin(model),
        trained=model.checkpoint is not None,
        point_prompts=_point_prompts(model),
        made={**manifest.made, "packed": _now()},
        files={name: manifest.files[name] for name in kept} | files,
    )
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def _imported(model: Model, announce: Announce, entry_points: Sequence[EntryPoint]) -> Iterator[Imported]:
    from harness.lowering.frontends.torch_export import export_program
    from harness.lowering.precision import lower_precision, parameters_for
    from harness.models.sam3.build import build_model
    from harness.models.sam3.upstream import upstream

    strategy, precision = STRATEGIES[model.strategy], PRECISIONS[model.precision]
    with upstream():
        announce("build")
        whole = build_model(model.scale, model.seed, model.checkpoint, allow_partial=model.allow_partial)
        for entry_point in entry_points:
            module = entry_point.build(whole).eval()
            inputs = tuple(entry_point.inputs(model.capacity).values())
            announce(f"export {entry_point.name}")
            chosen = strategy if entry_point.uses_rope else STRATEGIES["real"]
            with chosen.apply(module):
                program = export_program(module, inputs)
            announce(f"import {entry_point.name}")
            imported, parameters = chosen.import_program(program)
            lowered = lower_precision(imported, precision)
            values = parameters_for(lowered, list(parameters.values()))
            yield Imported(entry_point, lowered, dict(zip(parameters, values, strict=True)))


def _taken(imported: list[Imported]) -> Iterator[tuple[str, Parameters]]:
    """The parameters of one entry point after the other, none of which is kept."""
    while imported:
        item = imported.pop(0)
        yield item.entry_point.name, item.parameters


def _build(
    whole: tvm.IRModule,
    target: str,
    tvm_target: tvm.target.Target,
    entries: tuple[str, ...],
    folder: Path,
    schedules: Schedules,
    keep_source: bool,
) -> tuple[VirtualMachine | None, tuple[Kernel, ...]]:
    """Writes the library, and the one that packs the weights, which is loaded; also the kernels of a GPU target."""
    import tvm_ffi

    from harness.deployment.lowering import PACKING, reachable
    from harness.runtime.loading import load_library
    from harness.targets.compiling import build_library, lower_module

    lowered = lower_module(whole, TARGETS[target], tvm_target, schedules)
    kernels = build_library(reachable(lowered, entries), tvm_target, folder / LIBRARY, keep_source=keep_source)
    names = {variable.name_hint for variable in lowered.get_global_vars()}
    packers = tuple(f"{entry}{PACKING}" for entry in entries if f"{entry}{PACKING}" in names)
    if not packers:
        return None, kernels
    library = folder / PACKING_LIBRARY
    build_library(reachable(lowered, packers), TARGETS["llvm"].tvm_target(), library)
    return load_library(library, tvm_ffi.device("cpu", 0)), kernels


def _manifest(
    model: Model, target: str, tvm_target: tvm.target.Target, entries: Mapping[str, Entry], files: Mapping[str, File]
) -> Manifest:
    from harness.machine import versions
    from harness.runtime.sam3.tokenizer import VOCABULARY_FILE
    from harness.targets.compiling import platform_of, required_cpu
    from harness.tuning.database import describe_database

    host = tvm_target.host or tvm_target
    cpu, features = required_cpu(host)
    system, architecture = platform_of(host)
    architectures = TARGETS[target].architectures
    packages = {name: version for name, version in versions().items() if version}
    return Manifest(
        made={
            "compiled": _now(),
            "target": str(tvm_target),
            "schedules": describe_database(model.database, target),
            **packages,
        },
        target=target,
        system=system,
        architecture=architecture,
        cpu=cpu,
        cpu_features=tuple(features),
        architectures=architectures(tvm_target) if architectures is not None else (),
        scale=model.scale,
        strategy=model.strategy,
        weights=_origin(model),
        trained=model.checkpoint is not None,
        point_prompts=_point_prompts(model),
        precision=model.precision,
        capacity=model.capacity,
        vocabulary=VOCABULARY_FILE,
        entries=entries,
        files=dict(sorted(files.items())),
    )


def _described(folder: Path, known: Mapping[str, Any]) -> dict[str, File]:
    from harness.runtime.weights import file_digest

    return {path.name: file_digest(path) for path in folder.iterdir() if path.name not in known}


def _origin(model: Model) -> str:
    """Where the weights are from, in words."""
    if model.checkpoint is None:
        return f"seed {model.seed}"
    from harness.runtime.weights import file_digest

    rest = f", what it lacks from seed {model.seed}" if model.allow_partial else ""
    return f"{model.checkpoint.name}, SHA-256 {file_digest(model.checkpoint).sha256}{rest}"


def _point_prompts(model: Model) -> bool:
    from harness.models.sam3.checkpoints import has_point_prompts

    return model.checkpoint is None or has_point_prompts(model.checkpoint)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
