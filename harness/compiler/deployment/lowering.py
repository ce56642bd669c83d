"""From the imported entry points to what is compiled: one module, and the part of it that only packs weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from harness.runtime.manifest import TensorSpec

if TYPE_CHECKING:
    import tvm
    from tvm import relax


def merged(modules: Mapping[str, tvm.IRModule]) -> tvm.IRModule:
    """Returns one module with the function `main` of each module under its key, and everything that it calls."""
    import tvm
    from tvm import ir, relax

    functions: dict[ir.GlobalVar, ir.BaseFunc] = {}
    for name, module in modules.items():
        for variable, function in module.functions_items():
            if isinstance(function, relax.Function) and variable.name_hint == "main":
                functions[ir.GlobalVar(name)] = function.with_attr("global_symbol", name)
            else:
                functions[variable] = function
    return tvm.IRModule(functions)


def reachable(module: tvm.IRModule, names: Iterable[str]) -> tvm.IRModule:
    """Returns the functions of these names and all that they call."""
    import tvm
    import tvm_ffi
    from tvm import ir

    kept: dict[ir.GlobalVar, ir.BaseFunc] = {}
    waiting = [module.get_global_var(name) for name in names]

    def visit(node: object) -> None:
        if isinstance(node, ir.GlobalVar):
            waiting.append(module.get_global_var(node.name_hint))

    while waiting:
        variable = waiting.pop()
        if variable not in kept:
            kept[variable] = module[variable]
            tvm_ffi.structural_walk(module[variable], visit)
    return tvm.IRModule(kept, attrs=module.attrs)


def input_specs(function: relax.Function, below: Mapping[str, int | str]) -> tuple[TensorSpec, ...]:
    """Returns the names, shapes, dtypes and ranges of a function's inputs; letters stand for symbolic dimensions."""
    attributes = function.attrs or {}
    count = int(attributes["num_input"]) if "num_input" in attributes else len(function.params)
    specs = [_spec(str(parameter.name), parameter.ty) for parameter in list(function.params)[:count]]
    return tuple(replace(spec, below=below.get(spec.name)) for spec in specs)


def output_specs(function: relax.Function, names: Iterable[str]) -> tuple[TensorSpec, ...]:
    """Returns the shapes and dtypes of a function's results, under the given names."""
    from tvm import relax

    result = function.ret_ty
    fields = list(result.fields) if isinstance(result, relax.TupleType) else [result]
    return tuple(_spec(name, field) for name, field in zip(names, fields, strict=True))


def _spec(name: str, ty: relax.TensorType) -> TensorSpec:
    from tvm import tirx

    extents = (int(extent) if isinstance(extent, tirx.IntImm) else str(extent.name) for extent in ty.shape)
    # TVM calls it bool, NumPy too; going through NumPy makes both sides agree on every name.
    return TensorSpec(name, tuple(extents), np.dtype(str(ty.dtype)).name)
