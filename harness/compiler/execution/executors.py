"""What runs a case: this machine, or a device elsewhere; the stages are the same."""

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
        """Runs it once; the outputs come back in order."""


class Executor(Protocol):
    """Runs what was compiled here, on a machine that it knows.

    Attributes:
        emulates: Whether it runs a GPU's kernels on the CPU of this machine, from their source.
    """

    emulates: bool

    def run_problem(self, target: str) -> str | None:
        """Returns the reason why it cannot run code that was compiled here for a target, or None."""

    def executable(self, library: Path, target: str, parameters: Sequence[npt.NDArray[Any]]) -> LoadedProgram:
        """Loads a compiled program with its parameters."""

    def model(self, folder: Path) -> LoadedModel:
        """Loads a compiled model."""

    def device(self) -> Device | None:
        """Returns the machine, once something was loaded, if it is not this one."""

    def close(self) -> None:
        """Gives the machine back."""


class LocalExecutor:
    """Runs code on this machine; on the CPU `unwritten` fills what it is to write before."""

    emulates = False

    def __init__(self, processors: Processors = THIS_MACHINE) -> None:
        self._processors = processors

    def run_problem(self, target: str) -> str | None:
        """See `Executor`."""
        return TARGETS[target].run_problem(self._processors)

    def executable(self, library: Path, target: str, parameters: Sequence[npt.NDArray[Any]]) -> Executable:
        """See `Executor`."""
        from harness.compiler.execution.unwritten import fill_allocated
        from harness.runtime.executable import Executable

        instrument = fill_allocated if target == HOST.name else None
        return Executable(library, TARGETS[target].device(), parameters, instrument)

    def model(self, folder: Path) -> Artifact:
        """See `Executor`."""
        from harness.runtime.artifact import Artifact

        return Artifact.load(folder)

    def device(self) -> None:
        """See `Executor`."""

    def close(self) -> None:
        """See `Executor`."""


class RemoteExecutor:
    """Runs code on a device, in a session that begins when something was compiled for it."""

    emulates = False

    def __init__(self, remote: Remote, processors: Processors = THIS_MACHINE) -> None:
        self._remote = remote
        self._processors = processors
        self._session: DeviceSession | None = None
        self._target = ""
        self._device: Device | None = None

    def run_problem(self, target: str) -> str | None:
        """Returns why the device cannot run it, or None.

        Raises:
            DeviceLostError: It is gone.
        """
        return self._opened().description.problem(target, self._processors)

    def executable(self, library: Path, target: str, parameters: Sequence[npt.NDArray[Any]]) -> RemoteExecutable:
        """See `Executor`."""
        from harness.compiler.execution.remote.client import RemoteExecutable

        self._target = target
        return RemoteExecutable(self._opened(), library, target, parameters)

    def model(self, folder: Path) -> RemoteArtifact:
        """See `Executor`."""
        from harness.compiler.execution.remote.client import RemoteArtifact

        artifact = RemoteArtifact(self._opened(), folder)
        self._target = artifact.manifest.target
        return artifact

    def device(self) -> Device | None:
        """See `Executor`."""
        if self._session is not None:
            self._device = self._described(self._session)
        return self._device

    def close(self) -> None:
        """See `Executor`."""
        if self._session is not None:
            self._device = self._described(self._session)
            self._session.close()
            self._session = None

    def _described(self, session: DeviceSession) -> Device:
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

    def _opened(self) -> DeviceSession:
        from harness.compiler.execution.remote.client import DeviceSession

        if self._session is None:
            self._session = DeviceSession(self._remote)
        return self._session


def executor_for(settings: Settings) -> Executor:
    """Returns what runs a case with these settings."""
    if settings.remote is None:
        return LocalExecutor(settings.processors)
    return RemoteExecutor(settings.remote, settings.processors)
