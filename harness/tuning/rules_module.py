"""A model in TVM's plain loops: what MetaSchedule's own rules are applied to, and back to something that compiles.

Nothing here is a schedule of the project: TVM's own legalization, TVM's own fusion, and MetaSchedule's records.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.analysis import estimate_tir_flops

from harness.schedules.common.vm import lower_to_vm

LAYOUT_FREE = "layout_free_buffers"
"""Attribute of a function: the positions of the arguments whose layout MetaSchedule may choose."""


@dataclass(frozen=True)
class RulesTask:
    """One distinct function of the module in plain loops.

    Attributes:
        name: Of the function, and its shapes: `fused_matmul_add 5184x1024 1024x3072 3072 5184x3072`.
        weight: How often one run of the model calls it.
        module: The function alone, as `main`.
    """

    name: str
    weight: int
    module: tvm.IRModule

    @property
    def flop(self) -> float:
        """Arithmetic operations of one call, as MetaSchedule counts them."""
        return float(estimate_tir_flops(self.module))


def plain_loops(module: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """The module as TVM's own legalization and fusion make it, with the weights marked that may be laid out freely.

    Args:
        module: From `torch_export.import_program`; a function's parameters after the first `num_input` are weights.
        target: What it will be compiled for.
    """
    with target:
        return tvm.transform.Sequential(
            [
                relax.transform.CanonicalizeBindings(),
                relax.transform.LegalizeOps(),
                relax.transform.AnnotateTIROpPattern(),
                relax.transform.FuseOps(),
                relax.transform.FuseTIR(),
                relax.transform.DeadCodeElimination(),
                _free_the_weights,
            ]
        )(module)


def extract_tasks(loops: tvm.IRModule, target: tvm.target.Target, only: str | None = None) -> tuple[RulesTask, ...]:
    """The functions that a run of the model calls; those that prepare the weights when it is loaded are left out.

    Args:
        loops: From `plain_loops`.
        target: What to tune for.
        only: A regular expression; tasks are left out unless it is found in their names.
    """
    from tvm.s_tir.meta_schedule.relax_integration import extract_tasks as extract

    lifted = relax.transform.DeadCodeElimination()(_lift_weights(loops))
    run = tvm.IRModule({v: f for v, f in lifted.functions.items() if not v.name_hint.endswith("_transform_params")})
    found = extract(run, target)
    modules = [task.dispatched[0] for task in found]
    names = [_task_name(task.task_name, module["main"]) for task, module in zip(found, modules, strict=True)]
    tasks = []
    for n, (name, task, module) in enumerate(zip(names, found, modules, strict=True)):
        unique = name if names.count(name) == 1 else f"{name} #{names[:n].count(name) + 1}"
        if only is None or re.search(only, unique):
            tasks.append(RulesTask(unique, int(task.weight), module))
    return tuple(sorted(tasks, key=lambda task: task.name))


def rules_pipeline(target: tvm.target.Target, records: ms.database.Database | None) -> tvm.transform.Pass:
    """The pass that compiles a model in plain loops with the best records of a database; other loops stay plain.

    Like `harness.schedules.cpu.cpu_pipeline`, it makes two functions out of one that has weights: `main` and
    `main_transform_params`, which lays the weights out as the records want them.

    Args:
        target: What to compile for.
        records: Of `harness.tuning.rules_records.Opened`; None for plain loops throughout.
    """

    @tvm.transform.module_pass(opt_level=0, name="RulesPipeline")
    def run(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        loops = plain_loops(module, target)
        with target:
            if records is not None:
                with records:
                    loops = relax.transform.MetaScheduleApplyDatabase()(loops)
                loops = relax.transform.SplitLayoutRewritePreproc()(loops)
            return tvm.transform.Sequential([relax.transform.DeadCodeElimination(), lower_to_vm()])(
                _lift_weights(loops)
            )

    return run


@tvm.transform.module_pass(opt_level=0, name="FreeTheWeights")
def _free_the_weights(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Marks the matrices among the arguments that depend on weights alone at every call of a function.

    TVM's AttachAttrLayoutFreeBuffers sees weights only where they are passed as they come, not a transposed one.
    """
    free: dict[str, set[int]] = {}
    for function in _functions_with_weights(module):
        weights = list(function.params[int(function.attrs["num_input"]) :])
        for block in function.body.blocks:
            for binding in block.bindings:
                if _is_call_tir(binding.value):
                    callee, arguments = binding.value.args[0], binding.value.args[1].fields
                    positions = {n for n, argument in enumerate(arguments) if _made_of(argument, weights)}
                    if len(positions) < len(arguments):
                        positions = {n for n in positions if len(module[callee].params[n].shape) > 1}
                        free[callee.name_hint] = free.get(callee.name_hint, positions) & positions
                if _made_of(binding.value, weights):
                    weights.append(binding.var)
    marked = module.clone()
    for name, positions in free.items():
        if positions and isinstance(module[name], tirx.PrimFunc):
            marked[name] = module[name].with_attr(LAYOUT_FREE, sorted(positions))
    return marked


def _lift_weights(module: tvm.IRModule) -> tvm.IRModule:
    return relax.transform.LiftTransformParams()(module) if _functions_with_weights(module) else module


def _functions_with_weights(module: tvm.IRModule) -> list[relax.Function]:
    return [
        function
        for function in module.functions.values()
        if isinstance(function, relax.Function)
        and "num_input" in (function.attrs or {})
        and int(function.attrs["num_input"]) < len(function.params)
    ]


def _is_call_tir(value: Any) -> bool:
    return isinstance(value, tvm.ir.Call) and getattr(value.op, "name", None) == "relax.call_tir"


def _made_of(value: relax.Expr, weights: Sequence[relax.Var]) -> bool:
    """Whether an expression depends on these variables, or on constants, alone."""
    return all(any(free.same_as(weight) for weight in weights) for free in relax.analysis.free_vars(value))


def _task_name(name: str, function: tirx.PrimFunc) -> str:
    """The function's name and the shapes of its arguments."""
    shapes = ("x".join(str(int(extent)) for extent in parameter.shape) or "1" for parameter in function.params)
    return " ".join([name, *shapes])
