"""Lowers the imported Relax module to one that is ready for code generation on the CPU."""

from __future__ import annotations

import tvm
from tvm import relax

from harness.compiler.schedules import UNTUNED, Schedules
from harness.compiler.schedules.common import resizing
from harness.compiler.schedules.common.nan import keep_nan
from harness.compiler.schedules.common.ordering import order_nan
from harness.compiler.schedules.common.origins import fuse_calls, keep_origins
from harness.compiler.schedules.common.repeats import merge_calls
from harness.compiler.schedules.common.vm import lower_to_vm
from harness.compiler.schedules.cpu import elementwise, normalization, roi_align
from harness.compiler.schedules.cpu.memory import plan_memory
from harness.compiler.schedules.cpu.pixel_projection import project_rows
from harness.compiler.schedules.cpu.rewrite import call_kernels
from harness.compiler.schedules.cpu.widening import lower_bf16

LEGALIZE = {
    **elementwise.LEGALIZE,
    **normalization.LEGALIZE,
    **roi_align.LEGALIZE,
    **resizing.LEGALIZE,
}
"""This project's legalizations, where TVM's lose accuracy or speed, by Relax operator."""


def cpu_pipeline(target: tvm.target.Target, schedules: Schedules = UNTUNED) -> tvm.transform.Pass:
    """Returns the pass for `tvm.relax.build(module, target, relax_pipeline=cpu_pipeline(target))`.

    It takes the module as imported: Relax operators, functions (usually one, `main`) with the attribute `num_input`,
    whose parameters after the first `num_input` are weights. Each of them becomes two:

    - `main_transform_params(weights: tuple) -> tuple`: everything that depends on weights alone, mainly weight packing;
      call it once when the model is loaded.
    - `main(*inputs, *transformed)`: the model; it takes the results of `main_transform_params` one by one.

    Without `num_input`, or without weights, a function keeps its signature and there is no second one.

    Args:
        target: The CPU.
        schedules: Tuned schedules by the keys of `harness.compiler.schedules.cpu.schedule`; the defaults otherwise.
    """

    @tvm.transform.module_pass(opt_level=0, name="CpuPipeline")
    def run(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        with target:
            passes = [*loop_passes(module, target, schedules), lower_to_vm(plan_memory)]
            return tvm.transform.Sequential(passes)(module)

    return run


def to_loops(module: tvm.IRModule, target: tvm.target.Target, schedules: Schedules = UNTUNED) -> tvm.IRModule:
    """Runs `cpu_pipeline` up to the virtual machine: Relax functions call compiled ones by `call_tir`."""
    with target, tvm.transform.PassContext(opt_level=3):
        return tvm.transform.Sequential(loop_passes(module, target, schedules))(module)


def loop_passes(module: tvm.IRModule, target: tvm.target.Target, schedules: Schedules) -> list[tvm.transform.Pass]:
    """Returns the passes from a module as imported to one that calls compiled functions by `call_tir`, in order."""
    return [
        relax.transform.CanonicalizeBindings(),
        lower_bf16,
        project_rows,
        call_kernels(target, schedules),
        order_nan(kernels=("relax.max", "relax.min")),
        relax.transform.LegalizeOps(LEGALIZE),
        relax.backend.DispatchSortScan(),  # only what has no legalization: sums that run over an axis have one
        keep_origins,
        *([relax.transform.LiftTransformParams()] if _has_weights(module) else []),
        relax.transform.DeadCodeElimination(),
        relax.transform.AnnotateTIROpPattern(),
        fuse_calls,
        relax.transform.FuseTIR(),
        merge_calls,
        keep_nan,
        elementwise.schedule_remaining,
    ]


def _has_weights(module: tvm.IRModule) -> bool:
    return any(
        isinstance(function, relax.Function)
        and "num_input" in (function.attrs or {})
        and int(function.attrs["num_input"]) < len(function.params)
        for function in module.functions.values()
    )
