"""A session on a device, seen from the machine that compiles and judges.

It needs TVM's runtime library alone, as running a compiled model does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from harness.core.errors import HarnessError
from harness.core.remote import Remote
from harness.execution.remote.description import INFO, PROTOCOL, Description
from harness.execution.remote.entering import begun, require_proof
from harness.execution.remote.errors import DeviceLostError, RemoteError
from harness.execution.remote.handshake import RefusedError, TakenError
from harness.execution.remote.secret import read_secret
from harness.execution.remote.tracker import NobodyFreeError, Tracker, place_of
from harness.runtime.errors import Sam3Error
from harness.runtime.loading import LoadError, load_runtime
from harness.runtime.weights import file_digest

Array = npt.NDArray[Any]

PART_BYTES = 16 << 20
"""Bytes of a file that are sent at once."""
GONE_SECONDS = 5.0
"""How long no server may be registered before it is taken for lost: one that is started again needs that long."""
_ASK_SECONDS = 10.0
"""How long to wait for a free server before looking whether there is any."""


@dataclass(frozen=True, eq=False)
class Content:
    """The contents of a file on the device.

    Attributes:
        digest: SHA-256.
        size: Bytes.
        source: A file here, or the memory of an array.
    """

    digest: str
    size: int
    source: Path | Array

    @classmethod
    def of_file(cls, path: Path) -> Content:
        """Returns a file's content."""
        file = file_digest(path)
        return cls(file.sha256, file.bytes, path)

    @classmethod
    def of_array(cls, array: Array) -> Content:
        """Returns an array's values."""
        memory: Array = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return cls(hashlib.sha256(memory.data).hexdigest(), memory.nbytes, memory)

    def parts(self) -> Iterator[tuple[int, bytes]]:
        """Yields the offset and bytes of one part after the other; one part of no bytes if there are none."""
        if isinstance(self.source, Path):
            with self.source.open("rb") as file:
                for offset in range(0, max(self.size, 1), PART_BYTES):
                    yield offset, file.read(PART_BYTES)
        else:
            for offset in range(0, max(self.size, 1), PART_BYTES):
                yield offset, self.source[offset : offset + PART_BYTES].tobytes()


def registered(remote: Remote) -> Description:
    """Returns what the first of the devices that prove themselves told the tracker.

    Raises:
        RefusedError: None of the devices that answer shares the secret of this user.
        HarnessError: There is no secret, no tracker, no device with this key, none that answers, or only servers that
            are not `sam3-tvm serve-device`.
    """
    secret = read_secret(remote.secret_file)
    tracker = Tracker(remote.address, remote.key)
    tracker.require_workers()
    problem = HarnessError(
        f"the server {remote} is not one of this version's `sam3-tvm serve-device`, which proves who it is, keeps "
        f"weights and tells what it is: start it with sam3-tvm serve-device --tracker {remote.address} "
        f"--key {remote.key}"
    )
    for server in tracker.servers():
        told, place = server.get(INFO), place_of(server.get("addr"))
        if place is None or not isinstance(told, Mapping) or told.get("protocol") != PROTOCOL:
            continue
        host, port = place
        try:
            require_proof(host, port, secret)
        except RefusedError as error:
            problem = error
        except OSError as error:
            if not isinstance(problem, RefusedError):
                problem = HarnessError(
                    f"the device {remote} does not answer at {host}, port {port}, which it told the tracker "
                    f"({error.strerror or error}): it may listen on its own loopback, see docs/REMOTE.md"
                )
        else:
            with contextlib.suppress(TypeError):  # of another version
                return Description.of(told)
    raise problem


