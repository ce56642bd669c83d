"""Chooses the machine on which tests of the CPU kernels run compiled code: this one, or the one of pytest's option."""

from __future__ import annotations

from typing import Any, Protocol

import tvm
from tvm import relax

from conformance.support.instructions import AVX2, emulated, emulates
from harness.compiler.schedules.common.code_generation import generate
from harness.compiler.targets import TARGETS
from harness.compiler.targets.compiling import platform_of
from harness.compiler.targets.llvm import required_cpu
from harness.runtime.cpu import this_platform
from harness.runtime.loading import cpu_problem


class Place(Protocol):
    """A machine that runs compiled code; `conformance.aarch64.place` is one."""

    def target(self) -> tvm.target.Target:
        """What to compile for."""

    def runs(self, target: tvm.target.Target) -> bool:
        """Whether code for this target is run there, and not on this machine."""

    def virtual_machine(self, executable: Any, target: tvm.target.Target) -> Any:
        """TVM's virtual machine there: functions by name."""

    def module(self, compiled: Any, target: tvm.target.Target) -> Any:
        """A compiled module there: functions by name, which write into their last arguments."""


_place: Place | None = None


def choose(place: Place | None) -> None:
    """Chooses where kernels run from now on; None is this machine."""
    global _place
    _place = place


def cpu_target() -> tvm.target.Target:
    """Returns the target of the CPU that kernels run on."""
    return TARGETS["llvm"].tvm_target() if _place is None else _place.target()


def any_cpu_target() -> tvm.target.Target:
    """Returns the target of code for every CPU of that architecture."""
    triple = cpu_target().attrs.get("mtriple")
    return tvm.target.Target({"kind": "llvm"} | ({} if triple is None else {"mtriple": str(triple)}))


def executes(target: tvm.target.Target) -> bool:
    """Returns whether code for a target can be run, on this machine or where kernels run."""
    if _place is not None and _place.runs(target):
        return True
    return platform_of(target) == this_platform() and cpu_problem(*required_cpu(target)) is None


def computes(target: tvm.target.Target) -> bool:
    """Returns whether the code that `build` makes for a target can be run."""
    return executes(target) or emulates(target)


def build(module: tvm.IRModule, target: tvm.target.Target) -> Any:
    """Generates the code of a lowered module, with instructions that this machine lacks emulated."""
    if not executes(target) and emulates(target):
        module, target = emulated(module), AVX2
    return generate(lambda chosen: relax.build(module, chosen, relax_pipeline=None), target)


def virtual_machine(executable: Any, target: tvm.target.Target | None = None) -> Any:
    """Returns the virtual machine that runs code for a target, by default for `cpu_target`."""
    target = target or cpu_target()
    if _place is not None and _place.runs(target):
        return _place.virtual_machine(executable, target)
    return relax.VirtualMachine(executable, tvm.cpu())


def functions(compiled: Any, target: tvm.target.Target | None = None) -> Any:
    """Returns the functions of a module that was compiled for a target, by default for `cpu_target`, by name."""
    target = target or cpu_target()
    if _place is not None and _place.runs(target):
        return _place.module(compiled, target)
    return compiled
