"""The emulated machine as a place where the tests of the CPU kernels run what they compile."""

from __future__ import annotations

import pickle
import signal
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from conformance.aarch64.environment import Machine, environment, machine_for
from harness.compiler.targets import TARGETS
from harness.compiler.targets.compiling import export_library
from harness.core.processors import Processors


class EmulatedPlace:
    """Compiles for the processors of AArch64 machines, and calls what was compiled there.

    Code for a processor that has more than the usual one runs on the machine that has it.

    Attributes:
        calls: How many calls there were.
    """

    def __init__(self, processors: Processors) -> None:
        self.calls = 0
        self._processors = processors
        self._processes: dict[Path, subprocess.Popen[bytes]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="sam3-tvm-aarch64-")
        self._made = 0

    def target(self) -> tvm.target.Target:
        return TARGETS["llvm"].tvm_target(self._processors)

    def runs(self, target: tvm.target.Target) -> bool:
        """Whether code for a target is run there, and not on this machine."""
        return str(target.attrs.get("mtriple", "")).startswith("aarch64-linux")

    def virtual_machine(self, executable: Any, target: tvm.target.Target) -> Functions:
        return self._loaded("machine", executable, target)

    def module(self, compiled: Any, target: tvm.target.Target) -> Functions:
        return self._loaded("module", compiled, target)

    def _loaded(self, kind: str, compiled: Any, target: tvm.target.Target) -> Functions:
        self._made += 1
        library, python = Path(self._folder.name) / f"{self._made}.so", _machine_of(target).python
        export_library(compiled, target, library)
        number = self.ask(python, kind, str(library))
        library.unlink()
        return Functions(self, python, int(number))

    def ask(self, python: Path, *request: Any) -> Any:
        """Sends a request to the worker of a machine, which is started for the first one.

        Args:
            python: The machine's Python.
            request: What `conformance.aarch64.worker` takes.

        Raises:
            RuntimeError: What was called raised there, or the worker died of it.
        """
        if python not in self._processes:
            command = [str(python), "-m", "conformance.aarch64.worker"]
            pipe = subprocess.PIPE
            self._processes[python] = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment())
        process = self._processes[python]
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump(request, process.stdin, protocol=5)
            process.stdin.flush()
            kind, value = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError):
            code = process.wait()
            self._end(python)
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise RuntimeError(f"the AArch64 process died of {how}; machines made before this are gone") from None
        except BaseException:  # interrupted: its next answer would be this one's
            self._end(python)
            raise
        if kind == "error":
            raise RuntimeError(f"on AArch64: {value}")
        return value

    def close(self) -> None:
        for python in list(self._processes):
            self._end(python)
        self._folder.cleanup()

    def _end(self, python: Path) -> None:
        process = self._processes.pop(python)
        process.kill()
        process.communicate()


def _machine_of(target: tvm.target.Target) -> Machine:
    """The machine that runs code for a target."""
    return machine_for(str(target.attrs["mcpu"]) if "mcpu" in target.attrs else None)


class Functions:
    """The functions of a library there, by name; they take and give tensors of this machine."""

    def __init__(self, place: EmulatedPlace, python: Path, number: int) -> None:
        self._place = place
        self._python = python
        self._number = number

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> Any:
        self._place.calls += 1
        sent = [_sent(argument) for argument in arguments]
        result, after = self._place.ask(self._python, "call", self._number, name, sent)
        for argument, values in zip(arguments, after, strict=True):
            if isinstance(argument, tvm.runtime.Tensor) and argument.numpy().tobytes() != values.tobytes():
                argument.copyfrom(values)
        return _received(result)


def _sent(value: Any) -> Any:
    if isinstance(value, tvm.runtime.Tensor):
        return value.numpy()
    return [_sent(part) for part in value] if isinstance(value, (list, tuple)) else value


def _received(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return tvm.runtime.tensor(value)
    return [_received(part) for part in value] if isinstance(value, list) else value
