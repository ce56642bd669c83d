"""Cases on a machine without the device, or without the unit of a CPU, that they are compiled for: this CPU acts it."""

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


def emulates(case: Case, cheap_in: Collection[str], every: bool = False, processors: Processors = THIS_MACHINE) -> bool:
    """Returns whether the case is run by emulation here.

    Args:
        case: A GPU's is, if there is a clang, and no device for its target; one of this CPU's architecture, if it is
            compiled for a matrix unit and this CPU has everything else.
        cheap_in: Precisions in which its subject's kernels of a GPU are cheap to emulate.
        every: Whether also if they are not, and what is compiled for a matrix unit.
        processors: The processors that the case is compiled for.
    """
    target = TARGETS[case.target]
    if target is HOST:
        return every and lacks_matrix_unit_alone(processors) and emulation_problem() is None
    if not target.emulated or not (every or case.precision in cheap_in) or clang() is None:
        return False
    return target.run_problem(processors) is not None


def emulating_executor(case: Case, processors: Processors) -> Executor:
    """Returns what runs a case that `emulates` names."""
    return MatrixUnitExecutor(processors) if TARGETS[case.target] is HOST else EmulatedExecutor(processors)


class MatrixUnitExecutor(LocalExecutor):
    """Runs code for the matrix unit of x86 on a CPU without one."""

    def run_problem(self, target: str) -> str | None:
        """See `Executor`."""
        return None

    def executable(self, library: Path, target: str, parameters: Sequence[npt.NDArray[Any]]) -> Executable:
        """See `Executor`."""
        _act_as_with_unit()
        return super().executable(library, target, parameters)

    def model(self, folder: Path) -> Artifact:
        """See `Executor`."""
        _act_as_with_unit()
        return super().model(folder)


def _act_as_with_unit() -> None:
    emulate()
    add_emulated_features(MATRIX_UNIT)


class EmulatedExecutor:
    """Runs a GPU's kernels on the CPU; see `harness.compiler.execution.executors.Executor`."""

    emulates = True

    def __init__(self, processors: Processors = THIS_MACHINE) -> None:
        self._processors = processors

    def run_problem(self, target: str) -> str | None:
        """Does what `Executor` says."""
        return None if TARGETS[target].emulated else TARGETS[target].run_problem(self._processors)

    def executable(self, library: Path, target: str, parameters: Sequence[npt.NDArray[Any]]) -> Executable:
        """Does what `Executor` says; nothing can be compiled for the target in this process any more."""
        from harness.compiler.execution.emulation.device import install
        from harness.runtime.executable import Executable

        install(target)
        return Executable(library, TARGETS[target].device(), parameters)

    def model(self, folder: Path) -> Artifact:
        """Does what `Executor` says; nothing can be compiled for the target in this process any more."""
        from harness.compiler.execution.emulation.device import install
        from harness.runtime.artifact import Artifact
        from harness.runtime.manifest import read_manifest

        install(read_manifest(folder).target)
        return Artifact.load(folder)

    def device(self) -> None:
        """Does what `Executor` says."""

    def close(self) -> None:
        """Does what `Executor` says."""
