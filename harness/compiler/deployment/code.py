"""Compiles the code of a folder from one merged module: all entry points, and a library that packs their weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import tvm
import tvm_ffi
from msgspec.structs import replace
from tvm import ir, relax, tirx

from harness.compiler.deployment.deployable import ArtifactSpec, Deployable, ImportedEntry
from harness.compiler.schedules import ChosenSchedules
from harness.compiler.schedules.common.kernel_info import lost_schedules
from harness.compiler.targets import HOST, TARGETS
from harness.compiler.targets.compiling import Compiled, build_library, lower_module, platform_of
from harness.runtime.devices import runtime_libraries
from harness.runtime.manifest import LIBRARY, PACKING_LIBRARY, Entry, TensorSpec
from harness.runtime.preparing import PACKING


def merge_modules(modules: Mapping[str, tvm.IRModule]) -> tvm.IRModule:
    """Returns one module with the entry point of each module under its key, and everything that it calls.

    An entry point is the function `main`, or has the key as its name. Another function whose name is taken gets the key
    as a prefix.
    """
    merged: dict[ir.GlobalVar, ir.BaseFunc] = {}
    for name, module in modules.items():
        entry = "main" if "main" in module else name
        taken = {*modules, *(variable.name_hint for variable in merged)}
        renamed = {
            variable.name_hint: relax.BlockBuilder().add_func(function, f"{name}_{variable.name_hint}")
            for variable, function in module.functions_items()
            if variable.name_hint in taken and variable.name_hint != entry
        }
        for variable, function in module.functions_items():
            function = _with_calls_renamed(function, renamed) if renamed else function
            if isinstance(function, relax.Function) and variable.name_hint == "main":
                merged[ir.GlobalVar(name)] = function.with_attr("global_symbol", name)
            else:
                merged[renamed.get(variable.name_hint, variable)] = function
    return tvm.IRModule(merged)


def _with_calls_renamed(function: ir.BaseFunc, renamed: Mapping[str, ir.GlobalVar]) -> ir.BaseFunc:
    """Returns a function that calls other functions, given by the names of those that it called."""
    rename = (ir.GlobalVar, lambda called: renamed.get(called.name_hint, called))
    return tvm_ffi.structural_map(function, rename)


def select_reachable(module: tvm.IRModule, names: Iterable[str]) -> tvm.IRModule:
    """Returns a module of the named functions and everything that they call."""
    selected: dict[ir.GlobalVar, ir.BaseFunc] = {}
    waiting = [module.get_global_var(name) for name in names]

    def visit(node: object) -> None:
        if isinstance(node, ir.GlobalVar):
            waiting.append(module.get_global_var(node.name_hint))

    while waiting:
        variable = waiting.pop()
        if variable not in selected:
            selected[variable] = module[variable]
            tvm_ffi.structural_walk(module[variable], visit)
    return tvm.IRModule(selected, attrs=module.attrs)


def input_specs(function: relax.Function, below: Mapping[str, int | str]) -> tuple[TensorSpec, ...]:
    """Returns the names, shapes, dtypes and ranges of a function's inputs; letters stand for symbolic dimensions."""
    attributes = function.attrs or {}
    count = int(attributes["num_input"]) if "num_input" in attributes else len(function.params)
    specs = [_spec(str(parameter.name), parameter.ty) for parameter in list(function.params)[:count]]
    return tuple(replace(spec, below=below.get(spec.name)) for spec in specs)


def output_specs(function: relax.Function, names: Iterable[str]) -> tuple[TensorSpec, ...]:
    """Returns the shapes and dtypes of a function's results, under the given names."""
    result = function.ret_ty
    fields = list(result.fields) if isinstance(result, relax.TupleType) else [result]
    return tuple(_spec(name, field) for name, field in zip(names, fields, strict=True))


def _spec(name: str, ty: relax.TensorType) -> TensorSpec:
    extents = (int(extent) if isinstance(extent, tirx.IntImm) else str(extent.name) for extent in ty.shape)
    # TVM calls it bool, NumPy too; going through NumPy makes both sides agree on every name.
    return TensorSpec(name, tuple(extents), np.dtype(str(ty.dtype)).name)


def write_code(
    spec: ArtifactSpec,
    items: Sequence[ImportedEntry],
    tvm_target: tvm.target.Target,
    packing_target: tvm.target.Target,
    folder: Path,
    schedules: ChosenSchedules,
    *,
    keep_source: bool = False,
) -> tuple[dict[str, Entry], Compiled]:
    """Compiles entry points into a folder, and adds all its other files but weights and manifest.

    Args:
        spec: The artifact to write.
        items: The entry points.
        tvm_target: TVM's target of the entry points.
        packing_target: TVM's target for the CPU that packs weights.
        folder: A folder without any of these files.
        schedules: Tuned schedules for the target.
        keep_source: Whether the CPU of this machine is to run a GPU's kernels, whose source it needs.

    Returns:
        The signatures of the entry points by name, without weights; and the result of compiling them.
    """
    deployable, target = spec.deployable, spec.case.target
    modules = {item.name: item.module for item in items}
    outputs = {item.name: item.outputs for item in items}
    below: dict[str, Mapping[str, int | str]] = {item.name: item.below for item in items}
    for kernel in deployable.kernels:
        modules[kernel.name], outputs[kernel.name] = kernel.module(tvm_target), kernel.outputs
        below[kernel.name] = kernel.below
    module = merge_modules(modules)
    entries = {
        name: Entry(input_specs(module[name], below[name]), output_specs(module[name], names))
        for name, names in outputs.items()
    }
    del modules
    lowered = lower_module(module, TARGETS[target], tvm_target, schedules.schedules)
    kernels = build_library(select_reachable(lowered, entries), tvm_target, folder / LIBRARY, keep_source=keep_source)
    names = {variable.name_hint for variable in lowered.get_global_vars()}
    packers = [f"{entry}{PACKING}" for entry in entries if f"{entry}{PACKING}" in names]
    if packers:
        build_library(select_reachable(lowered, packers), packing_target, folder / PACKING_LIBRARY)
    _copy_files(deployable, target, tvm_target, folder)
    return entries, Compiled(kernels, lost_schedules(lowered))


def _copy_files(deployable: Deployable, target: str, tvm_target: tvm.target.Target, folder: Path) -> None:
    """Copies the model's own files into the folder, and runtime libraries if they run on this platform."""
    for name, source in deployable.files().items():
        shutil.copyfile(source, folder / name)
    if platform_of(tvm_target.host or tvm_target) == platform_of(HOST.tvm_target()):
        # So that the folder runs where only the small tvm_ffi package is installed.
        for library in runtime_libraries(target):
            shutil.copyfile(library, folder / library.name)
