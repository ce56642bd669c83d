"""A whole model compiled into a folder that runs without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.compiler.deployment.code import write_code
from harness.compiler.deployment.deployable import Deployable, ModelOptions
from harness.compiler.deployment.describing import describe, described
from harness.compiler.deployment.filling import isolated, replaced
from harness.compiler.deployment.imported import Contents, Imported, OnStage, taken, to_compile
from harness.compiler.deployment.packing import packed
from harness.compiler.deployment.variants import fill_variants
from harness.compiler.schedules import DEFAULT_SCHEDULES, ChosenSchedules
from harness.compiler.targets import HOST, TARGETS, check_precisions
from harness.core.budget import NO_GROUPS, Groups
from harness.core.case import Case
from harness.core.outcome import Kernel
from harness.core.settings import SEEDED, Settings
from harness.runtime.manifest import MANIFEST, File, Manifest
from harness.runtime.packing import write_packed
from harness.runtime.variants import described as manifest_of


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
    """Compiles a whole model in a process of its own and writes the folder, or leaves what was there.

    Args:
        deployable: Which model.
        case: Its strategy, target, scale, seed, precision, frontend and weights.
        out: The folder; an artifact that is there is replaced.
        settings: Where the weights come from, and the processors to compile for.
        options: The model's own options; None for the default ones.
        schedules: What tuning found for the target.
        on_stage: Called with the name of each stage as it begins.
        float32: Groups of products that stay float32 in a half precision.
        variants: For a folder for several CPUs, what tuning found for each of these, by names as `--cpu` takes them;
            the CPU of `settings` and `schedules` are then not used.

    Returns:
        The manifest; of a folder for several CPUs, that of the first one, which has no weights.

    Raises:
        HarnessError: No entry point has one of the groups, the target does not compile in the precision, the machine
            cannot compile for the target, the checkpoint does not fit, the strategy does not get through the compiler,
            or the folder cannot be written.
    """
    check_precisions(case.target, (case.precision,))
    with replaced(out) as folder:
        contents = Contents(deployable, case, settings, options or deployable.options(), float32=float32)
        request = (contents, folder, schedules if variants is None else variants)
        isolated(f"{__name__}:compile_request", request, on_stage)
        return manifest_of(folder)


def compile_request(
    request: tuple[Contents, Path, ChosenSchedules | Mapping[str, ChosenSchedules]], on_stage: OnStage
) -> None:
    """Compiles for one CPU or for several, called as `harness.core.processes` calls functions."""
    contents, folder, schedules = request
    items = to_compile(contents, on_stage)
    if isinstance(schedules, ChosenSchedules):
        fill(contents, items, folder, schedules, on_stage)
    else:
        fill_variants(contents, items, folder, schedules, on_stage)


def compile_into(
    deployable: Deployable,
    case: Case,
    folder: Path,
    settings: Settings = SEEDED,
    options: ModelOptions | None = None,
    schedules: ChosenSchedules = DEFAULT_SCHEDULES,
    *,
    on_stage: OnStage = lambda stage: None,
    only: Sequence[str] = (),
    for_emulation: bool = False,
    float32: Groups = NO_GROUPS,
) -> Compiled:
    """Compiles a whole model in this process and fills an empty folder with it.

    Args:
        deployable: Which model.
        case: Its strategy, target, scale, seed, precision, frontend and weights.
        folder: An empty folder.
        settings: Where the weights come from, and the processors to compile for.
        options: The model's own options; None for the default ones.
        schedules: What tuning found for the target.
        on_stage: Called with the name of each stage as it begins.
        only: Names of the entry points to compile, all if there is none; functions written as kernels come in any case.
        for_emulation: Whether the CPU of this machine is to run a GPU's kernels.
        float32: Groups of products that stay float32 in a half precision.

    Raises:
        HarnessError: No entry point has one of the groups, the machine cannot compile for the target or the processors,
            or the checkpoint does not fit.
        Exception: Whatever the strategy `none` makes the importer raise.
    """
    contents = Contents(deployable, case, settings, options or deployable.options(), tuple(only), float32)
    return fill(contents, to_compile(contents, on_stage), folder, schedules, on_stage, for_emulation=for_emulation)


def fill(
    contents: Contents,
    items: list[Imported],
    folder: Path,
    schedules: ChosenSchedules,
    on_stage: OnStage,
    *,
    for_emulation: bool = False,
) -> Compiled:
    """Fills an empty folder with code for one target and packed weights.

    Args:
        contents: What it is to have.
        items: The entry points; the list is empty in the end, so that their weights are not held longer than needed.
        folder: An empty folder.
        schedules: What tuning found for the target.
        on_stage: Called with the name of each stage as it begins.
        for_emulation: Whether the CPU of this machine is to run a GPU's kernels.

    Raises:
        HarnessError: The machine cannot compile for the processors.
    """
    import tvm_ffi

    from harness.compiler.targets.compiling import target_for
    from harness.runtime.loading import load_library

    on_stage("compile")
    target = TARGETS[contents.case.target]
    tvm_target = target_for(target, contents.settings.processors, for_emulation=for_emulation)
    here = HOST.tvm_target()
    code = write_code(contents, items, tvm_target, here, folder, schedules, keep_source=for_emulation)
    on_stage("pack")
    machine = load_library(code.packing, tvm_ffi.device("cpu", 0)) if code.packing is not None else None
    entries = dict(code.entries)
    files: dict[str, File] = {}
    for name, parameters in taken(items):
        tensors = packed(machine, name, parameters)
        files |= write_packed(folder, name, tensors)
        entries[name] = replace(entries[name], weights=tuple(tensors))
    files |= described(folder, files)
    manifest = describe(contents, schedules.origin, tvm_target, entries, files)
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return Compiled(manifest, code.kernels, code.lost_schedules)
