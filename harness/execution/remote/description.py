"""The description of a device: the code that it can run, its targets, and its machine."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_origin, get_type_hints

from harness.core.processors import THIS_MACHINE, Processors
from harness.runtime.cpu import this_platform

PROTOCOL = 3
"""Version of what clients and `sam3-tvm serve-device` say to each other."""
INFO = "sam3_tvm"
"""Where a server's description stands among what it tells the tracker."""
DESCRIBE = "describe"
"""The request of a server to the process of its first session, before there is a client; a line of JSON answers.

It is the key of a JSON object, whose value has the processors that the server was told to name.
"""


@dataclass(frozen=True)
class Description:
    """A machine that runs compiled code.

    Attributes:
        name: Its host name.
        cpu: Model of its processor.
        system, architecture: `Linux` or `macOS`, and `x86_64` or `aarch64`.
        mcpu: LLVM's name of the CPU to compile for.
        cuda_arch: What to compile CUDA kernels for; empty without an NVIDIA GPU.
        threads: What it runs on.
        memory_bytes: What it has; None if not known.
        problems: For each target that it cannot run, why not.
        hardware: For each target that it can run, the name of what runs it.
        versions: Versions of the packages that matter.
        protocol: `PROTOCOL` of the version that serves.
    """

    name: str
    cpu: str
    system: str
    architecture: str
    mcpu: str
    cuda_arch: str
    threads: int
    memory_bytes: int | None
    problems: Mapping[str, str]
    hardware: Mapping[str, str]
    versions: Mapping[str, str | None]
    protocol: int = PROTOCOL

    @property
    def processors(self) -> Processors:
        """What to compile for on a machine like this one.

        LLVM's names of CPUs are those of one architecture, except for `generic`, which is left out where it would mean
        another one.
        """
        cpu = None if self.mcpu == "generic" and self.architecture != this_platform()[1] else self.mcpu
        return Processors(cpu, self.cuda_arch or None)

    def to_json(self) -> str:
        """Returns the description as JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Description:
        """Makes a description of what `to_json` wrote, parsed.

        Raises:
            TypeError: It was written by another version.
        """
        description = cls(**values)
        for name, kind in get_type_hints(cls).items():
            if not isinstance(getattr(description, name), Mapping if get_origin(kind) is Mapping else kind):
                raise TypeError(f"{name} of a device is no {kind}")
        return description

    def __str__(self) -> str:
        machine = f"{self.name}: {self.cpu}, {self.system} on {self.architecture}"
        return f"{machine}, {self.threads} thread{'s' if self.threads > 1 else ''}"


def describe(processors: Processors = THIS_MACHINE) -> Description:
    """This machine; it loads TVM, and what drivers there are, so it is asked in a process of its own.

    Args:
        processors: The CPU that clients compile for, if it is not to be this machine's.
    """
    from harness.machine import describe_machine, versions
    from harness.processes.threads import thread_count
    from harness.targets import TARGETS
    from harness.targets.cuda import architecture_of
    from harness.targets.llvm import cpu_name

    machine, installed = describe_machine(), versions()
    system, architecture = this_platform()
    told = {name: target.run_problem(processors) for name, target in TARGETS.items()}
    problems = {name: problem for name, problem in told.items() if problem is not None}
    runnable = {name: target.device() for name, target in TARGETS.items() if name not in problems}
    return Description(
        name=platform.node(),
        cpu=str(machine["cpu"]),
        system=system,
        architecture=architecture,
        mcpu=processors.cpu or cpu_name(processors),
        cuda_arch=architecture_of(runnable["cuda"]) if "cuda" in runnable else "",
        threads=thread_count(),
        memory_bytes=machine["usable_memory_bytes"],
        problems=problems,
        hardware={name: _hardware(device, str(machine["cpu"])) for name, device in runnable.items()},
        versions={name: installed[name] for name in ("sam3-tvm", "apache-tvm", "apache-tvm-ffi")},
    )


def _hardware(device: Any, cpu: str) -> str:
    """Returns the name of a device: the processor's for the CPU, otherwise the driver's."""
    return cpu if device.dlpack_device_type() == 1 else str(device.device_name or "")
