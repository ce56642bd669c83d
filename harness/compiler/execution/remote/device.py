"""Serves this machine's devices with TVM's RPC server, whose sessions offer a few functions of this project.

TVM's server forks a process for each session, one session after another. In it these functions can be called:

    sam3_tvm.describe() → what the machine is, as JSON
    sam3_tvm.missing(sizes by digest, as JSON) → digests of the files that are not in the store, as JSON
    sam3_tvm.receive(digest, size, offset, part of a file)
    sam3_tvm.load(what, as JSON) → function(entry point, inputs as JSON, …) → array of references to the results
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
from typing import Any, NoReturn

import numpy as np

from harness import __version__
from harness.compiler.targets import TARGETS
from harness.compiler.targets.compiling import required_cpu
from harness.core.errors import HarnessError
from harness.core.files import explain_write_errors, make_folder, prune_files, temporary_folder, temporary_name
from harness.core.machine import describe_machine, versions
from harness.core.processors import Processors
from harness.runtime.artifact import Artifact
from harness.runtime.cpu import cpu_features, this_platform
from harness.runtime.errors import ModelError
from harness.runtime.executable import Executable
from harness.runtime.loading import open_library
from harness.runtime.manifest import MANIFEST
from harness.runtime.weights import file_digest

STORE_BYTES = 20 << 30
"""Bytes of files that a device keeps, those that were used last; the full model's weights are 3.5 GB."""


@dataclass(frozen=True)
class Description:
    """The capabilities of a machine that serves.

    Attributes:
        name: Its host name.
        cpu: Model of its processor.
        system, architecture: `Linux` or `macOS`, and `x86_64` or `aarch64`.
        mcpu: LLVM's name of the CPU to compile for.
        features: Instruction sets of the CPU, in LLVM's spelling; empty where the system does not tell.
        cuda_arch: Architecture to compile CUDA kernels for; empty without an NVIDIA GPU.
        threads: Number of threads that it runs on.
        problems: For each target that it cannot run, the reason.
        hardware: For each target that it can run, the name of what runs it.
        versions: Versions of the packages that both ends must have alike.
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
        """What to compile for; LLVM's `generic` CPU is left out where it would mean another architecture's."""
        cpu = None if self.mcpu == "generic" and self.architecture != this_platform()[1] else self.mcpu
        return Processors(cpu, self.cuda_arch or None)

    def problem(self, target: str, processors: Processors) -> str | None:
        """Returns why the machine cannot run what is compiled here for a target and processors, or None."""
        if target in self.problems:
            return f"the device {self.name} cannot run {target}: {self.problems[target]}"
        compiled_for = TARGETS[target].tvm_target(processors)
        cpu, required = required_cpu(compiled_for.host or compiled_for)
        if self.features and (missing := [name for name in required if name not in self.features]):
            return f"the device {self.name} lacks {', '.join(missing)}, which code for {cpu} uses: leave out --cpu"
        return None

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.name}: {self.cpu}, {self.system} on {self.architecture}, {threads}"


def own_versions() -> dict[str, str]:
    """Returns the versions of this installation that the other end must have, too."""
    return {"sam3-tvm": __version__, "apache-tvm": str(versions()["apache-tvm"])}


def describe() -> Description:
    """Returns what this machine is; it loads TVM and what drivers there are."""
    from harness.compiler.targets.cuda import architecture_of
    from harness.compiler.targets.llvm import cpu_name

    machine = describe_machine()
    told = {name: target.run_problem() for name, target in TARGETS.items()}
    devices = {name: target.device() for name, target in TARGETS.items() if told[name] is None}
    return Description(
        platform.node(),
        machine["cpu"],
        *this_platform(),
        mcpu=cpu_name(),
        features=sorted(cpu_features() or ()),
        cuda_arch=architecture_of(devices["cuda"]) if "cuda" in devices else "",
        threads=machine["threads"],
        problems={name: problem for name, problem in told.items() if problem is not None},
        hardware={name: str(device.device_name or machine["cpu"]) for name, device in devices.items()},
        versions=own_versions(),
    )


def serve(host: str, port: int, store: Path, tell: Callable[[str], None]) -> NoReturn:
    """Serves until it is interrupted; a session that crashes ends TVM's server, which is started again.

    Args:
        host: Address to listen at, of loopback.
        port: Port to listen on.
        store: Folder for the files that clients send.
        tell: Called with a sentence for what happens.

    Raises:
        HarnessError: The port or the folder cannot be used.
        KeyboardInterrupt: The user ended it.
    """
    from tvm import rpc

    make_folder(store)
    description = describe()
    tell(str(description))
    for name in TARGETS:
        tell(f"  {name}: {description.hardware.get(name) or f'no, {description.problems[name]}'}")
    prepare = partial(_prepare, store.resolve(), json.dumps(asdict(description)))
    with temporary_folder("device") as folder, _temporary_files_in(folder):
        while True:
            try:
                server = rpc.Server(host, port, port + 1, server_init_callback=prepare)
            except Exception as error:
                reason = str(error).strip().rpartition("\n")[2]
                raise HarnessError(f"TVM's RPC server does not start ({reason}): give another --port") from error
            try:
                tell(f"Serving at {host}, port {port}.")
                server.proc.join()
            finally:
                server.terminate()
            tell("A session ended badly, and TVM's server with it: it is started again.")


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """Gives the processes that are started in the context a folder for temporary files; they are killed in the end."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def _prepare(store: Path, description: str) -> None:
    """Makes the functions known in the process of TVM's server, whose sessions are forks of it."""
    import tvm

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


