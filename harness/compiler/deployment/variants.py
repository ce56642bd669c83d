"""Folders for several CPUs: code for each of them, weights as they were imported; see `harness.runtime.variants`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from harness.compiler.deployment.code import write_code
from harness.compiler.deployment.describing import describe, described
from harness.compiler.deployment.imported import Contents, Imported, OnStage, taken
from harness.compiler.schedules import ChosenSchedules
from harness.compiler.targets import HOST, TARGETS
from harness.core.errors import HarnessError
from harness.core.processors import Processors
from harness.runtime.manifest import VARIANT, VARIANTS, File
from harness.runtime.packing import write_packed
from harness.runtime.variants import Variants


def check_variants(target: str, cpus: tuple[str, ...]) -> None:
    """Nothing, if one folder can have code for several CPUs.

    Raises:
        HarnessError: The target is no CPU, or one of the CPUs is named twice.
    """
    if TARGETS[target] is not HOST:
        raise HarnessError(f"a folder for several CPUs is compiled for {HOST.name}, not for {target}: give --cpu once")
    if len(set(cpus)) < len(cpus):
        twice = next(cpu for cpu in cpus if cpus.count(cpu) > 1)
        raise HarnessError(f"--cpu {twice} is given twice: name each CPU once")


def fill_variants(
    contents: Contents,
    items: list[Imported],
    folder: Path,
    variants: Mapping[str, ChosenSchedules],
    on_stage: OnStage,
) -> None:
    """Fills an empty folder with code for several CPUs, and weights.

    Args:
        contents: What it is to have.
        items: The entry points; the list is empty in the end, so that their weights are not held longer than needed.
        folder: An empty folder.
        variants: What tuning found for each CPU, by names as `--cpu` takes them.
        on_stage: Called with the name of each stage as it begins.

    Raises:
        HarnessError: The machine cannot compile for one of the CPUs.
    """
    from harness.compiler.targets.compiling import target_for

    target = TARGETS[contents.case.target]
    tvm_targets = {cpu: target_for(target, Processors(cpu)) for cpu in variants}  # refuses what LLVM does not know
    for cpu, schedules in variants.items():
        on_stage(f"compile {cpu}")
        variant, tvm_target = folder / cpu, tvm_targets[cpu]
        variant.mkdir()
        code = write_code(contents, items, tvm_target, tvm_target, variant, schedules)
        manifest = describe(contents, schedules.origin, tvm_target, code.entries, described(variant))
        (variant / VARIANT).write_text(manifest.to_json(), encoding="utf-8")
    on_stage("write")
    described_variants = Variants(tuple(variants), *write_unpacked(folder, items))
    (folder / VARIANTS).write_text(described_variants.to_json(), encoding="utf-8")


def write_unpacked(folder: Path, items: list[Imported]) -> tuple[dict[str, tuple[str, ...]], dict[str, File]]:
    """Writes the weights of entry points as they were imported.

    Args:
        folder: Where to.
        items: The entry points; the list is empty in the end.

    Returns:
        Names of the weights by entry point, in order; the files by name.
    """
    order: dict[str, tuple[str, ...]] = {}
    files: dict[str, File] = {}
    for name, parameters in taken(items):
        order[name] = tuple(parameters)
        files |= write_packed(folder, name, parameters)
    return order, files
