"""Connects to a device with TVM's RPC client, sends missing files, and runs compiled code there."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from harness.core.errors import HarnessError
from harness.core.processors import Remote
from harness.core.program import Array
from harness.runtime.artifact import Tensors, check_inputs
from harness.runtime.decoding import convert, decode
from harness.runtime.errors import ModelError
from harness.runtime.manifest import MANIFEST, OPTIONAL, read_manifest
from harness.runtime.weights import check_files

if TYPE_CHECKING:
    from tvm import rpc

    from harness.compiler.execution.remote.device import Description


Value = TypeVar("Value")

WAIT_SECONDS = 30.0
"""Seconds without an answer after which a device is lost; a crashed server is started again within them."""
BUSY_SECONDS = 60.0
"""Seconds that the first request to a device may wait for another client's session."""
PART_BYTES = 16 << 20
"""Bytes of a file that are sent in one call."""


class DeviceLostError(ModelError):
    """No device answers, or a session ended early; usually not the fault of the code that ran."""


class RemoteError(Exception):
    """An error of code that ran on a device, with the message of the error there."""


def describe_remote(remote: Remote) -> Description:
    """Asks a device for its description, before any work.

    Raises:
        DeviceLostError: No device answers, or it serves another client for longer than `BUSY_SECONDS`.
        HarnessError: It is no device of this version, or TVM is not installed here.
    """
    answer: Future[Description] = Future()

    def ask() -> None:
        try:
            with closing(DeviceSession(remote, wait=0)) as session:
                answer.set_result(session.description)
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()  # TVM's client waits for ever for an answer
    try:
        return answer.result(BUSY_SECONDS)
    except TimeoutError:
        raise DeviceLostError(
            f"{remote} did not answer for {BUSY_SECONDS:g} s: it serves another client, or is no sam3-tvm serve-device"
        ) from None


@dataclass(frozen=True)
class _Described:
    """The part of a device's description that every version has; the others are understood if versions are equal."""

    versions: Mapping[str, str] = field(default_factory=dict)


