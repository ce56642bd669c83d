"""Serves this machine's devices with TVM's RPC server, whose sessions offer a few functions of this project.

TVM's server forks a process for each session, one session after another. In it these functions can be called:

    sam3_tvm.describe() → description of the machine, as JSON
    sam3_tvm.missing(sizes by digest, as JSON) → digests of the files that are not in the store, as JSON
    sam3_tvm.receive(digest, size, offset, part of a file)
    sam3_tvm.load(request, as JSON) → function(entry point, inputs as JSON, …) → array of references to the results
    sam3_tvm.open_library(name of an uploaded file) → module
    sam3_tvm.end()

A reference is an array of TVM's with one tensor, which stays on the device. An input is such a reference, or bytes with
dtype and shape in the JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import numpy as np
import tvm
import tvm_ffi
from tvm import rpc

from harness import __version__
from harness.compiler.targets import TARGETS
from harness.compiler.targets.llvm import required_cpu
from harness.core.errors import HarnessError
from harness.core.files import explain_write_errors, make_folder, prune_files, temporary_folder, temporary_name
from harness.core.machine import describe_machine, versions
from harness.core.processes.threads import set_variable
from harness.core.processors import Processors
from harness.runtime.artifact import Artifact
from harness.runtime.cpu import cpu_features, this_platform
from harness.runtime.decoding import Count, convert, decode
from harness.runtime.errors import ModelError
from harness.runtime.executable import Executable
from harness.runtime.loading import open_library
from harness.runtime.manifest import MANIFEST
from harness.runtime.weights import file_digest

STORE_BYTES = 20 << 30
"""Bytes of files that a device keeps, those that were used last; the full model's weights are 3.5 GB."""


@dataclass(frozen=True)
class Description:
    """The capabilities of a device that serves.

    Attributes:
        name: Its host name.
        cpu: Model of its processor.
        system, architecture: `Linux` or `macOS`, and `x86_64` or `aarch64`.
        mcpu: LLVM's name of the CPU to compile for.
        features: Instruction sets of the CPU, in LLVM's spelling; empty if the system does not list them.
        cuda_arch: Architecture to compile CUDA kernels for; empty without an NVIDIA GPU.
        threads: Number of threads that it runs on.
        problems: For each target that it cannot run, the reason.
        hardware: For each target that it can run, the name of the processor or GPU.
        versions: Versions of the packages that must be the same on both machines.
    """

    name: str
    cpu: str
    system: str
    architecture: str
    mcpu: str
    features: Sequence[str]
    cuda_arch: str
    threads: int
    problems: Mapping[str, str]
    hardware: Mapping[str, str]
    versions: Mapping[str, str]

    @property
    def processors(self) -> Processors:
        """Returns the processors to compile for, without LLVM's name `generic` of another architecture."""
        cpu = None if self.mcpu == "generic" and self.architecture != this_platform()[1] else self.mcpu
        return Processors(cpu, self.cuda_arch or None)

    def problem(self, target: str, processors: Processors) -> str | None:
        """Returns why the device cannot run code that is compiled here for a target and processors, or None."""
        if target in self.problems:
            return f"the device {self.name} cannot run {target}: {self.problems[target]}"
        compiled_for = TARGETS[target].tvm_target(processors)
        cpu, required_features = required_cpu(compiled_for.host or compiled_for)
        if self.features and (missing := [name for name in required_features if name not in self.features]):
            return f"the device {self.name} lacks {', '.join(missing)}, which code for {cpu} uses: leave out --cpu"
        return None

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.name}: {self.cpu}, {self.system} on {self.architecture}, {threads}"


Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
"""The SHA-256 of a file, its name in the store."""
ArrayForm = tuple[str, tuple[Count, ...]]
"""The dtype and the shape of an array."""


@dataclass(frozen=True)
class LoadRequest:
    """A request to load a compiled model, or a library with its parameters.

    Attributes:
        target: Name of the target that it was compiled for.
        files: The files of its folder.
        manifest: The manifest of a model, as JSON.
        library: The library's name among the files.
        parameters: The file, dtype and shape of each parameter of the library.
    """

    target: str
    files: Mapping[Annotated[str, msgspec.Meta(pattern=r"^[^/\0]+\Z")], Digest]
    manifest: str | None = None
    library: str = ""
    parameters: Sequence[tuple[Digest, str, tuple[Count, ...]]] = ()


def own_versions() -> dict[str, str]:
    """Returns the versions of this installation that must be the same on the other machine."""
    return {"sam3-tvm": __version__, "apache-tvm": str(versions()["apache-tvm"])}


def describe() -> Description:
    """Returns the description of this machine, after loading TVM and the available drivers."""
    from harness.compiler.targets.cuda import architecture_of
    from harness.compiler.targets.llvm import cpu_name

    machine = describe_machine()
    run_problems = {name: target.run_problem() for name, target in TARGETS.items()}
    devices = {name: target.device() for name, target in TARGETS.items() if run_problems[name] is None}
    return Description(
        platform.node(),
        machine["cpu"],
        *this_platform(),
        mcpu=cpu_name(),
        features=sorted(cpu_features() or ()),
        cuda_arch=architecture_of(devices["cuda"]) if "cuda" in devices else "",
        threads=machine["threads"],
        problems={name: problem for name, problem in run_problems.items() if problem is not None},
        hardware={name: str(device.device_name or machine["cpu"]) for name, device in devices.items()},
        versions=own_versions(),
    )


