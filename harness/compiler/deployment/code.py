"""The code of a folder: one library with all entry points, and one that packs their weights."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.compiler.deployment.deployable import Deployable
from harness.compiler.deployment.imported import Contents, Imported
from harness.compiler.schedules import ChosenSchedules
from harness.compiler.targets import HOST, TARGETS
from harness.core.outcome import Kernel
from harness.runtime.manifest import LIBRARY, PACKING_LIBRARY, Entry
from harness.runtime.packing import PACKING

if TYPE_CHECKING:
    import tvm


@dataclass(frozen=True)
class Code:
    """What was compiled into a folder.

    Attributes:
        entries: Signatures of the entry points by name, without weights.
        packing: The library that packs weights; None if the target takes all of them as they are.
        kernels: Kernels of a GPU target, once per architecture.
        lost_schedules: A sentence on each schedule that could not be applied.
    """

    entries: dict[str, Entry]
    packing: Path | None
    kernels: tuple[Kernel, ...]
    lost_schedules: tuple[str, ...]


def write_code(
    contents: Contents,
    items: Sequence[Imported],
    tvm_target: tvm.target.Target,
    packing_target: tvm.target.Target,
    folder: Path,
    schedules: ChosenSchedules,
    *,
    keep_source: bool = False,
) -> Code:
    """Compiles entry points into a folder, and puts everything else there that a folder needs but weights and manifest.

    Args:
        contents: What the folder is to have.
        items: The entry points.
        tvm_target: TVM's target for what is compiled.
        packing_target: TVM's target for the CPU that packs weights.
        folder: Has nothing of this in it.
        schedules: What tuning found for the target.
        keep_source: Whether the CPU of this machine is to run a GPU's kernels, whose source it needs.
    """
    from harness.compiler.deployment.lowering import input_specs, merged, output_specs, reachable
    from harness.compiler.schedules.common.kernel_info import lost_schedules
    from harness.compiler.targets.compiling import build_library, lower_module

    deployable, target = contents.deployable, contents.case.target
    modules = {item.name: item.module for item in items}
    outputs = {item.name: item.outputs for item in items}
    below: dict[str, Mapping[str, int | str]] = {item.name: item.below for item in items}
    for kernel in deployable.kernels:
        modules[kernel.name], outputs[kernel.name] = kernel.module(tvm_target), kernel.outputs
        below[kernel.name] = kernel.below
    whole = merged(modules)
    entries = {
        name: Entry(input_specs(whole[name], below[name]), output_specs(whole[name], names))
        for name, names in outputs.items()
    }
    del modules
    lowered = lower_module(whole, TARGETS[target], tvm_target, schedules.schedules)
    kernels = build_library(reachable(lowered, entries), tvm_target, folder / LIBRARY, keep_source=keep_source)
    names = {variable.name_hint for variable in lowered.get_global_vars()}
    packers = [f"{entry}{PACKING}" for entry in entries if f"{entry}{PACKING}" in names]
    packing = folder / PACKING_LIBRARY if packers else None
    if packing is not None:
        build_library(reachable(lowered, packers), packing_target, packing)
    _copy_files(deployable, target, tvm_target, folder)
    return Code(entries, packing, kernels, lost_schedules(lowered))


def _copy_files(deployable: Deployable, target: str, tvm_target: tvm.target.Target, folder: Path) -> None:
    """Copies the model's own files, and the runtime libraries, which run on machines of this kind."""
    from harness.compiler.targets.compiling import platform_of
    from harness.runtime.devices import runtime_libraries

    for name, source in deployable.files().items():
        shutil.copyfile(source, folder / name)
    if platform_of(tvm_target.host or tvm_target) == platform_of(HOST.tvm_target()):
        # So that the folder runs where only the small tvm_ffi package is installed.
        for library in runtime_libraries(target):
            shutil.copyfile(library, folder / library.name)
