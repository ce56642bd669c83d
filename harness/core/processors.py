"""Defines the processors that code is compiled for and the remote device that runs it, options that are passed down."""

from __future__ import annotations

import os
from dataclasses import dataclass

from harness.core.errors import HarnessError

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


@dataclass(frozen=True)
class Remote:
    """A device that `sam3-tvm serve-device` serves.

    Attributes:
        address: HOST:PORT, normally of this end of an SSH tunnel.
        seconds: Time after which the device ends a session; 0 for no limit.
    """

    address: str
    seconds: float = 0.0

    def __post_init__(self) -> None:
        port = self.address.rpartition(":")[2]
        if not (self.host and port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise HarnessError(
                f"{self.address!r} is not an address: give HOST:PORT of a device, see docs/prove/remote.md"
            )

    @property
    def host(self) -> str:
        """Name or address of the device's machine."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Port of the device."""
        return int(self.address.rpartition(":")[2])

    @property
    def flags(self) -> tuple[str, ...]:
        """The equivalent command-line options."""
        return "--remote", self.address

    def __str__(self) -> str:
        return self.address