class DeviceSession:
    """A session on a device, to be closed.

    Attributes:
        description: The machine.
        rpc: TVM's session; None once it has ended.
        sent_bytes: Bytes of weights and libraries that had to be sent, so far.
    """

    def __init__(self, remote: Remote, wait: float = WAIT_SECONDS) -> None:
        """Begins a session, once the device serves no other client.

        Args:
            remote: The device.
            wait: Seconds to keep trying while no device answers.

        Raises:
            DeviceLostError: No device answers.
            HarnessError: It is no device of this version, or TVM is not installed here.
        """
        if find_spec("tvm") is None:
            raise HarnessError("--remote needs TVM, which is not installed here: pip install 'sam3-tvm[device]'")
        self._remote = remote
        self.sent_bytes = 0
        self.rpc: rpc.RPCSession | None = _connect(remote, wait)
        try:
            self.description = self._describe()
        except HarnessError:
            self.close()
            raise

    def _describe(self) -> Description:
        from harness.compiler.execution.remote.device import Description, own_versions

        try:
            answer = self.ask("describe")
        except AttributeError as error:
            raise HarnessError(
                f"{self._remote} is TVM's RPC server alone: start sam3-tvm serve-device instead"
            ) from error
        versions = self._convert(answer, _Described).versions
        if versions != own_versions():
            device_text, own_text = (", ".join(map(" ".join, pairs.items())) for pairs in (versions, own_versions()))
            raise HarnessError(
                f"the device {self._remote} has {device_text}, and this machine {own_text}: install the same versions"
            )
        return self._convert(answer, Description)

    def _convert(self, answer: str, kind: type[Value]) -> Value:
        """Makes a value of a type from an answer in JSON.

        Raises:
            HarnessError: The answer has another form.
        """
        try:
            return convert(decode(str(answer)), kind)
        except ValueError as error:
            raise HarnessError(
                f"an answer of the device {self._remote} cannot be understood ({error}): start serve-device there again"
            ) from error

    def close(self) -> None:
        """Ends the session, even if its tensors are still referenced."""
        with suppress(Exception):  # nobody is left to answer
            self.ask("end")
        self.rpc = None

    def ask(self, name: str, *arguments: Any) -> Any:
        """Calls a function of `harness.compiler.execution.remote.device`.

        Raises:
            RemoteError: The function raised.
            DeviceLostError: The session ended.
        """
        with self.translate_errors() as session:
            return session.get_function(f"sam3_tvm.{name}")(*arguments)

    @contextmanager
    def translate_errors(self) -> Iterator[rpc.RPCSession]:
        """Yields TVM's session, and tells errors of called code from errors of the session itself.

        Raises:
            RemoteError: The called code raised.
            DeviceLostError: The session ended.
        """
        from tvm.error import RPCError, RPCSessionTimeoutError

        if self.rpc is None:
            raise DeviceLostError(f"the session on {self._remote} has ended: run the command again")
        try:
            yield self.rpc
        except RuntimeError as error:
            if isinstance(error, RPCError) and not isinstance(error, RPCSessionTimeoutError):
                raise RemoteError(str(error).partition("\n")[2]) from error
            self.rpc = None
            raise DeviceLostError(
                f"the session on {self._remote} ended before its work was done ({_reason(error)}): see what "
                "sam3-tvm serve-device printed there"
            ) from error

    def load(self, contents: Mapping[str, Array], **request: Any) -> Callable[..., Any]:
        """Sends the files that the device lacks, and loads code and weights there.

        Args:
            contents: The files as bytes, uint8 [n], by their SHA-256.
            request: The fields of `load` in `harness.compiler.execution.remote.device`.

        Raises:
            RemoteError: The device cannot write or load them.
            DeviceLostError: The session ended.
            HarnessError: An answer of the device cannot be understood.
        """
        sizes = {digest: content.size for digest, content in contents.items()}
        missing = set(self._convert(self.ask("missing", json.dumps(sizes)), list[str]))
        for digest in (digest for digest in contents if digest in missing):
            content = contents[digest]
            for offset in range(0, max(content.size, 1), PART_BYTES):
                self.ask("receive", digest, content.size, offset, content[offset : offset + PART_BYTES].tobytes())
            self.sent_bytes += content.size
        function: Callable[..., Any] = self.ask("load", json.dumps(request))
        return function

    def run(
        self, function: Callable[..., Any], entry: str, inputs: Sequence[Array | RemoteTensor]
    ) -> list[RemoteTensor]:
        """Runs an entry point of loaded code; returns its results, which stay on the device.

        Raises:
            RemoteError: The entry point raised.
            DeviceLostError: The session ended.
        """
        specs = json.dumps([(str(value.dtype), value.shape) for value in inputs])
        values = [x.reference if isinstance(x, RemoteTensor) else np.ascontiguousarray(x).tobytes() for x in inputs]
        with self.translate_errors():
            results = function(entry, specs, *values)
        return [RemoteTensor(self, reference) for reference in self.items(results)]

    def items(self, array: Any) -> list[Any]:
        """Returns the elements of an array of TVM's on the device."""
        with self.translate_errors() as session:
            item, size = (session.get_function(f"ffi.Array{name}") for name in ("GetItem", "Size"))
            return [item(array, index) for index in range(size(array))]


class RemoteTensor:
    """A tensor in a session on a device; the device frees it when this object is deleted.

    Attributes:
        reference: The array with this tensor on the device.
        shape, dtype: Shape and name of the dtype, as in NumPy.
    """

    def __init__(self, session: DeviceSession, reference: Any) -> None:
        self._session, self.reference = session, reference
        (self._tensor,) = session.items(reference)
        self.shape, self.dtype = tuple(self._tensor.shape), str(self._tensor.dtype)

    def numpy(self) -> Array:
        """Returns the tensor's values.

        Raises:
            DeviceLostError: The session ended.
        """
        with self._session.translate_errors():
            values: Array = self._tensor.numpy()
            return values


