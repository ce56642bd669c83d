"""Schedules kernels whose loops have no threads yet, by the first fitting rule of this project or of DLight."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import tvm
from tvm import s_tir
from tvm.error import InternalError
from tvm.s_tir import dlight
from tvm.s_tir.schedule import ScheduleError

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import replace_loops
from harness.compiler.schedules.common.kernel_info import KernelInfo, Kind, LostSchedule, first_line, info_of, with_info
from harness.compiler.schedules.gpu.product import Product


class Rule(Protocol):
    """A schedule rule, with the interface of DLight's."""

    def apply(self, function: T.PrimFunc, target: tvm.target.Target, tunable: bool, /) -> s_tir.Schedule | None:
        """Returns a schedule, several of which the first is taken, or None where the rule does not fit."""


class OuterLoops:
    """The rule for kernels that DLight's leave alone: a thread for each point of the outer parallel loops of a block.

    `roi_align` is such a kernel: the number of samples of a point depends on the box, so its inner loops have unknown
    lengths and belong to a block of their own.
    """

    def apply(self, function: T.PrimFunc, target: tvm.target.Target, _tunable: bool) -> s_tir.Schedule:
        """Returns a schedule with every outer block on threads; TVM raises where that would be wrong."""
        schedule = s_tir.Schedule(function)
        threads = min(256, int(target.attrs["max_threads_per_block"]))
        for block in schedule.get_child_blocks(schedule.get_sblock("root")):
            loops = schedule.get_loops(block)
            variables = schedule.get(block).iter_vars
            parallel = [
                loop
                for loop, _ in itertools.takewhile(
                    lambda pair: pair[1].iter_type == T.IterVar.DataPar, zip(loops, variables, strict=False)
                )
            ]
            if len(loops) != len(variables) or not parallel:
                parallel = [schedule.add_unit_loop(loops[0] if loops else block)]
            block_loop, thread_loop = schedule.split(schedule.fuse(*parallel), [None, threads])
            schedule.bind(block_loop, "blockIdx.x")
            schedule.bind(thread_loop, "threadIdx.x")
        return schedule


class GEMV(dlight.gpu.GEMV):  # type: ignore[misc]
    """DLight's rule for products with a vector, which does not fit blocks that read or write several elements.

    In TVM 0.27 its analysis asserts that such a block reads and writes one element.
    """

    def apply(self, function: T.PrimFunc, target: tvm.target.Target, tunable: bool) -> s_tir.Schedule | None:
        """Returns a schedule, or None if the rule does not fit."""
        try:
            return super().apply(function, target, tunable)
        except AssertionError:
            return None


RULES: tuple[Rule, ...] = (
    Product(),
    GEMV(),
    dlight.gpu.Reduction(),
    dlight.gpu.GeneralReduction(),
    dlight.gpu.Fallback(),
    OuterLoops(),
)
"""The rules in the order in which they are tried; products are this project's own, not DLight's `Matmul`."""

_REFUSALS = (
    ScheduleError,
    InternalError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)
"""Errors of rules that do not fit: TVM refuses a step, or arithmetic meets an unexpected shape."""

_THREADS = "threads as TVM's operator has them"
"""Stands for a rule's name if the loops already have threads."""


@tvm.transform.module_pass(opt_level=0, name="ScheduleKernels")
def schedule_kernels(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Schedules every kernel by the first rule that fits, and records rules that crash."""
    target = tvm.target.Target.current(allow_none=False)

    def scheduled(name: str, function: T.PrimFunc) -> T.PrimFunc:
        if _launches_threads(function.body):
            return with_info(function, KernelInfo(Kind.LOOPS, schedules=(_THREADS,)))
        return schedule_kernel(name, function, target, RULES)

    return replace_loops(module, scheduled)


def schedule_kernel(name: str, function: T.PrimFunc, target: tvm.target.Target, rules: Sequence[Rule]) -> T.PrimFunc:
    """Schedules a kernel by the first rule that fits and neither crashes nor leaves loops outside of threads.

    The facts name every rule that crashed, and the rule, unless it attaches facts of its own.

    Raises:
        RuntimeError: No rule fits.
    """
    lost: list[LostSchedule] = []
    for rule in rules:
        rule_name = type(rule).__name__
        try:
            schedule = rule.apply(function, target, False)
        except _REFUSALS as error:
            lost.append(LostSchedule(rule_name, first_line(error)))
            continue
        if isinstance(schedule, list):
            schedule = schedule[0] if schedule else None
        if schedule is not None:
            scheduled = schedule.mod["main"].with_attr("tirx.is_scheduled", True)
            info = info_of(scheduled)
            if info is None or info.kind is not Kind.KERNEL:
                info = KernelInfo(Kind.LOOPS, schedules=(rule_name,))
            return with_info(scheduled, replace(info, lost=tuple(lost)))
    raise RuntimeError(f"no schedule rule fits the kernel {name}" + "".join(f"; {one}" for one in lost))


def _launches_threads(statement: object) -> bool:
    """Returns whether the statement already launches threads, as TVM's operators for GPUs do (scatter, sort)."""
    if isinstance(statement, s_tir.SBlockRealize):
        return _launches_threads(statement.block.body)
    if isinstance(statement, T.SeqStmt):
        return any(_launches_threads(part) for part in statement.seq)
    if isinstance(statement, T.AttrStmt):
        return statement.attr_key == "thread_extent" or _launches_threads(statement.body)
    return False
