"""Defines the target `llvm`: the CPU of this machine, or another named CPU.

`x86-64-v3`, for instance, is the CPU of machines with AVX2 but no AVX-512. On Linux, a CPU of the other architecture
may also be named: `neoverse-n1` on x86-64 compiles for Linux on AArch64.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

from harness.compiler.schedules import UNTUNED, Schedules
from harness.compiler.targets.linking import link_problem
from harness.compiler.targets.system_cpu import system_cpu
from harness.compiler.targets.target import Target
from harness.core.errors import HarnessError
from harness.core.processors import CPU_VARIABLE, THIS_MACHINE, Processors
from harness.runtime.cpu import MATRIX_UNIT, VECTOR_FEATURES, architecture, common_cpu, cpu_features, normalized
from harness.runtime.loading import cpu_problem
from harness.runtime.threads import usable_cpus

if TYPE_CHECKING:
    import tvm

_UNITS = {"amx": MATRIX_UNIT}
"""Name of a unit behind a CPU's name (`sapphirerapids+amx`) → the features of the unit.

A CPU's name alone does not promise these features, because hypervisors and containers often hide a processor's unit.
"""
_OTHER_TRIPLES = {"x86_64": "aarch64-linux-gnu", "aarch64": "x86_64-linux-gnu"}


def cpu_name(processors: Processors = THIS_MACHINE) -> str:
    """Returns LLVM's name of the CPU to compile for: the named CPU, otherwise this machine's.

    Raises:
        HarnessError: LLVM does not know the named CPU (it would silently compile for a generic CPU), or the unit is
            unknown.
    """
    if processors.cpu is not None:
        from tvm.target import codegen

        name, unit = _split_cpu(processors.cpu)
        is_known = codegen.llvm_is_valid_cpu(name, codegen.llvm_get_system_triple())
        if not is_known and cross_triple(processors) is None:
            raise HarnessError(
                f"LLVM knows no CPU {name!r} for {codegen.llvm_get_system_triple()}: leave out --cpu, and "
                f"unset {CPU_VARIABLE}, to compile for this machine's {codegen.llvm_get_system_cpu()}"
            )
        if unit and unit not in _UNITS:
            raise HarnessError(f"--cpu {processors.cpu} names an unknown unit {unit!r}: known are {', '.join(_UNITS)}")
        if unit and normalized((cross_triple(processors) or architecture()).partition("-")[0]) != "x86_64":
            raise HarnessError(f"--cpu {processors.cpu} adds a unit that only x86 CPUs have: leave out +{unit}")
        return name
    cpu = system_cpu()
    return safe_cpu(cpu.name, frozenset(cpu.features), cpu_features())


def cross_triple(processors: Processors) -> str | None:
    """Returns LLVM's triple for a named CPU of the other architecture; None for any other CPU.

    LLVM does not connect a CPU with a system: the CPU is taken for Linux, and on Linux alone.
    """
    from tvm.target import codegen

    triple = _OTHER_TRIPLES.get(architecture()) if platform.system() == "Linux" else None
    if processors.cpu is None or triple is None:
        return None
    name, _ = _split_cpu(processors.cpu)
    if codegen.llvm_is_valid_cpu(name, codegen.llvm_get_system_triple()):
        return None
    return triple if codegen.llvm_is_valid_cpu(name, triple) else None


def host_of(processors: Processors = THIS_MACHINE) -> dict[str, Any]:
    """Returns TVM's target for a CPU as a dictionary: kind, name, triple of another architecture, named features.

    Raises:
        HarnessError: LLVM does not know the named CPU, or the unit is unknown.
    """
    triple = cross_triple(processors)
    host: dict[str, Any] = {"kind": "llvm", "mcpu": cpu_name(processors)}
    if triple is not None:
        host["mtriple"] = triple
    if unit := _split_cpu(processors.cpu or "")[1]:
        host["mattr"] = [f"+{feature}" for feature in _UNITS[unit]]
    return host


def _split_cpu(cpu: str) -> tuple[str, str]:
    """Splits the value of --cpu into LLVM's name of the CPU and the unit behind it, if any."""
    name, _, unit = cpu.partition("+")
    return name, unit