def serve(host: str, port: int, store: Path, report: Callable[[str], None]) -> NoReturn:
    """Serves until it is interrupted; a session that crashes ends TVM's server, which is started again.

    Args:
        host: Address to listen at, of loopback.
        port: Port to listen on.
        store: Folder for the files that clients send.
        report: Takes a sentence about each event.

    Raises:
        HarnessError: The port or the folder cannot be used.
        KeyboardInterrupt: The user ended it.
    """
    make_folder(store)
    description = describe()
    report(str(description))
    for name in TARGETS:
        report(f"  {name}: {description.hardware.get(name) or f'no, {description.problems[name]}'}")
    prepare = partial(_prepare, store.resolve(), json.dumps(asdict(description)))
    with temporary_folder("device") as folder, set_variable("TMPDIR", str(folder)):
        while True:
            try:
                server = rpc.Server(host, port, port + 1, server_init_callback=prepare)
            except Exception as error:
                reason = str(error).strip().rpartition("\n")[2]
                raise HarnessError(f"TVM's RPC server does not start ({reason}): give another --port") from error
            try:
                report(f"Serving at {host}, port {port}.")
                server.proc.join()
            finally:
                server.terminate()
            report("A session ended badly, and TVM's server with it: it is started again.")


def _prepare(store: Path, description: str) -> None:
    """Registers the functions in the process of TVM's server, whose sessions are forks of it."""
    multiprocessing.set_start_method("fork")  # the default on Linux
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all, and the first process ends the others
    threading.excepthook = _end_server
    _end_with_parent()
    os.register_at_fork(after_in_child=_end_with_parent)
    functions: dict[str, Callable[..., Any]] = {
        "describe": lambda: description,
        "missing": partial(_missing, store),
        "receive": partial(_receive, store),
        "load": partial(_load, store),
        "open_library": lambda name: open_library(Path.cwd() / name),
        "end": lambda: os._exit(0),
    }
    for name, function in functions.items():
        tvm.register_global_func(f"sam3_tvm.{name}", function)


def _end_server(failure: threading.ExceptHookArgs) -> None:
    """Ends the process after a failed session, because TVM's server keeps its port and stops listening."""
    print(f"TVM's server ends: {failure.exc_value}", file=sys.stderr, flush=True)
    os._exit(1)


def _end_with_parent() -> None:
    """Ends this process within a second of its parent."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _missing(store: Path, sizes: str) -> str:
    """Returns the names of absent files as JSON; marks the present files as recently used."""
    with _explain_requests():
        sizes_by_name = convert(decode(sizes), dict[Digest, Count])
    present = [
        name
        for name in sizes_by_name
        if (store / name).is_file() and (store / name).stat().st_size == sizes_by_name[name]
    ]
    for name in present:
        os.utime(store / name)
    return json.dumps([name for name in sizes_by_name if name not in present])


def _receive(store: Path, digest: str, size: int, offset: int, part: bytes) -> None:
    """Appends a part to a file, which gets its name when it is complete and its checksum is right."""
    with _explain_requests():
        path = store / convert(digest, Digest)
    partial_file = temporary_name(path)
    with explain_write_errors(store, "free some space on the device, or give serve-device another --store"):
        with partial_file.open("ab" if offset else "wb") as file:
            file.write(part)
        if offset + len(part) < size:
            return
        received_digest = file_digest(partial_file).sha256
        if received_digest != digest:
            partial_file.unlink()
            raise ModelError(f"{digest} arrived as {received_digest}: run it again")
        partial_file.replace(path)
    prune_files(STORE_BYTES, store.iterdir(), path)


def _load(store: Path, request: str) -> Callable[..., Any]:
    """Loads a compiled model, or a library with its parameters, from the store; returns a function that runs it."""
    with _explain_requests():
        load = convert(decode(request), LoadRequest)
        if load.manifest is None and load.library not in load.files:
            raise ValueError(f"{load.library!r} is none of its files")
        device = TARGETS[load.target].device()
        folder = Path(tempfile.mkdtemp(dir=Path.cwd()))  # TVM's server removes the folder of the session with it
        if load.manifest is not None:
            (folder / MANIFEST).write_text(load.manifest, encoding="utf-8")
        for name, digest in load.files.items():
            (folder / name).symlink_to(store / digest)
        weights = [np.fromfile(store / digest, dtype).reshape(shape) for digest, dtype, shape in load.parameters]
    if load.manifest is not None:
        artifact = Artifact.load(folder, check=False)  # files were checked when they arrived

        def call(entry: str, tensors: Sequence[Any]) -> Sequence[Any]:
            with _explain_requests():
                names = [spec.name for spec in artifact.manifest.entries[entry].inputs]
                inputs = dict(zip(names, tensors, strict=True))
            return list(artifact.call(entry, **inputs).values())
    else:
        with _explain_requests():
            executable = Executable(folder / load.library, device, weights)

        def call(entry: str, tensors: Sequence[Any]) -> Sequence[Any]:
            return [tvm.runtime.tensor(result) for result in executable.run(tensors)]

    def tensor(value: Any, form: ArrayForm) -> Any:
        if not isinstance(value, bytes):
            return value[0]
        return tvm.runtime.tensor(np.frombuffer(value, form[0]).reshape(form[1]), device)

    def run(entry: str, forms: str, *values: Any) -> Any:
        with _explain_requests():
            arrays = zip(values, convert(decode(forms), list[ArrayForm]), strict=True)
            tensors = [tensor(value, form) for value, form in arrays]
        return tvm_ffi.Array([tvm_ffi.Array([result]) for result in call(entry, tensors)])

    return run


@contextmanager
def _explain_requests() -> Iterator[None]:
    """Turns the errors of reading a request into a sentence.

    Raises:
        ModelError: The request cannot be understood.
    """
    try:
        yield
    except (KeyError, OSError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"the device cannot understand the request ({reason}): run it again") from error
