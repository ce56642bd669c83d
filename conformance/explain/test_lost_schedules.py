"""No schedule is lost in any component on any target: a rule or a schedule that TVM refuses is a defect."""

from __future__ import annotations

from functools import cache

import pytest
import tvm
from tvm import s_tir
from tvm.s_tir import dlight
from tvm.s_tir.schedule import ScheduleError
from tvm.script import tirx as T

from conformance.support.operators import module_of
from harness.compiler.lowering.rope import STRATEGIES
from harness.compiler.schedules.common.kernel_info import UNSCHEDULED, infos_of, lost_schedules
from harness.compiler.schedules.cpu import cpu_pipeline, elementwise
from harness.compiler.schedules.gpu.rules import GEMV
from harness.compiler.targets import HOST, TARGETS
from harness.compiler.targets.compiling import lower_module
from harness.core.case import Case
from harness.models.importing import imported_module
from harness.models.sam3.components import COMPONENTS


@cache
def imported(component: str, strategy: str = "real", symbolic: bool = True) -> tvm.IRModule:
    """Imported for a target that takes symbolic axes, or for one that does not."""
    return imported_module(Case(component, strategy, "llvm" if symbolic else "cuda", "shallow", 0), lambda stage: None)


OTHERS = [name for name in TARGETS if name != HOST.name]
"""The CPU's schedules are asked for by `conformance/verify/test_components.py`, of the same modules."""


INSIDE = ("vit", "vision_backbone")
"""Components that `image_encoder` computes, operator for operator: every night asks for theirs."""


# Every night for Metal, too: its rules are those of CUDA.
@pytest.mark.parametrize("target", [pytest.param(n, marks=[pytest.mark.wide] if n == "metal" else []) for n in OTHERS])
@pytest.mark.parametrize(
    "component", [pytest.param(name, marks=[pytest.mark.wide] if name in INSIDE else []) for name in COMPONENTS]
)
def test_no_component_loses_a_schedule(component: str, target: str) -> None:
    symbolic = TARGETS[target].symbolic or not COMPONENTS[component].symbolic
    module = imported(component, symbolic=symbolic)
    lowered = lower_module(module, TARGETS[target], TARGETS[target].tvm_target())
    assert lost_schedules(lowered) == ()


@pytest.mark.wide
@pytest.mark.parametrize("target", OTHERS)
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name not in ("none", "real")])
def test_no_strategy_loses_a_schedule(strategy: str, target: str) -> None:
    lowered = lower_module(imported("vit", strategy), TARGETS[target], TARGETS[target].tvm_target())
    assert lost_schedules(lowered) == ()


@pytest.mark.xfail(raises=AssertionError, strict=True, reason="DLight's GEMV asserts that a block writes one element")
def test_gemv_of_dlight_refuses_a_block_that_writes_two_elements() -> None:
    with TARGETS["cuda"].tvm_target() as target:
        assert dlight.gpu.GEMV().apply(writes_pairs, target, False) is None


def test_gemv_refuses_a_block_that_writes_two_elements() -> None:
    with TARGETS["cuda"].tvm_target() as target:
        assert GEMV().apply(writes_pairs, target, False) is None


@T.prim_func(s_tir=True)
def writes_pairs(x: T.Buffer((4, 8, 2), "float32"), y: T.Buffer((4, 8, 2), "float32")) -> None:
    for i, j in T.grid(4, 8):
        with T.sblock("pairs"):
            row, pair = T.axis.remap("SS", [i, j])
            for k in range(2):
                y[row, pair, k] = x[row, pair, 1 - k]


def refused(*_: object) -> bool:
    raise ScheduleError("the loop is not there\nand more")


def lowered() -> tvm.IRModule:
    target = TARGETS["llvm"].tvm_target()
    with target:
        return cpu_pipeline(target)(module_of(lambda x: tvm.relax.op.abs(x), [(64, 1024)]))


def test_a_schedule_that_tvm_refuses_is_told_and_leaves_the_loops_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(elementwise._SPATIAL, "flat", refused)
    module = lowered()
    (info,) = infos_of(module).values()
    assert info.schedules == (UNSCHEDULED,)
    (sentence,) = lost_schedules(module)
    assert "abs: schedule flat of block " in sentence
    assert sentence.endswith(" was lost: the loop is not there")


def test_what_is_no_refusal_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(*_: object) -> bool:
        raise RuntimeError("mistaken")

    monkeypatch.setitem(elementwise._SPATIAL, "flat", mistaken)
    with pytest.raises(RuntimeError, match="mistaken"):
        lowered()


def test_a_block_that_tvm_does_not_inline_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_inlined(*_: object) -> None:
        raise ScheduleError("it has two consumers")

    monkeypatch.setattr(s_tir.Schedule, "compute_inline", not_inlined)
    target = TARGETS["llvm"].tvm_target()
    with target:
        module = cpu_pipeline(target)(module_of(lambda x: tvm.relax.op.abs(tvm.relax.op.negative(x)), [(64, 1024)]))
    (sentence,) = lost_schedules(module)
    assert "schedule inline of block" in sentence and sentence.endswith("it has two consumers")