def safe_cpu(name: str, promised: frozenset[str], present: frozenset[str] | None) -> str:
    """Returns `name`, or a common CPU's name if `name` promises vector instructions that the machine hides.

    A hypervisor may hide instruction sets of the processor that it names; code with these would die of SIGILL.

    Args:
        name: LLVM's name of the host processor.
        promised: Features that LLVM connects with the name.
        present: Features that the operating system reports; None if it reports none.
    """
    if present is None or promised.intersection(VECTOR_FEATURES) <= present:
        return name
    return common_cpu(present)


def llvm_target(processors: Processors = THIS_MACHINE) -> tvm.target.Target:
    """Returns TVM's target for a CPU, with the number of CPUs that this process may use.

    Raises:
        HarnessError: LLVM does not know the named CPU.
    """
    import tvm

    return tvm.target.Target({**host_of(processors), "num-cores": usable_cpus()})


def llvm_pipeline(target: tvm.target.Target, schedules: Schedules = UNTUNED) -> tvm.transform.Pass:
    """Returns the CPU schedules of `harness.compiler.schedules.cpu`, as the Relax pipeline of `tvm.relax.build`."""
    from harness.compiler.schedules.cpu import cpu_pipeline

    return cpu_pipeline(target, schedules)


def compile_problem() -> str | None:
    """Returns why this machine cannot compile for its CPU, or None."""
    from tvm.target import codegen

    if not codegen.llvm_version_major(allow_none=True):
        return "this build of TVM has no LLVM: install the apache-tvm wheel from PyPI"
    return link_problem()


def run_problem(processors: Processors = THIS_MACHINE) -> str | None:
    """Returns why this machine cannot run code for a CPU, or None; a named CPU may have more features.

    Raises:
        HarnessError: LLVM does not know the named CPU.
    """
    problem = cpu_problem(*_required_cpu(processors))
    if problem is None:
        return None
    otherwise = ", or let verify --emulate act the unit" if lacks_matrix_unit_alone(processors) else ""
    return f"code {problem}: leave out --cpu, and unset {CPU_VARIABLE}{otherwise}"


def lacks_matrix_unit_alone(processors: Processors = THIS_MACHINE) -> bool:
    """Returns whether this machine lacks only a matrix unit to run code for a CPU.

    Raises:
        HarnessError: LLVM does not know the named CPU.
    """
    name, required = _required_cpu(processors)
    vectors = [feature for feature in required if feature not in MATRIX_UNIT]
    return cpu_problem(name, required) is not None and cpu_problem(name, vectors) is None


def required_features(processors: Processors) -> frozenset[str]:
    """Returns the features that code for processors may use, in LLVM's spelling.

    Raises:
        HarnessError: LLVM does not know the named CPU.
    """
    return frozenset(_required_cpu(processors)[1])


def required_cpu(host: tvm.target.Target) -> tuple[str, list[str]]:
    """Returns LLVM's name of the CPU that host code is compiled for, and the features that the code may use."""
    from tvm.target import codegen

    promised = codegen.llvm_get_cpu_features(host)
    name = str(host.attrs["mcpu"]) if "mcpu" in host.attrs else "generic"
    attributes = {str(attribute) for attribute in host.attrs.get("mattr", ())}
    vectors = [feature for feature in VECTOR_FEATURES if feature in promised]
    return name, vectors + [feature for feature in MATRIX_UNIT if f"+{feature}" in attributes]


def _required_cpu(processors: Processors) -> tuple[str, list[str]]:
    """Returns LLVM's name of the CPU that code for processors needs, and the features that the code may use."""
    import tvm

    return required_cpu(tvm.target.Target(host_of(processors)))


LLVM = Target(
    name="llvm",
    summary="this machine's CPU, with every instruction set it has",
    tvm_target=llvm_target,
    pipeline=llvm_pipeline,
    compile_problem=compile_problem,
    run_problem=run_problem,
    precisions=("fp32", "bf16"),
    tunable=True,
    symbolic=True,
    upsampling=True,
    forkable=True,
)
