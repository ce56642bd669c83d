"""Cases whose kernels are cheap, on a machine without a GPU: the kernels run on the CPU, and are judged like any."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.case import Case
from harness.core.processors import THIS_MACHINE, Processors
from harness.targets import TARGETS
from harness.targets.clang import clang

if TYPE_CHECKING:
    import numpy.typing as npt

    from harness.runtime.executable import Executable
    from harness.runtime.sam3.model import Sam3


def emulates(case: Case, cheap_in: Collection[str], every: bool = False, processors: Processors = THIS_MACHINE) -> bool:
    """Returns whether the case is run by emulation here.

    Args:
        case: It is, if there is a clang, and no device for its target.
        cheap_in: Precisions in which its subject's kernels are cheap to emulate.
        every: Whether also if they are not.
        processors: The processors that the case is compiled for.
    """
    target = TARGETS[case.target]
    if not target.emulated or not (every or case.precision in cheap_in) or clang() is None:
        return False
    return target.run_problem(processors) is not None


class EmulatedExecutor:
    """Runs a GPU's kernels on the CPU; see `harness.execution.executors.Executor`."""

    emulates = True

    def __init__(self, processors: Processors = THIS_MACHINE) -> None:
        self._processors = processors

    def run_problem(self, target: str) -> str | None:
        """Does what `Executor` says."""
        return None if TARGETS[target].emulated else TARGETS[target].run_problem(self._processors)

    def executable(self, library: Path, target: str, parameters: Sequence[npt.NDArray[Any]]) -> Executable:
        """Does what `Executor` says; nothing can be compiled for the target in this process any more."""
        from harness.execution.emulation.device import install
        from harness.runtime.executable import Executable

        install(target)
        return Executable(library, TARGETS[target].device(), parameters)

    def model(self, folder: Path) -> Sam3:
        """Does what `Executor` says; nothing can be compiled for the target in this process any more."""
        from harness.execution.emulation.device import install
        from harness.runtime.manifest import read_manifest
        from harness.runtime.sam3.model import Sam3

        install(read_manifest(folder).target)
        return Sam3.load(folder)

    def device(self) -> None:
        """Does what `Executor` says."""

    def close(self) -> None:
        """Does what `Executor` says."""