class DeviceSession:
    """A session on a device; use it in a `with` block.

    Attributes:
        remote: Where the device was found.
        description: The machine.
        sent_bytes: Bytes of weights and libraries that had to be sent, so far.
        lost: Whether it ended before it was closed.
    """

    def __init__(self, remote: Remote, gone_seconds: float = GONE_SECONDS) -> None:
        """Waits for a free device, and begins a session that lasts until it is closed.

        Args:
            remote: Where devices are found.
            gone_seconds: How long to wait for one where none is registered.

        Raises:
            DeviceLostError: There is none, or it is gone.
            RefusedError: It does not share the secret of this user.
            HarnessError: This user has no secret.
        """
        load_runtime()
        self.remote = remote
        self.sent_bytes = 0
        self.lost = False
        self._functions: dict[str, Any] = {}
        self._dropped: dict[str, list[int]] = {"release": [], "unload": []}
        self._lock = threading.RLock()
        self._session: Any = _connected(remote, gone_seconds)
        self.description = Description.of(self._ask("describe"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the session."""
        self._functions.clear()
        self._session = None

    def keep(self, contents: Sequence[Content]) -> None:
        """Makes sure that the device has these contents; what it lacks is sent.

        Raises:
            DeviceLostError: The session ended.
            Sam3Error: They cannot be written there.
        """
        known = {content.digest: content for content in contents}
        missing = self._ask("missing", json.dumps({digest: content.size for digest, content in known.items()}))
        for digest in missing:
            for offset, part in known[digest].parts():
                self._ask("receive", digest, known[digest].size, offset, part)
            self.sent_bytes += known[digest].size

    def load(self, what: Mapping[str, Any]) -> int:
        """Loads a library or a model whose files are there; returns its number. See `harness.execution.remote.session`.

        Raises:
            LoadError, Sam3Error: The device cannot run it, or it is damaged.
            RemoteError: Loading raised something else.
            DeviceLostError: The session ended.
        """
        self._tell_dropped("unload")
        return int(self._ask("load", json.dumps(what)))

    def put(self, array: Array) -> RemoteTensor:
        """Sends an array."""
        shape, dtype = tuple(array.shape), str(array.dtype)
        values = np.ascontiguousarray(array).tobytes()
        return RemoteTensor(self, int(self._ask("input", json.dumps(shape), dtype, values)), shape, dtype)

    def call(
        self, loaded: int, function: str, tensors: Sequence[RemoteTensor], *, reading_once: bool = False
    ) -> tuple[list[RemoteTensor], float]:
        """Calls a function of what was loaded; returns its results and the seconds that it took over there.

        Args:
            loaded: Number of what was loaded.
            function: Its name.
            tensors: Its arguments.
            reading_once: Whether a model's weights are given back as they are read.

        Raises:
            RemoteError: It raised.
            DeviceLostError: The session ended.
        """
        self._tell_dropped("release")
        numbers = json.dumps([tensor.number for tensor in tensors])
        done = self._ask("call", loaded, function, numbers, int(reading_once))
        results = []
        for number in done["results"]:
            shape, dtype = self._ask("fetch", number)
            results.append(RemoteTensor(self, number, tuple(shape), dtype))
        return results, float(done["seconds"])

    def fetch(self, tensor: RemoteTensor) -> Array:
        """Returns a tensor's values."""
        with self._calling():
            values: bytes = self._function("bytes")(tensor.number)
        return np.frombuffer(bytearray(values), tensor.dtype).reshape(tensor.shape)

    def drop(self, kind: str, number: int) -> None:
        """Notes that a tensor or what was loaded is not needed any more; the device is told with the next call.

        Args:
            kind: `release` or `unload`.
            number: Number of the tensor, or of what was loaded.
        """
        self._dropped[kind].append(number)

    def _tell_dropped(self, kind: str) -> None:
        numbers, self._dropped[kind] = self._dropped[kind], []
        if numbers:
            self._ask(kind, json.dumps(numbers))

    def _ask(self, name: str, *arguments: Any) -> Any:
        with self._calling():
            answer = json.loads(self._function(name)(*arguments))
            if "error" not in answer:
                return answer["value"]
            error = {key: str(answer["error"][key]) for key in ("type", "message", "details")}
        kinds: dict[str, type[Sam3Error]] = {"LoadError": LoadError, "Sam3Error": Sam3Error, "ArtifactError": Sam3Error}
        if error["type"] in kinds:
            raise kinds[error["type"]](f"{self._place()}: {error['message']}")
        raise RemoteError(error["type"], error["message"], error["details"])

    def _function(self, name: str) -> Any:
        if self._session is None:
            raise DeviceLostError(f"the session on {self._place()} has ended")
        if name not in self._functions:
            self._functions[name] = self._session.get_function(f"sam3_tvm.{name}")
        return self._functions[name]

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """Lets one call run at a time; only errors of the session itself arise here, all others are answers."""
        try:
            with self._lock:
                yield
        except (Sam3Error, AttributeError):
            raise
        except Exception as error:
            self.lost = True
            self.close()
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise DeviceLostError(
                f"the session on {self._place()} ended before its work was done: {lines[-1] if lines else error!r}"
            ) from error

    def _place(self) -> str:
        name = f"{self.description.name} " if hasattr(self, "description") else ""
        return f"{name}({self.remote})"


class RemoteTensor:
    """A tensor in a session on a device.

    Attributes:
        number: Its number in the session.
        shape, dtype: As NumPy has them.
    """

    def __init__(self, session: DeviceSession, number: int, shape: tuple[int, ...], dtype: str) -> None:
        self._session = session
        self.number = number
        self.shape = shape
        self.dtype = dtype

    def __del__(self) -> None:
        self._session.drop("release", self.number)


class RemoteExecutable:
    """A compiled component on a device, as `harness.runtime.executable.Executable` is one here."""

    def __init__(
        self,
        session: DeviceSession,
        library: Path,
        target: str,
        parameters: Sequence[Array],
        on_run: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """Sends what the device lacks, and loads it.

        Args:
            session: Where.
            library: Written by `harness.targets.compiling.compile_module`.
            target: Name of the target that it was compiled for.
            parameters: Values of everything that `main` takes after its inputs, in order.
            on_run: Called after each run with the seconds that it took over there.

        Raises:
            LoadError: The device cannot run it.
            DeviceLostError: The session ended.
        """
        code, weights = Content.of_file(library), [Content.of_array(array) for array in parameters]
        session.keep([code, *weights])
        described = [
            (content.digest, str(array.dtype), array.shape) for content, array in zip(weights, parameters, strict=True)
        ]
        files = {library.name: code.digest}
        self._session = session
        self._loaded = session.load(
            {"files": files, "library": library.name, "target": target, "parameters": described}
        )
        self._on_run = on_run

    def __del__(self) -> None:
        if hasattr(self, "_loaded"):
            self._session.drop("unload", self._loaded)

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """Runs it once, and returns the outputs in order.

        Raises:
            RemoteError: It raised.
            DeviceLostError: The session ended.
        """
        session = self._session
        results, seconds = session.call(self._loaded, "main", [session.put(array) for array in inputs])
        self._on_run(seconds)
        return [session.fetch(result) for result in results]


def _connected(remote: Remote, gone_seconds: float) -> Any:
    """Opens a session on a free device, and waits while others use them.

    Raises:
        DeviceLostError: No device is registered any more, or no tracker answers.
        RefusedError: It does not share the secret of this user.
    """
    import tvm_ffi

    secret = read_secret(remote.secret_file)
    tracker = Tracker(remote.address, remote.key)
    connect = tvm_ffi.get_global_func("rpc.Connect")
    well = time.monotonic()
    while True:
        problem = f"no device is registered as {remote}"
        try:
            if tracker.workers():
                host, port, match_key = tracker.request(_ASK_SECONDS)
                problem = f"the device {remote} does not answer at {host}, port {port}"
                return begun(host, port, match_key, secret, lambda *where: connect(*where, False))
        except RefusedError:
            raise
        except (NobodyFreeError, TakenError):  # others use them; whether they are still there, the next round tells
            well = time.monotonic()
        except HarnessError as error:
            problem = str(error)
        except Exception:  # it went away since, or cannot be reached
            pass
        if time.monotonic() - well > gone_seconds:
            raise DeviceLostError(f"{problem}: start it again with sam3-tvm serve-device")
        time.sleep(0.2)
