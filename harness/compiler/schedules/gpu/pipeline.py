"""Lowers the imported Relax module to one that is ready for code generation on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax

from harness.compiler.schedules.common import resizing
from harness.compiler.schedules.common.nan import keep_nan
from harness.compiler.schedules.common.ordering import order_nan
from harness.compiler.schedules.common.origins import fuse_calls, keep_origins
from harness.compiler.schedules.common.repeats import merge_calls
from harness.compiler.schedules.common.vm import lower_to_vm
from harness.compiler.schedules.gpu import legalization, normalization, reduction, scan
from harness.compiler.schedules.gpu.rewrite import call_kernels
from harness.compiler.schedules.gpu.rules import schedule_kernels

_LEGALIZE = {
    **normalization.LEGALIZE,
    **reduction.LEGALIZE,
    **scan.LEGALIZE,
    **legalization.LEGALIZE,
    **resizing.LEGALIZE,
}
"""This project's legalizations, where TVM's lose accuracy or speed, by Relax operator."""


def gpu_pipeline(target: tvm.target.Target, finish: Sequence[tvm.transform.Pass] = ()) -> tvm.transform.Pass:
    """Returns the pass that lowers a module for a GPU target.

    Args:
        target: TVM's target, with its host.
        finish: Passes over the scheduled kernels.
    """
    passes = tvm.transform.Sequential(
        [
            relax.backend.DispatchSampling(),
            order_nan(),
            call_kernels(target),
            relax.transform.DeadCodeElimination(),
            relax.transform.LegalizeOps(_LEGALIZE),
            relax.backend.DispatchSortScan(),  # only what has no legalization, and scans that keep their operator
            keep_origins,
            relax.transform.CanonicalizeBindings(),  # no operation is fused with another name of a result
            relax.transform.AnnotateTIROpPattern(),
            relax.transform.FoldConstant(),
            fuse_calls,
            relax.transform.FuseTIR(),
            merge_calls,
            keep_nan,
            schedule_kernels,
            *finish,
            lower_to_vm(),
        ]
    )

    @tvm.transform.module_pass(opt_level=0, name="GpuPipeline")
    def run(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        with target:
            return passes(module)

    return run
