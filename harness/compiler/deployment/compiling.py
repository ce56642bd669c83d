"""Compiles a whole model into a folder that runs without PyTorch, for one CPU or GPU or for several CPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from harness.compiler.deployment.deployable import ArtifactSpec, OnStage, drain, import_entries
from harness.compiler.deployment.describing import describe, describe_files
from harness.compiler.deployment.packing import replace_artifact, run_in_worker, write_variants
from harness.compiler.schedules import DEFAULT_SCHEDULES, ChosenSchedules
from harness.compiler.targets import HOST, TARGETS, check_precisions
from harness.core.errors import HarnessError
from harness.core.outcome import Kernel
from harness.core.processors import Processors
from harness.runtime.manifest import MANIFEST, VARIANT, File, Manifest, read_any_manifest
from harness.runtime.preparing import load_packing, pack, write_packed

FolderSchedules = ChosenSchedules | Mapping[str, ChosenSchedules]
"""Tuned schedules of a folder for one target, or of each CPU of a folder for several."""


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
    spec: ArtifactSpec,
    out: Path,
    schedules: FolderSchedules = DEFAULT_SCHEDULES,
    on_stage: OnStage = lambda stage: None,
) -> Manifest:
    """Compiles a whole model in a process of its own and writes the folder; after an error the old folder stays.

    Args:
        spec: The artifact to write.
        out: The folder; an artifact that is there is replaced.
        schedules: Tuned schedules for the target; for a folder for several CPUs, those of each by CPU names as in
            `--cpu`, which take the place of the CPU of the settings.
        on_stage: Called with the name of each stage as it begins.

    Returns:
        The manifest; of a folder for several CPUs, that of the first one, which has no weights.

    Raises:
        HarnessError: No entry point has one of the groups, the target does not compile in the precision, the machine
            cannot compile for the target, the checkpoint does not fit, the strategy does not get through the compiler,
            or the folder cannot be written.
    """
    check_precisions(spec.case.target, (spec.case.precision,))
    with replace_artifact(out) as folder:
        run_in_worker(f"{__name__}:compile_request", spec, folder, schedules, on_stage=on_stage)
        return read_any_manifest(folder)


def compile_request(spec: ArtifactSpec, folder: Path, schedules: FolderSchedules, on_stage: OnStage) -> None:
    """Compiles for one CPU or for several; `harness.core.processes` calls this function."""
    if isinstance(schedules, ChosenSchedules):
        compile_into(spec, folder, schedules, on_stage)
    else:
        compile_variants_into(spec, folder, schedules, on_stage)


def compile_into(
    spec: ArtifactSpec,
    folder: Path,
    schedules: ChosenSchedules = DEFAULT_SCHEDULES,
    on_stage: OnStage = lambda stage: None,
    *,
    for_emulation: bool = False,
) -> CompiledModel:
    """Compiles a whole model for one target in this process, and fills an empty folder with code and packed weights.

    Args:
        spec: The artifact to write.
        folder: An empty folder.
        schedules: Tuned schedules for the target.
        on_stage: Called with the name of each stage as it begins.
        for_emulation: Whether the CPU of this machine is to run a GPU's kernels.

    Raises:
        HarnessError: No entry point has one of the groups, the machine cannot compile for the target or the processors,
            or the checkpoint does not fit.
        Exception: Any error that the strategy `none` causes in the importer.
    """
    from harness.compiler.deployment.code import write_code
    from harness.compiler.targets.compiling import target_for

    items = import_entries(spec, on_stage)
    on_stage("compile")
    tvm_target = target_for(TARGETS[spec.case.target], spec.settings.processors, for_emulation=for_emulation)
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


def compile_variants_into(
    spec: ArtifactSpec, folder: Path, variants: Mapping[str, ChosenSchedules], on_stage: OnStage
) -> None:
    """Compiles a whole model for several CPUs in this process, and fills an empty folder with code and weights.

    Args:
        spec: The artifact to write.
        folder: An empty folder.
        variants: Tuned schedules of each CPU, by CPU names as in `--cpu`.
        on_stage: Called with the name of each stage as it begins.

    Raises:
        HarnessError: As of `compile_into`, for one of the CPUs.
    """
    from harness.compiler.deployment.code import write_code
    from harness.compiler.targets.compiling import target_for

    items = import_entries(spec, on_stage)
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
