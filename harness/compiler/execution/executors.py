"""Defines executors, which run the compiled code of a case on this machine, emulated here, or on a remote device.

On this CPU output buffers are poisoned before each call, so that a kernel that skips an element is caught: reused
memory often still holds the right value, from an earlier call of the same program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
import tvm_ffi
from torch.utils.dlpack import from_dlpack

from harness.compiler.execution.emulation.device import install
from harness.compiler.execution.emulation.matrix_unit import emulate, emulation_problem
from harness.compiler.execution.remote.client import DeviceSession, RemoteArtifact, RemoteExecutable
from harness.compiler.targets import HOST, TARGETS
from harness.compiler.targets.linking import clang
from harness.compiler.targets.llvm import lacks_matrix_unit_alone
from harness.core.case import Case
from harness.core.outcome import Device
from harness.core.processors import THIS_MACHINE, Processors, Remote
from harness.core.settings import Settings
from harness.runtime.artifact import Artifact
from harness.runtime.cpu import MATRIX_UNIT, add_emulated_features
from harness.runtime.executable import Executable
from harness.runtime.manifest import read_manifest

_ALLOCATION = "vm.builtin.alloc_tensor"
"""The builtin that TVM's virtual machine calls for each output tensor, right before the function that writes it."""
_POISON = 0xFF
"""The byte of poisoned memory: a float of such bytes is NaN, an integer is -1."""


def poison(tensor: tvm_ffi.Tensor) -> None:
    """Fills a tensor on the CPU with bytes that no correct kernel leaves."""
    from_dlpack(tensor).reshape(-1).view(torch.uint8).fill_(_POISON)


def poison_allocation(_function: Any, name: str, is_before_call: bool, result: Any, *_arguments: Any) -> None:
    """Poisons each tensor as it is allocated; an instrument of TVM's virtual machine on the CPU."""
    if name == _ALLOCATION and not is_before_call:
        poison(result)


@dataclass(frozen=True)
class LocalExecutor:
    """Runs code on this machine; on the CPU, `poison_allocation` poisons the memory of outputs before each call.

    Attributes:
        processors: The processors to run code for.
        begin_emulation: Begins the emulation of hardware that this machine lacks for a target, before code is loaded.
        emulates: Whether this hardware is a GPU, whose kernels the CPU runs from their source; this process cannot
            compile for its target afterwards.
    """

    processors: Processors = THIS_MACHINE
    begin_emulation: Callable[[str], None] | None = None
    emulates: bool = False

    def run_problem(self, target: str) -> str | None:
        """Returns the reason why this machine cannot run code for a target, or None."""
        return TARGETS[target].run_problem(self.processors) if self.begin_emulation is None else None

    def load_program(self, library: Path, target: str, parameters: Sequence[npt.NDArray[Any]]) -> Executable:
        """Loads a compiled program with its parameters."""
        if self.begin_emulation is not None:
            self.begin_emulation(target)
        instrument = poison_allocation if target == HOST.name else None
        return Executable(library, TARGETS[target].device(), parameters, instrument)

    def load_model(self, folder: Path) -> Artifact:
        """Loads a compiled model."""
        if self.begin_emulation is not None:
            self.begin_emulation(read_manifest(folder).target)
        return Artifact.load(folder)

    def describe_device(self) -> None:
        """Returns None: the code runs on this machine."""

    def close(self) -> None:
        """Does nothing: this machine is not shared."""


class RemoteExecutor:
    """Runs code on a device, in a session that begins when the first code was compiled."""

    emulates = False

    def __init__(self, remote: Remote, processors: Processors = THIS_MACHINE) -> None:
        self._remote = remote
        self._processors = processors
        self._session: DeviceSession | None = None
        self._target = ""

    def run_problem(self, target: str) -> str | None:
        """Returns the reason why the device cannot run code for a target, or None.

        Raises:
            DeviceLostError: The device does not answer.
        """
        return self._open().description.problem(target, self._processors)

    def load_program(self, library: Path, target: str, parameters: Sequence[npt.NDArray[Any]]) -> RemoteExecutable:
        """Loads a compiled program with its parameters on the device."""
        self._target = target
        return RemoteExecutable(self._open(), library, target, parameters)

    def load_model(self, folder: Path) -> RemoteArtifact:
        """Loads a compiled model."""
        artifact = RemoteArtifact(self._open(), folder)
        self._target = artifact.manifest.target
        return artifact

    def describe_device(self) -> Device | None:
        """Returns the device and the bytes sent to it, once a session began."""
        if self._session is None:
            return None
        description = self._session.description
        return Device(
            name=description.name,
            cpu=description.cpu,
            hardware=description.hardware.get(self._target, ""),
            target=self._target,
            system=description.system,
            architecture=description.architecture,
            threads=description.threads,
            address=self._remote.address,
            sent_bytes=self._session.sent_bytes,
        )

    def close(self) -> None:
        """Ends the session, if there is one."""
        if self._session is not None:
            self._session.close()

    def _open(self) -> DeviceSession:
        if self._session is None or self._session.rpc is None:
            self._session = DeviceSession(self._remote)
        return self._session


Executor = LocalExecutor | RemoteExecutor
"""A machine that runs compiled code."""


def create_executor(settings: Settings) -> Executor:
    """Returns the executor of a case with these settings: this machine or the remote device."""
    if settings.remote is None:
        return LocalExecutor(settings.processors)
    return RemoteExecutor(settings.remote, settings.processors)


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
    is_unit = TARGETS[case.target] is HOST
    return LocalExecutor(processors, _emulate_unit if is_unit else _emulate_gpu, emulates=not is_unit)


def _emulate_unit(_target: str) -> None:
    emulate()
    add_emulated_features(MATRIX_UNIT)


def _emulate_gpu(target: str) -> None:
    install(target)
