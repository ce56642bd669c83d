"""The process of one session on a device: it answers TVM's RPC, and keeps what the client loads.

The server starts it before there is a client, so that TVM is loaded by then, and hands it the client's connection. A
crash ends this session alone. Besides what TVM's own server offers (uploading into a folder that is removed with the
session, loading a module from there), these functions can be called, with text, numbers and bytes:

    sam3_tvm.describe() → the machine
    sam3_tvm.missing(sizes by digest) → digests of the files that are not in the device's store
    sam3_tvm.receive(digest, size, offset, part)
    sam3_tvm.load(what) → number of a library or model that is loaded from the store; sam3_tvm.unload(numbers)
    sam3_tvm.input(shape, dtype, bytes) → number of a tensor
    sam3_tvm.call(number of what was loaded, function, numbers of tensors, whether its weights are read once)
        → numbers of its results, and seconds
    sam3_tvm.fetch(number of a tensor) → shape and dtype; then sam3_tvm.bytes(number) → its values
    sam3_tvm.release(numbers of tensors)

Answers are JSON, `{"error": {"type", "message", "details"}}` where something failed: an error stays an error of the
case, told apart from a session that ended.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.processors import Processors
from harness.execution.remote.description import DESCRIBE, describe
from harness.execution.remote.store import Store
from harness.processes.child import die_with_parent
from harness.processes.threads import configure_threads
from harness.runtime.artifact import Artifact
from harness.runtime.devices import to_numpy
from harness.runtime.executable import Executable
from harness.runtime.loading import open_library
from harness.runtime.manifest import MANIFEST

PREFIX = "sam3_tvm."


class Session:
    """The libraries and models that the client has loaded, and the tensors that it holds, by number."""

    def __init__(self, work: Path, store: Store, description: str) -> None:
        """Begins without anything loaded.

        Args:
            work: Folder of this session.
            store: What the device keeps.
            description: The machine, as JSON.
        """
        self._work = work
        self._store = store
        self._description = description
        self._loaded: dict[int, Callable[[str, Sequence[Any], bool], Sequence[Any]]] = {}
        self._tensors: dict[int, Any] = {}
        self._made = 0

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Returns what can be called from the other end, by name."""
        answering: dict[str, Callable[..., Any]] = {
            "describe": lambda: json.loads(self._description),
            "missing": lambda sizes: self._store.missing(json.loads(sizes)),
            "receive": self._store.receive,
            "load": lambda what: self._load(json.loads(what)),
            "input": self._input,
            "unload": self._unload,
            "call": self._call,
            "fetch": self._fetch,
            "release": self._release,
        }
        return {f"{PREFIX}{name}": _answering(function) for name, function in answering.items()} | {
            f"{PREFIX}bytes": lambda number: self._tensors[number].tobytes(),
            # As TVM's own server has them; uploading relies on the first.
            "tvm.rpc.server.workpath": lambda name: str(self._work / name),
            "tvm.rpc.server.load_module": self._load_module,
        }

    def _load_module(self, name: str) -> Any:
        return open_library(self._work / name)

    def _load(self, what: Mapping[str, Any]) -> int:
        self._made += 1
        number = self._made
        folder = self._work / f"loaded-{number}"
        folder.mkdir()
        for name, digest in what["files"].items():
            (folder / name).symlink_to(self._store.path(digest))
        if "manifest" in what:
            (folder / MANIFEST).write_text(what["manifest"], encoding="utf-8")
            # Files in the store were checked when they arrived.
            artifact = Artifact.load(folder, check=False)
            self._loaded[number] = partial(_entry, artifact)
        else:
            executable = self._executable(folder / what["library"], what["target"], what["parameters"])
            self._loaded[number] = lambda _function, tensors, _reading_once: executable.run(tensors)
        return number

    def _unload(self, numbers: str) -> None:
        for number in json.loads(numbers):
            self._loaded.pop(number, None)
        gc.collect()  # before the next one is loaded, which may not fit beside it

    def _executable(
        self, library: Path, target: str, parameters: Sequence[tuple[str, str, Sequence[int]]]
    ) -> Executable:
        from harness.targets import TARGETS

        arrays = [_mapped(self._store.path(digest), dtype, tuple(shape)) for digest, dtype, shape in parameters]
        return Executable(library, TARGETS[target].device(), arrays)

    def _input(self, shape: str, dtype: str, values: bytes) -> int:
        return self._add(np.frombuffer(bytearray(values), dtype).reshape(json.loads(shape)))

    def _call(self, loaded: int, function: str, arguments: str, reading_once: int) -> dict[str, Any]:
        tensors = [self._tensors[number] for number in json.loads(arguments)]
        start = time.perf_counter()
        results = self._loaded[loaded](function, tensors, bool(reading_once))
        return {"seconds": time.perf_counter() - start, "results": [self._add(result) for result in results]}

    def _fetch(self, number: int) -> tuple[Sequence[int], str]:
        array = to_numpy(self._tensors[number])
        self._tensors[number] = array
        return array.shape, str(array.dtype)

    def _release(self, numbers: str) -> None:
        for number in json.loads(numbers):
            self._tensors.pop(number, None)

    def _add(self, tensor: Any) -> int:
        self._made += 1
        self._tensors[self._made] = tensor
        return self._made


def _entry(artifact: Artifact, entry: str, tensors: Sequence[Any], reading_once: bool) -> Sequence[Any]:
    names = (spec.name for spec in artifact.manifest.entries[entry].inputs)
    with artifact.reading_once(entry) if reading_once else nullcontext():
        return list(artifact.call(entry, **dict(zip(names, tensors, strict=True))).values())


def _mapped(path: Path, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Maps a file as an array; what is written to it stays in this process."""
    if not path.stat().st_size:
        return np.empty(shape, dtype)
    array: npt.NDArray[Any] = np.memmap(path, dtype, "c", shape=shape or (1,)).view(np.ndarray).reshape(shape)
    return array


def _answering(function: Callable[..., Any]) -> Callable[..., str]:
    def answer(*arguments: Any) -> str:
        try:
            return json.dumps({"value": function(*arguments)})
        except Exception as error:
            details = "".join(traceback.format_exception(error))[-8000:]
            return json.dumps({"error": {"type": type(error).__name__, "message": str(error), "details": details}})

    return answer


def main(channel: socket.socket) -> None:
    """Waits for a client's connection from the server over `channel`, and serves it; ends when either of them ends."""
    import faulthandler

    import tvm
    import tvm_ffi

    faulthandler.enable()
    text, connections, _, _ = socket.recv_fds(channel, 1 << 20, 1)
    if text and not connections:
        processors = Processors(**json.loads(text)[DESCRIBE])
        channel.sendall(describe(processors).to_json().encode() + b"\n")
        text, connections, _, _ = socket.recv_fds(channel, 1 << 20, 1)
    if not connections:  # the server ended before there was a client
        return
    given = json.loads(text)
    session = Session(Path(given["work"]), Store(Path(given["store"])), given["description"])
    for name, function in session.functions().items():
        tvm.register_global_func(name, function, override=True)
    os.chdir(given["work"])
    tvm_ffi.get_global_func("rpc.ServerLoop")(connections[0])
    os._exit(0)


if __name__ == "__main__":
    die_with_parent()
    configure_threads(int(sys.argv[2]))
    main(socket.socket(fileno=int(sys.argv[1])))
