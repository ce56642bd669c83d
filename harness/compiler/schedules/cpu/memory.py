"""Plans the memory of Relax functions: intermediate values share one arena and the memory of later results.

TVM's own plan (`StaticPlanBlockMemory`) begins every value at the start of an allocation, so that a small value holds a
large one, and gives results memory that nothing else uses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import tvm
from tvm import ir, relax
from tvm.relax.op import memory

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import is_call
from harness.compiler.schedules.cpu.arena import Result, Value, lay_out

_AT_ZERO = "vm.builtin.ensure_zero_offset"
"""Compiled functions take no tensor with a byte offset; this makes a tensor without one, of the same memory."""


@tvm.transform.module_pass(opt_level=0, name="PlanMemory")
def plan_memory(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Replaces allocations of static shape by tensors in few allocations, at constant offsets.

    It takes functions as `CallTIRRewrite` leaves them, for devices whose pointers the host can do arithmetic on.
    """
    planned = module.clone()
    for variable, function in module.functions_items():
        if isinstance(function, relax.Function):
            planned.update_func(variable, _planned(function, module))
    return planned


def _planned(function: relax.Function, module: tvm.IRModule) -> relax.Function:
    bindings = [binding for block in function.body.blocks for binding in block.bindings]
    values, results = _lifetimes(bindings, function.body.body, module)
    places, storages = _places(values, results)
    planned: list[relax.Binding] = []
    for binding in bindings:
        if binding.var not in places:
            planned.append(binding)
            continue
        storage, offset = places[binding.var]
        if storage in storages:  # its first use
            size = relax.ShapeExpr([storages.pop(storage)])
            planned.append(_bound(storage, memory.alloc_storage(size, 0, "global", "uint8")))
        shape, dtype = binding.value.args[0], str(binding.var.ty.dtype)
        tensor = memory.alloc_tensor(storage, offset, shape, dtype)
        if offset:
            moved = relax.Var(f"{binding.var.name}_moved", binding.var.ty)
            planned.append(_bound(moved, tensor))
            tensor = ir.Call(relax.ExternFunc(_AT_ZERO), [moved], None, [binding.var.ty])
        planned.append(_bound(binding.var, tensor))
    body = relax.SeqExpr([relax.BindingBlock(planned)], function.body.body)
    return relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)


def _places(
    values: dict[relax.Var, Value], results: dict[relax.Var, Result]
) -> tuple[dict[relax.Var, tuple[relax.Var, int]], dict[relax.Var, int]]:
    """Returns the storage and offset of each allocation, and the bytes of each storage."""
    layout = lay_out(list(values.values()), list(results.values()))
    arena = relax.Var("arena", relax.AnyType())
    storages = [relax.Var(f"{owner.name}_storage", relax.AnyType()) for owner in results]
    places = {owner: (storage, 0) for owner, storage in zip(results, storages, strict=True)}
    for owner, position in zip(values, layout.positions, strict=True):
        places[owner] = (arena if position.result is None else storages[position.result], position.offset)
    sizes = {storage: result.size for storage, result in zip(storages, results.values(), strict=True)}
    return places, {arena: layout.arena, **sizes}


def _bound(variable: relax.Var, value: relax.Expr) -> relax.Binding:
    return relax.VarBinding(variable, relax.BlockBuilder().normalize(value))


def _lifetimes(
    bindings: Sequence[relax.Binding], returned: relax.Expr, module: tvm.IRModule
) -> tuple[dict[relax.Var, Value], dict[relax.Var, Result]]:
    """Returns the allocations of a function by variable: those that end with their last use, and those that may not.

    A step is a binding. An allocation lives under the names of its reshapes, too; where it is used by anything but
    compiled functions, it may be a part of the result.
    """
    owners: dict[relax.Var, relax.Var] = {}
    values: dict[relax.Var, Value] = {}
    escaping: set[relax.Var] = set()

    def find_owners(expression: relax.Expr) -> set[relax.Var]:
        return {owners[variable] for variable in relax.analysis.free_vars(expression) if variable in owners}

    for step, binding in enumerate(bindings):
        value = binding.value
        size = _allocated_bytes(value)
        if size is not None:
            owners[binding.var], values[binding.var] = binding.var, Value(size, step, step)
            continue
        used = find_owners(value)
        values |= {owner: replace(values[owner], last=step) for owner in used}
        if isinstance(value, relax.Var) or is_call(value, "relax.reshape"):
            owners.update((binding.var, owner) for owner in used)
        elif not _is_kernel(value, module):
            escaping |= used
    escaping |= find_owners(returned)
    results = {owner: Result(value.size, value.first) for owner, value in values.items() if owner in escaping}
    return {owner: value for owner, value in values.items() if owner not in escaping}, results


def _is_kernel(value: relax.Expr, module: tvm.IRModule) -> bool:
    """Returns whether this is the call of a compiled function, which keeps nothing."""
    return (
        isinstance(value, ir.Call) and isinstance(value.op, ir.GlobalVar) and isinstance(module[value.op], T.PrimFunc)
    )


def _allocated_bytes(value: relax.Expr) -> int | None:
    """Returns the bytes, at least one, of a global `builtin.alloc_tensor`; None for everything else."""
    if not is_call(value, "relax.builtin.alloc_tensor"):
        return None
    extents = list(value.args[0].values)
    if not all(isinstance(extent, T.IntImm) for extent in extents) or value.args[3].value != "global":
        return None
    return math.prod(int(extent) for extent in extents) * tvm.DataType(str(value.ty.dtype)).itemsize or None