def _end_server(raised: threading.ExceptHookArgs) -> None:
    """Ends the process: where a session ended badly, TVM's server does not listen any more, and keeps its port."""
    print(f"TVM's server ends: {raised.exc_value}", file=sys.stderr, flush=True)
    os._exit(1)


def _end_with_parent() -> None:
    """Ends this process within a second of the one that started it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _missing(store: Path, sizes: str) -> str:
    """Returns the files that are not there; the others become the ones that were used last."""
    wanted = json.loads(sizes)
    there = [name for name in wanted if (store / name).is_file() and (store / name).stat().st_size == wanted[name]]
    for name in there:
        os.utime(store / name)
    return json.dumps([name for name in wanted if name not in there])


def _receive(store: Path, digest: str, size: int, offset: int, part: bytes) -> None:
    """Takes the next part of a file, which gets its name once all of it has arrived and was checked."""
    path = store / digest
    unfinished = temporary_name(path)
    with explain_write_errors(store, "free some space on the device, or give serve-device another --store"):
        with unfinished.open("ab" if offset else "wb") as file:
            file.write(part)
        if offset + len(part) < size:
            return
        arrived = file_digest(unfinished).sha256
        if arrived != digest:
            unfinished.unlink()
            raise ModelError(f"{digest} arrived as {arrived}: run it again")
        unfinished.replace(path)
    prune_files(STORE_BYTES, store.iterdir(), path)


def _load(store: Path, what: str) -> Callable[..., Any]:
    """Loads a compiled model, or a library with its parameters, from files in the store; returns what runs it."""
    import tvm
    import tvm_ffi

    wanted = json.loads(what)
    device = TARGETS[wanted["target"]].device()
    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))  # TVM's server removes the folder of the session with it
    for name, digest in wanted["files"].items():
        (folder / name).symlink_to(store / digest)
    if "manifest" in wanted:
        (folder / MANIFEST).write_text(wanted["manifest"], encoding="utf-8")
        artifact = Artifact.load(folder, check=False)  # files were checked when they arrived

        def call(entry: str, tensors: Sequence[Any]) -> Sequence[Any]:
            names = (spec.name for spec in artifact.manifest.entries[entry].inputs)
            return list(artifact.call(entry, **dict(zip(names, tensors, strict=True))).values())
    else:
        weights = [np.fromfile(store / digest, dtype).reshape(shape) for digest, dtype, shape in wanted["parameters"]]
        executable = Executable(folder / wanted["library"], device, weights)

        def call(entry: str, tensors: Sequence[Any]) -> Sequence[Any]:
            return [tvm.runtime.tensor(result) for result in executable.run(tensors)]

    def tensor(value: Any, kind: Any) -> Any:
        if not isinstance(value, bytes):
            return value[0]
        return tvm.runtime.tensor(np.frombuffer(value, kind[0]).reshape(kind[1]), device)

    def run(entry: str, kinds: str, *values: Any) -> Any:
        tensors = [tensor(value, kind) for value, kind in zip(values, json.loads(kinds), strict=True)]
        return tvm_ffi.Array([tvm_ffi.Array([result]) for result in call(entry, tensors)])

    return run
