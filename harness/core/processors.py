"""The processors that code is compiled for: an option that is passed from the border of a process to the compiler."""

from __future__ import annotations

import os
from dataclasses import dataclass

CPU_VARIABLE = "SAM3_TVM_MCPU"
"""The environment variable with the default of the option --cpu."""

CUDA_VARIABLE = "SAM3_TVM_CUDA_ARCH"
"""The environment variable with the default of the option --cuda-arch."""


@dataclass(frozen=True)
class Processors:
    """The processors that code is compiled for.

    Attributes:
        cpu: LLVM's name of the CPU, for instance `x86-64-v3`; None for the CPU of this machine.
        cuda: Architecture of the NVIDIA GPU, for instance `sm_90`; None for the GPU of this machine, or where there is
            none, for several architectures.
    """

    cpu: str | None = None
    cuda: str | None = None

    def otherwise(self, others: Processors) -> Processors:
        """These processors, with those of `others` where none is named."""
        return Processors(self.cpu or others.cpu, self.cuda or others.cuda)

    @property
    def flags(self) -> tuple[str, ...]:
        """The options that mean the same on the command line."""
        cpu = () if self.cpu is None else ("--cpu", self.cpu)
        return cpu if self.cuda is None else (*cpu, "--cuda-arch", self.cuda)


THIS_MACHINE = Processors()
"""The processors of the machine that compiles."""


def chosen_processors(cpu: str | None = None, cuda: str | None = None) -> Processors:
    """What the options --cpu and --cuda-arch mean, whose defaults the environment has; for the border of a process."""
    given = Processors(cpu or None, cuda or None)
    return given.otherwise(Processors(os.environ.get(CPU_VARIABLE) or None, os.environ.get(CUDA_VARIABLE) or None))
