"""Chooses and runs the cases that this CPU emulates: a GPU's kernels, or a matrix unit that the CPU lacks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.compiler.execution.emulation.matrix_unit import emulate, emulation_problem
from harness.compiler.execution.executors import Executor, LocalExecutor
from harness.compiler.targets import HOST, TARGETS
from harness.compiler.targets.clang import clang
from harness.compiler.targets.llvm import lacks_matrix_unit_alone
from harness.core.case import Case
from harness.core.processors import THIS_MACHINE, Processors
from harness.runtime.cpu import MATRIX_UNIT, add_emulated_features

if TYPE_CHECKING:
    import numpy.typing as npt

    from harness.runtime.artifact import Artifact
    from harness.runtime.executable import Executable


def is_emulated(
    case: Case,
    cheap_precisions: Collection[str],
    include_expensive: bool = False,
    processors: Processors = THIS_MACHINE,
) -> bool:
    """Returns whether a case is emulated on this machine.

    Args:
        case: The case; a GPU's can be emulated if there is a clang and no device for its target, a CPU's if its code
            needs nothing that this CPU lacks but a matrix unit.
        cheap_precisions: Precisions in which the GPU kernels of the case's subject are cheap to emulate.
        include_expensive: Whether to emulate expensive kernels, and code for a matrix unit, too.
        processors: The processors that the case is compiled for.
    """
    target = TARGETS[case.target]
    if target is HOST:
        return include_expensive and lacks_matrix_unit_alone(processors) and emulation_problem() is None
    if not target.emulated or not (include_expensive or case.precision in cheap_precisions) or clang() is None:
        return False
    return target.run_problem(processors) is not None


def create_emulating_executor(case: Case, processors: Processors) -> Executor:
    """Returns the executor of a case that is emulated (`is_emulated`)."""
    return MatrixUnitExecutor(processors) if TARGETS[case.target] is HOST else EmulatedExecutor(processors)


class MatrixUnitExecutor(LocalExecutor):
    """Runs code for the matrix unit of x86 on a CPU without one."""

    def run_problem(self, target: str) -> str | None:
        """Returns None: the matrix unit is emulated."""
        return None

    def load_program(self, library: Path, target: str, parameters: Sequence[npt.NDArray[Any]]) -> Executable:
        """Loads a compiled program with its parameters, after the emulation of the unit has begun."""
        _emulate_unit()
        return super().load_program(library, target, parameters)

    def load_model(self, folder: Path) -> Artifact:
        """Loads a compiled model."""
        _emulate_unit()
        return super().load_model(folder)


def _emulate_unit() -> None:
    emulate()
    add_emulated_features(MATRIX_UNIT)


class EmulatedExecutor:
    """Runs a GPU's kernels on the CPU (`harness.compiler.execution.executors.Executor`)."""

    emulates = True

    def __init__(self, processors: Processors = THIS_MACHINE) -> None:
        self._processors = processors

    def run_problem(self, target: str) -> str | None:
        """Returns the reason why the code cannot be emulated or run here, or None."""
        return None if TARGETS[target].emulated else TARGETS[target].run_problem(self._processors)

    def load_program(self, library: Path, target: str, parameters: Sequence[npt.NDArray[Any]]) -> Executable:
        """Loads a compiled program with its parameters; this process cannot compile for the target afterwards."""
        from harness.compiler.execution.emulation.device import install
        from harness.runtime.executable import Executable

        install(target)
        return Executable(library, TARGETS[target].device(), parameters)

    def load_model(self, folder: Path) -> Artifact:
        """Loads a compiled model; this process cannot compile for its target afterwards."""
        from harness.compiler.execution.emulation.device import install
        from harness.runtime.artifact import Artifact
        from harness.runtime.manifest import read_manifest

        install(read_manifest(folder).target)
        return Artifact.load(folder)

    def describe_device(self) -> None:
        """Returns None: the code runs on this machine."""

    def close(self) -> None:
        """Does nothing: the emulation lasts as long as the process."""
