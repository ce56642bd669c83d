"""Cases whose kernels are cheap, on a machine without a GPU: the kernels run on the CPU, and are judged like any."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.case import Case
from harness.core.precision import PRECISIONS
from harness.targets import TARGETS
from harness.targets.clang import clang

if TYPE_CHECKING:
    import numpy.typing as npt

    from harness.runtime.executable import Executable
    from harness.runtime.sam3.model import Sam3

EMULATED_TARGET = "cuda"
"""Metal's host code is for macOS; `test_emulation.py` emulates its kernels beside host code for here."""

CHEAP = frozenset(
    {
        "box_head",
        "geometry_encoder",
        "scoring_head",
        "segmentation_head",
        "text_encoder",
        "transformer_decoder",
        "transformer_encoder",
    }
)
"""Components whose kernels take at most half a minute on a CPU, in fp32; docs/GPU_KERNELS.md has the times."""

SLOW_IN_HALF = frozenset({"transformer_encoder"})
"""Which of them take minutes in half precision, where the tensor cores of attention are emulated: 215 s, measured."""


def emulates(case: Case, every: bool = False) -> bool:
    """Whether the case is run by emulation here.

    Args:
        case: It is, if there is a clang, and no device for its target.
        every: Whether also if its component is not a cheap one.
    """
    cheap = CHEAP - SLOW_IN_HALF if PRECISIONS[case.precision].is_half else CHEAP
    if case.target != EMULATED_TARGET or not (every or case.component in cheap) or clang() is None:
        return False
    return TARGETS[case.target].run_problem() is not None


class Emulation:
    """The CPU in place of a GPU; see `harness.execution.place.Place`."""

    reads_source = True

    def run_problem(self, target: str) -> str | None:
        """See `Place`."""
        return None if target == EMULATED_TARGET else TARGETS[target].run_problem()

    def executable(self, library: Path, target: str, parameters: Sequence[npt.NDArray[Any]]) -> Executable:
        """See `Place`; nothing can be compiled for the target in this process any more."""
        from harness.execution.emulation.device import install
        from harness.runtime.executable import Executable

        install(target)
        return Executable(library, TARGETS[target].device(), parameters)

    def model(self, folder: Path) -> Sam3:
        """See `Place`; nothing can be compiled for the target in this process any more."""
        from harness.execution.emulation.device import install
        from harness.runtime.manifest import read_manifest
        from harness.runtime.sam3.model import Sam3

        install(read_manifest(folder).target)
        return Sam3.load(folder)

    def device(self) -> None:
        """See `Place`."""

    def close(self) -> None:
        """See `Place`."""
