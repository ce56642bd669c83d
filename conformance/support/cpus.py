"""Names other processors that tests compile for: kernels differ with the width of vectors and with instructions."""

from __future__ import annotations

import tvm

from harness.compiler.schedules.cpu.tile import vector_unit
from harness.compiler.targets import TARGETS
from harness.compiler.targets.llvm import required_cpu
from harness.core.processors import THIS_MACHINE, Processors
from harness.runtime.cpu import architecture
from harness.runtime.loading import cpu_problem

_AVX2 = "haswell"
_LINUX, _MACOS = "aarch64-linux-gnu", "arm64-apple-macos"
_TRIPLES = {"neoverse-n1": _LINUX, "neoverse-v1": _LINUX, "neoverse-n2": _LINUX, "apple-m1": _MACOS, "apple-m2": _MACOS}


def target_for(cpu: str) -> tvm.target.Target:
    """Returns the target of a CPU by its name, which is of x86 unless it is one of those above."""
    return tvm.target.Target({"kind": "llvm", "mcpu": cpu, "mtriple": _TRIPLES.get(cpu, "x86_64-linux-gnu")})


def narrower(processors: Processors = THIS_MACHINE) -> tuple[str, ...]:
    """Returns a CPU with AVX2 and no more, if this machine executes its code and compiles for wider vectors."""
    if architecture() != "x86_64":
        return ()
    target, own = tvm.target.Target({"kind": "llvm", "mcpu": _AVX2}), TARGETS["llvm"].tvm_target(processors)
    wider = vector_unit(own).lanes > vector_unit(target).lanes
    return (_AVX2,) if wider and cpu_problem(*required_cpu(target)) is None else ()
