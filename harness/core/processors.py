"""Defines the processors that code is compiled for, an option that a process passes down to the compiler."""

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
        cpu: LLVM's name of the CPU, for instance `x86-64-v3`; None for this machine's CPU.
        cuda: Architecture of the NVIDIA GPU, for instance `sm_90`. None stands for this machine's GPU, or for several
            architectures if it has none.
    """

    cpu: str | None = None
    cuda: str | None = None

    def with_defaults(self, defaults: Processors) -> Processors:
        """Returns these processors, with those of `defaults` where none is named."""
        return Processors(self.cpu or defaults.cpu, self.cuda or defaults.cuda)

    @property
    def flags(self) -> tuple[str, ...]:
        """The equivalent command-line options."""
        cpu = () if self.cpu is None else ("--cpu", self.cpu)
        return cpu if self.cuda is None else (*cpu, "--cuda-arch", self.cuda)


THIS_MACHINE = Processors()
"""The processors of the compiling machine."""


def chosen_processors(cpu: str | None = None, cuda: str | None = None) -> Processors:
    """Reads the options --cpu and --cuda-arch, whose defaults are in the environment."""
    options = Processors(cpu or None, cuda or None)
    return options.with_defaults(
        Processors(os.environ.get(CPU_VARIABLE) or None, os.environ.get(CUDA_VARIABLE) or None)
    )