class RemoteExecutable:
    """A compiled component on a device, with the interface of `harness.runtime.executable.Executable`."""

    def __init__(self, session: DeviceSession, library: Path, target: str, parameters: Sequence[Array]) -> None:
        """Sends the files that the device lacks, and loads the component there.

        Args:
            session: The session to load it in.
            library: Written by `harness.compiler.targets.compiling.compile_module`.
            target: Name of the target that it was compiled for.
            parameters: Values of the parameters of `main` after its inputs, in order.

        Raises:
            RemoteError: The device cannot run it.
            DeviceLostError: The session ended.
        """
        weights = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in parameters]
        contents = [np.fromfile(library, np.uint8), *weights]
        code, *digests = [hashlib.sha256(content.data).hexdigest() for content in contents]
        self._session = session
        self._function = session.load(
            dict(zip((code, *digests), contents, strict=True)),
            files={library.name: code},
            library=library.name,
            target=target,
            parameters=[(digest, str(a.dtype), a.shape) for digest, a in zip(digests, parameters, strict=True)],
        )

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """Runs the component once and returns its outputs in order.

        Raises:
            RemoteError: The component raised.
            DeviceLostError: The session ended.
        """
        return [result.numpy() for result in self._session.run(self._function, "main", inputs)]


class RemoteArtifact:
    """A compiled model in a session on a device, with the interface of `harness.runtime.artifact.Artifact`.

    Tensors stay there until they are fetched.

    Attributes:
        folder: The model's folder on this machine.
        manifest: The model's manifest.
    """

    def __init__(self, session: DeviceSession, folder: Path) -> None:
        """Sends the files that the device lacks, and loads the model there; only file sizes are checked here.

        Raises:
            ArtifactError: The folder is no artifact, incomplete, or of another version.
            RemoteError: The device cannot run the model, or it is damaged.
            DeviceLostError: The session ended.
        """
        self.folder = folder
        self.manifest = read_manifest(folder)
        check_files(folder, self.manifest.files, contents=False)
        files = {name: file.sha256 for name, file in self.manifest.files.items() if name not in OPTIONAL}
        self._session = session
        self._function = session.load(
            {digest: np.memmap(folder / name, np.uint8, "r") for name, digest in files.items()},
            files=files,
            target=self.manifest.target,
            manifest=(folder / MANIFEST).read_text(encoding="utf-8"),
        )

    def call(self, entry: str, **inputs: Any) -> Tensors:
        """Calls an entry point and returns its results by name, as `Artifact.call` does.

        Raises:
            ModelError: An input is missing, has another shape or dtype than the manifest says, or an index is out of
                range.
            RemoteError: The entry point raised.
            DeviceLostError: The session ended.
        """
        signature = self.manifest.entries[entry]
        check_inputs(entry, signature, inputs, self.fetch)
        results = self._session.run(self._function, entry, [inputs[spec.name] for spec in signature.inputs])
        return {spec.name: tensor for spec, tensor in zip(signature.outputs, results, strict=True)}

    def fetch(self, tensor: RemoteTensor) -> Array:
        """Returns a tensor's values, on this machine."""
        return tensor.numpy()

    def reading_once(self, entry: str) -> AbstractContextManager[None]:
        """Does nothing: the device keeps the memory of its weights."""
        return nullcontext()


def _connect(remote: Remote, wait: float) -> rpc.RPCSession:
    from tvm import rpc

    deadline = time.monotonic() + wait
    while True:
        try:
            return rpc.connect(remote.host, remote.port, session_timeout=remote.seconds)
        except RuntimeError as error:
            if time.monotonic() >= deadline:
                raise DeviceLostError(
                    f"no device answers at {remote} ({_reason(error)}): start sam3-tvm serve-device on it, and the SSH "
                    "tunnel to it, see docs/prove/remote.md"
                ) from error
        time.sleep(0.5)


def _reason(error: Exception) -> str:
    """Returns the end of the last line of an error of TVM's."""
    return str(error).strip().rpartition("\n")[2].rpartition(" is false: ")[2]
