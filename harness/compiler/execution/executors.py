"""Defines executors, which run the compiled code of a case on this machine or on a remote device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from harness.compiler.targets import HOST, TARGETS
from harness.core.outcome import Device
from harness.core.processors import THIS_MACHINE, Processors
from harness.core.remote import Remote
from harness.core.settings import Settings

if TYPE_CHECKING:
    import numpy.typing as npt

    from harness.compiler.execution.remote.client import DeviceSession, RemoteArtifact, RemoteExecutable
    from harness.runtime.artifact import Artifact, LoadedModel
    from harness.runtime.executable import Executable


class LoadedProgram(Protocol):
    """A compiled program with its parameters."""

    def run(self, inputs: Sequence[npt.NDArray[Any]], /) -> list[npt.NDArray[Any]]:
        """Runs the program once and returns its outputs in order."""


class Executor(Protocol):
    """A machine that runs compiled code.

    Attributes:
        emulates: Whether it runs a GPU's kernels on the CPU of this machine, from their source.
    """

    emulates: bool

    def run_problem(self, target: str) -> str | None:
        """Returns the reason why code that was compiled here for a target cannot run there, or None."""

    def load_program(self, library: Path, target: str, parameters: Sequence[npt.NDArray[Any]]) -> LoadedProgram:
        """Loads a compiled program with its parameters."""

    def load_model(self, folder: Path) -> LoadedModel:
        """Loads a compiled model."""

    def describe_device(self) -> Device | None:
        """Returns the machine after something was loaded on it; None for this machine."""

    def close(self) -> None:
        """Gives the machine back."""


class LocalExecutor:
    """Runs code on this machine; on the CPU, `unwritten` poisons the memory of outputs before each call."""

    emulates = False

    def __init__(self, processors: Processors = THIS_MACHINE) -> None:
        self._processors = processors

    def run_problem(self, target: str) -> str | None:
        """Returns the reason why this machine cannot run code for a target, or None."""
        return TARGETS[target].run_problem(self._processors)

    def load_program(self, library: Path, target: str, parameters: Sequence[npt.NDArray[Any]]) -> Executable:
        """Loads a compiled program with its parameters."""
        from harness.compiler.execution.unwritten import poison_allocation
        from harness.runtime.executable import Executable

        instrument = poison_allocation if target == HOST.name else None
        return Executable(library, TARGETS[target].device(), parameters, instrument)

    def load_model(self, folder: Path) -> Artifact:
        """Loads a compiled model."""
        from harness.runtime.artifact import Artifact

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
        self._device: Device | None = None

    def run_problem(self, target: str) -> str | None:
        """Returns the reason why the device cannot run code for a target, or None.

        Raises:
            DeviceLostError: The device does not answer.
        """
        return self._open().description.problem(target, self._processors)

    def load_program(self, library: Path, target: str, parameters: Sequence[npt.NDArray[Any]]) -> RemoteExecutable:
        """Loads a compiled program with its parameters on the device."""
        from harness.compiler.execution.remote.client import RemoteExecutable

        self._target = target
        return RemoteExecutable(self._open(), library, target, parameters)

    def load_model(self, folder: Path) -> RemoteArtifact:
        """Loads a compiled model."""
        from harness.compiler.execution.remote.client import RemoteArtifact

        artifact = RemoteArtifact(self._open(), folder)
        self._target = artifact.manifest.target
        return artifact

    def describe_device(self) -> Device | None:
        """Returns the device and the bytes sent to it, once a session began."""
        if self._session is not None:
            self._device = self._describe(self._session)
        return self._device

    def close(self) -> None:
        """Ends the session, if there is one."""
        if self._session is not None:
            self._device = self._describe(self._session)
            self._session.close()
            self._session = None

    def _describe(self, session: DeviceSession) -> Device:
        description = session.description
        return Device(
            name=description.name,
            cpu=description.cpu,
            hardware=description.hardware.get(self._target, ""),
            target=self._target,
            system=description.system,
            architecture=description.architecture,
            threads=description.threads,
            address=self._remote.address,
            sent_bytes=session.sent_bytes,
        )

    def _open(self) -> DeviceSession:
        from harness.compiler.execution.remote.client import DeviceSession

        if self._session is None:
            self._session = DeviceSession(self._remote)
        return self._session


def create_executor(settings: Settings) -> Executor:
    """Returns the executor of a case with these settings: this machine or the remote device."""
    if settings.remote is None:
        return LocalExecutor(settings.processors)
    return RemoteExecutor(settings.remote, settings.processors)
