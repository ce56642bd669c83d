"""What the GPU targets share: the Relax passes, and DLight's schedule rules with a way past those that crash."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tvm

LOG = logging.getLogger(__name__)


def gpu_pipeline(
    target: tvm.target.Target,
    finish: Sequence[tvm.transform.Pass] = (),
) -> tvm.transform.Pass:
    """From an imported module to one that is ready for code generation on a GPU.

    Args:
        target: TVM's target, with its host.
        finish: Passes over the scheduled kernels.
    """
    import tvm
    from tvm import relax

    from harness.schedules.common.vm import lower_to_vm
    from harness.schedules.gpu import legalization, normalization, reduction
    from harness.schedules.gpu.rewrite import call_attention

    passes = tvm.transform.Sequential(
        [
            relax.backend.DispatchSampling(),
            relax.backend.DispatchSortScan(),
            call_attention(target),
            relax.transform.FuseTransposeMatmul(),  # weights are read as they lie, and not transposed in every run
            relax.transform.DeadCodeElimination(),
            relax.transform.LegalizeOps({**normalization.LEGALIZE, **reduction.LEGALIZE, **legalization.LEGALIZE}),
            relax.transform.CanonicalizeBindings(),  # no operation is fused with another name of a result
            relax.transform.AnnotateTIROpPattern(),
            relax.transform.FoldConstant(),
            relax.transform.FuseOps(),
            relax.transform.FuseTIR(),
            schedule_kernels(),
            *finish,
            lower_to_vm(),
        ]
    )

    @tvm.transform.module_pass(opt_level=0, name="GpuPipeline")
    def run(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        with target:
            return passes(module)

    return run


class OuterLoops:
    """The rule for what DLight's leave alone: one thread for each point of the outer parallel loops of each block.

    `roi_align` is such a kernel: how many samples a point averages depends on the box, so its inner loops are of
    unknown length and belong to a block of their own.
    """

    def apply(self, function: tvm.tirx.PrimFunc, target: tvm.target.Target, _tunable: bool) -> Any:
        """A schedule with every outer block on threads; TVM raises where that would be wrong."""
        from tvm import s_tir

        schedule = s_tir.Schedule(function)
        threads = min(256, int(target.attrs["max_threads_per_block"]))
        for block in schedule.get_child_blocks(schedule.get_sblock("root")):
            loops = schedule.get_loops(block)
            variables = schedule.get(block).iter_vars
            parallel = [
                loop
                for loop, _ in itertools.takewhile(
                    lambda pair: pair[1].iter_type == _DATA_PARALLEL, zip(loops, variables, strict=False)
                )
            ]
            if len(loops) != len(variables) or not parallel:
                parallel = [schedule.add_unit_loop(loops[0] if loops else block)]
            block_loop, thread_loop = schedule.split(schedule.fuse(*parallel), [None, threads])
            schedule.bind(block_loop, "blockIdx.x")
            schedule.bind(thread_loop, "threadIdx.x")
        return schedule


_DATA_PARALLEL = 0
"""`tirx.IterVar.DataPar`, which the class cannot name before TVM is loaded."""


_DLIGHT_RULES = ("GEMV", "Reduction", "GeneralReduction", "Fallback")
"""DLight's rules in the order in which they are tried; its `Matmul` is not, products are this project's own."""


def schedule_kernels(rules: Sequence[Any] | None = None) -> tvm.transform.Pass:
    """Schedules every kernel by the first rule that fits; a rule that crashes is passed over for that kernel, and told.

    Args:
        rules: The rules, in order; `Product`, DLight's and `OuterLoops` by default.
    """
    import tvm
    from tvm.s_tir import dlight

    if rules is None:
        from harness.schedules.gpu.product import Product

        rules = [Product(), *(getattr(dlight.gpu, name)() for name in _DLIGHT_RULES), OuterLoops()]
    chosen = list(rules)

    @tvm.transform.module_pass(opt_level=0, name="ScheduleKernels")
    def run(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        target = tvm.target.Target.current(allow_none=False)
        scheduled = module.clone()
        for variable, function in module.functions_items():
            if isinstance(function, tvm.tirx.PrimFunc) and not _is_scheduled(function):
                scheduled[variable] = schedule_kernel(variable.name_hint, function, target, chosen)
        return scheduled

    return run


def schedule_kernel(
    name: str, function: tvm.tirx.PrimFunc, target: tvm.target.Target, rules: Sequence[Any]
) -> tvm.tirx.PrimFunc:
    """The kernel scheduled by the first rule that fits and neither crashes nor leaves loops outside of any thread.

    Raises:
        RuntimeError: No rule fits.
    """
    for rule in rules:
        attempt = _attempt(name, rule, function, target)
        if attempt is not None:
            return attempt.with_attr("tirx.is_scheduled", True)
    raise RuntimeError(f"no schedule rule fits the kernel {name}")


def _attempt(name: str, rule: Any, function: tvm.tirx.PrimFunc, target: tvm.target.Target) -> Any:
    # Rules raise whatever their arithmetic on the shapes runs into (AttributeError, ValueError, ScheduleError, …).
    try:
        schedule = rule.apply(function, target, False)
    except Exception as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        LOG.warning("%s: rule %s crashed (%s), trying the next", name, type(rule).__name__, first_line)
        return None
    if isinstance(schedule, list):
        schedule = schedule[0] if schedule else None
    if schedule is None:
        return None
    LOG.info("%s: scheduled by rule %s", name, type(rule).__name__)
    return schedule.mod["main"]


def _is_scheduled(function: tvm.tirx.PrimFunc) -> bool:
    attributes = function.attrs
    marked = attributes is not None and bool(attributes.get("tirx.is_scheduled", False))
    return marked or _launches_threads(function.body)


def _launches_threads(statement: Any) -> bool:
    """Whether the statement is written with its threads, as TVM's operators for GPUs are (scatter, sort)."""
    from tvm import s_tir, tirx

    if isinstance(statement, s_tir.SBlockRealize):
        return _launches_threads(statement.block.body)
    if isinstance(statement, tirx.SeqStmt):
        return any(_launches_threads(part) for part in statement.seq)
    if isinstance(statement, tirx.AttrStmt):
        return statement.attr_key == "thread_extent" or _launches_threads(statement.body)
    return False
