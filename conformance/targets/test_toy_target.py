"""A target from outside the package is one value and one call: any x86-64 or arm64 CPU, with TVM's own pipeline."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tvm
from tvm import relax

from harness.compiler.schedules import UNTUNED, Schedules
from harness.compiler.targets import HOST, TARGETS, Target, register
from harness.core.case import Case
from harness.core.outcome import Stage, Status
from harness.core.processors import THIS_MACHINE, Processors
from harness.core.settings import Settings
from harness.models.selection import select
from harness.verify.stages import run_case


def generic_cpu(_processors: Processors = THIS_MACHINE) -> tvm.target.Target:
    return tvm.target.Target({"kind": "llvm", "mcpu": "generic"})


def default_pipeline(target: tvm.target.Target, _schedules: Schedules = UNTUNED) -> tvm.transform.Pass:
    return relax.get_default_pipeline(target)


def no_problem(_processors: Processors = THIS_MACHINE) -> None:
    return None


TOY = Target(
    name="toy",
    summary="any CPU of this machine's architecture",
    tvm_target=generic_cpu,
    pipeline=default_pipeline,
    compile_problem=HOST.compile_problem,
    run_problem=no_problem,
)


@pytest.fixture
def toy() -> Iterator[Target]:
    register(TOY)
    yield TOY
    del TARGETS[TOY.name]


def test_a_registered_target_is_compiled_for_run_and_judged(toy: Target) -> None:
    (case,) = select(["box_head"], targets=[toy.name])
    outcome = run_case(case, Settings())
    assert (outcome.status, outcome.stage) == (Status.PASSED, Stage.JUDGE), outcome.error
    assert outcome.verdicts


def test_what_it_does_not_say_it_can_do_is_not_asked_of_it(toy: Target) -> None:
    assert not (toy.tunable or toy.emulated or toy.forkable)
    assert toy.examine is None and toy.device_code is None
    assert Case("box_head", "real", "toy") in select(targets=["toy"])


def test_names_are_taken_once(toy: Target) -> None:
    register(toy)
    with pytest.raises(ValueError, match="there is a target llvm already"):
        register(Target(**{**vars(toy), "name": "llvm"}))
    assert TARGETS["llvm"] is HOST
