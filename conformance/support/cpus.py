"""Processors besides this machine's whose code the tests execute here: kernels differ with the width of vectors."""

from __future__ import annotations

import tvm

from harness.compiler.schedules.cpu.tile import vector_unit
from harness.compiler.targets import TARGETS
from harness.compiler.targets.compiling import required_cpu
from harness.core.processors import THIS_MACHINE, Processors
from harness.runtime.cpu import architecture
from harness.runtime.loading import cpu_problem

_AVX2 = "haswell"


def narrower(processors: Processors = THIS_MACHINE) -> tuple[str, ...]:
    """A CPU with AVX2 and no more, if this machine executes its code and what it compiles for has wider vectors."""
    if architecture() != "x86_64":
        return ()
    target, own = tvm.target.Target({"kind": "llvm", "mcpu": _AVX2}), TARGETS["llvm"].tvm_target(processors)
    wider = vector_unit(own).lanes > vector_unit(target).lanes
    return (_AVX2,) if wider and cpu_problem(*required_cpu(target)) is None else ()
