"""Compiles a whole model into a folder that runs without PyTorch, for one CPU or GPU or for several CPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from harness.compiler.deployment.code import write_code
from harness.compiler.deployment.deployable import (
    ArtifactSpec,
    Deployable,
    ImportedEntry,
    ModelOptions,
    OnStage,
    drain,
    import_entries,
)
from harness.compiler.deployment.describing import describe, describe_files
from harness.compiler.deployment.packing import replace_artifact, run_in_worker, write_variants
from harness.compiler.schedules import DEFAULT_SCHEDULES, ChosenSchedules
from harness.compiler.targets import HOST, TARGETS, check_precisions
from harness.core.budget import NO_GROUPS, Groups
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.outcome import Kernel
from harness.core.processors import Processors
from harness.core.settings import SEEDED, Settings
from harness.runtime.manifest import MANIFEST, VARIANT, File, Manifest, read_any_manifest
from harness.runtime.preparing import load_packing, pack, write_packed


def check_variants(target: str, cpus: tuple[str, ...]) -> None:
    """Checks that one folder can have code for several CPUs.

    Raises:
        HarnessError: The target is no CPU, or one of the CPUs is named twice.
    """
    if TARGETS[target] is not HOST:
        raise HarnessError(f"a folder for several CPUs is compiled for {HOST.name}, not for {target}: give --cpu once")
    if len(set(cpus)) < len(cpus):
        repeated = next(cpu for cpu in cpus if cpus.count(cpu) > 1)
        raise HarnessError(f"--cpu {repeated} is given twice: name each CPU once")


def fill_variants(
    spec: ArtifactSpec,
    items: list[ImportedEntry],
    folder: Path,
    variants: Mapping[str, ChosenSchedules],
    on_stage: OnStage,
) -> None:
    """Fills an empty folder with code for several CPUs, and weights.

    Args:
        spec: The artifact to write.
        items: The entry points; the list is empty in the end, so that their weights leave memory early.
        folder: An empty folder.
        variants: Tuned schedules of each CPU, by CPU names as in `--cpu`.
        on_stage: Called with the name of each stage as it begins.

    Raises:
        HarnessError: The machine cannot compile for one of the CPUs.
    """
    from harness.compiler.targets.compiling import target_for

    target = TARGETS[spec.case.target]
    tvm_targets = {cpu: target_for(target, Processors(cpu)) for cpu in variants}  # refuses what LLVM does not know
    for cpu, schedules in variants.items():
        on_stage(f"compile {cpu}")
        variant, tvm_target = folder / cpu, tvm_targets[cpu]
        variant.mkdir()
        entries, _ = write_code(spec, items, tvm_target, tvm_target, variant, schedules)
        manifest = describe(spec, schedules.origin, tvm_target, entries, describe_files(variant))
        (variant / VARIANT).write_text(manifest.to_json(), encoding="utf-8")
    on_stage("write")
    write_variants(folder, tuple(variants), items)


@dataclass(frozen=True)
class CompiledModel:
    """The result of compiling a model.

    Attributes:
        manifest: Manifest of the folder.
        kernels: Kernels of a GPU target, once per architecture.
        lost_schedules: A sentence on each schedule that could not be applied.
    """

    manifest: Manifest
    kernels: tuple[Kernel, ...] = ()
    lost_schedules: tuple[str, ...] = ()


def compile_model(
    deployable: Deployable,
    case: Case,
    out: Path,
    settings: Settings = SEEDED,
    options: ModelOptions | None = None,
    schedules: ChosenSchedules = DEFAULT_SCHEDULES,
    on_stage: OnStage = lambda stage: None,
    float32: Groups = NO_GROUPS,
    variants: Mapping[str, ChosenSchedules] | None = None,
) -> Manifest:
    """Compiles a whole model in a process of its own and writes the folder; after an error the old folder stays.

    Args:
        deployable: The model.
        case: Its strategy, target, scale, seed, precision, frontend and weights.
        out: The folder; an artifact that is there is replaced.
        settings: Where the weights come from, and the processors to compile for.
        options: The model's own options; None for the default ones.
        schedules: Tuned schedules for the target.
        on_stage: Called with the name of each stage as it begins.
        float32: Groups of products that stay float32 in a half precision.
        variants: For a folder for several CPUs, the tuned schedules of each, by CPU names as in `--cpu`; the CPU of
            `settings` and `schedules` are then not used.

    Returns:
        The manifest; of a folder for several CPUs, that of the first one, which has no weights.

    Raises:
        HarnessError: No entry point has one of the groups, the target does not compile in the precision, the machine
            cannot compile for the target, the checkpoint does not fit, the strategy does not get through the compiler,
            or the folder cannot be written.
    """
    check_precisions(case.target, (case.precision,))
    with replace_artifact(out) as folder:
        spec = ArtifactSpec(deployable, case, settings, options or deployable.options(), float32=float32)
        request = (spec, folder, schedules if variants is None else variants)
        run_in_worker(f"{__name__}:compile_request", request, on_stage)
        return read_any_manifest(folder)


def compile_request(
    request: tuple[ArtifactSpec, Path, ChosenSchedules | Mapping[str, ChosenSchedules]], on_stage: OnStage
) -> None:
    """Compiles for one CPU or for several; `harness.core.processes` calls this function."""
    spec, folder, schedules = request
    items = import_entries(spec, on_stage)
    if isinstance(schedules, ChosenSchedules):
        fill_folder(spec, items, folder, schedules, on_stage)
    else:
        fill_variants(spec, items, folder, schedules, on_stage)


def compile_into(
    deployable: Deployable,
    case: Case,
    folder: Path,
    settings: Settings = SEEDED,
    options: ModelOptions | None = None,
    schedules: ChosenSchedules = DEFAULT_SCHEDULES,
    *,
    on_stage: OnStage = lambda stage: None,
    entry_names: Sequence[str] = (),
    for_emulation: bool = False,
    float32: Groups = NO_GROUPS,
) -> CompiledModel:
    """Compiles a whole model in this process and fills an empty folder with it.

    Args:
        deployable: The model.
        case: Its strategy, target, scale, seed, precision, frontend and weights.
        folder: An empty folder.
        settings: Where the weights come from, and the processors to compile for.
        options: The model's own options; None for the default ones.
        schedules: Tuned schedules for the target.
        on_stage: Called with the name of each stage as it begins.
        entry_names: Names of the entry points to compile, all if there is none; functions written as kernels come in
            any case.
        for_emulation: Whether the CPU of this machine is to run a GPU's kernels.
        float32: Groups of products that stay float32 in a half precision.

    Raises:
        HarnessError: No entry point has one of the groups, the machine cannot compile for the target or the processors,
            or the checkpoint does not fit.
        Exception: Any error that the strategy `none` causes in the importer.
    """
    spec = ArtifactSpec(deployable, case, settings, options or deployable.options(), tuple(entry_names), float32)
    return fill_folder(spec, import_entries(spec, on_stage), folder, schedules, on_stage, for_emulation=for_emulation)


def fill_folder(
    spec: ArtifactSpec,
    items: list[ImportedEntry],
    folder: Path,
    schedules: ChosenSchedules,
    on_stage: OnStage,
    *,
    for_emulation: bool = False,
) -> CompiledModel:
    """Fills an empty folder with code for one target and packed weights.

    Args:
        spec: The artifact to write.
        items: The entry points; the list is empty in the end, so that their weights leave memory early.
        folder: An empty folder.
        schedules: Tuned schedules for the target.
        on_stage: Called with the name of each stage as it begins.
        for_emulation: Whether the CPU of this machine is to run a GPU's kernels.

    Raises:
        HarnessError: The machine cannot compile for the processors.
    """
    from harness.compiler.targets.compiling import target_for

    on_stage("compile")
    target = TARGETS[spec.case.target]
    tvm_target = target_for(target, spec.settings.processors, for_emulation=for_emulation)
    host_target = HOST.tvm_target()
    entries, compiled = write_code(spec, items, tvm_target, host_target, folder, schedules, keep_source=for_emulation)
    on_stage("pack")
    machine, files = load_packing(folder), dict[str, File]()
    for name, parameters in drain(items):
        tensors = pack(machine, name, [(value, value.dtype.name) for value in parameters.values()])
        files |= write_packed(folder, name, tensors)
        entries[name] = replace(entries[name], weights=tuple(tensors))
    files |= describe_files(folder, files)
    manifest = describe(spec, schedules.origin, tvm_target, entries, files)
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return CompiledModel(manifest, compiled.kernels, compiled.lost_schedules)
