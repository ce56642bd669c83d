"""Cases whose kernels are cheap, on a machine without a GPU: the kernels run on the CPU, and are judged like any."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.case import Case
from harness.targets import TARGETS
from harness.targets.clang import clang

if TYPE_CHECKING:
    import numpy.typing as npt

    from harness.runtime.executable import Executable
    from harness.runtime.sam3.model import Sam3


def emulates(case: Case, cheap_in: Collection[str], every: bool = False) -> bool:
    """Returns whether the case is run by emulation here.

    Args:
        case: It is, if there is a clang, and no device for its target.
        cheap_in: Precisions in which its subject's kernels are cheap to emulate.
        every: Whether also if they are not.
    """
    target = TARGETS[case.target]
    if not target.emulated or not (every or case.precision in cheap_in) or clang() is None:
        return False
    return target.run_problem() is not None


class Emulation:
    """The CPU in place of a GPU; see `harness.execution.place.Place`."""

    reads_source = True

    def run_problem(self, target: str) -> str | None:
        """Does what `Place` says."""
        return None if TARGETS[target].emulated else TARGETS[target].run_problem()

    def executable(self, library: Path, target: str, parameters: Sequence[npt.NDArray[Any]]) -> Executable:
        """Does what `Place` says; nothing can be compiled for the target in this process any more."""
        from harness.execution.emulation.device import install
        from harness.runtime.executable import Executable

        install(target)
        return Executable(library, TARGETS[target].device(), parameters)

    def model(self, folder: Path) -> Sam3:
        """Does what `Place` says; nothing can be compiled for the target in this process any more."""
        from harness.execution.emulation.device import install
        from harness.runtime.manifest import read_manifest
        from harness.runtime.sam3.model import Sam3

        install(read_manifest(folder).target)
        return Sam3.load(folder)

    def device(self) -> None:
        """Does what `Place` says."""

    def close(self) -> None:
        """Does what `Place` says."""
