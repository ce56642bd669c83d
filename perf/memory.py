"""Peak memory of one component, of TVM and of PyTorch, each in a process of its own that does nothing else.

Counted is resident memory: what loading the weights adds, and how far it rises above that while the component runs.
Libraries, the model around the component and the inputs are there before. Whatever an allocator keeps for later counts,
because the process has it: TVM's pool, a packed weight beside its original.
"""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch

RUNS = 2
"""The second one shows what a pool keeps from the first."""


@dataclass(frozen=True)
class Memory:
    """Bytes of resident memory.

    Attributes:
        weights: What loading added, the packing of weights done.
        run: How far the peak of the runs is above that.
    """

    weights: int
    run: int


@dataclass(frozen=True)
class Request:
    """What a process is to measure.

    Attributes:
        folder: Where `save` wrote.
        library: The compiled component.
        target: What it was compiled for.
        threads: How many the process uses.
    """

    folder: Path
    library: Path
    target: str
    threads: int


def save(module: torch.nn.Module, inputs: Sequence[torch.Tensor], weights: Sequence[np.ndarray], folder: Path) -> None:
    """Writes what both processes need: PyTorch's module, TVM's parameters, and the inputs."""
    import numpy as np
    import torch

    torch.save(module, folder / "module.pt")
    for kind, arrays in (("weight", weights), ("input", [tensor.numpy() for tensor in inputs])):
        for number, array in enumerate(arrays):
            np.save(folder / f"{kind}{number:05}.npy", array)


def tvm_memory(request: Request, enter: Callable[[str], None]) -> Memory | None:
    """Of `harness.runtime.executable.Executable`; to be called by `harness.worker.run_isolated`."""
    from tvm import relax  # noqa: F401  (loads the libraries)

    from harness.runtime.executable import Executable
    from harness.targets import TARGETS
    from harness.threads import configure_threads

    configure_threads(request.threads)
    inputs = _arrays(request.folder, "input")

    def load() -> Callable[[], object]:
        executable = Executable(request.library, TARGETS[request.target].device(), _arrays(request.folder, "weight"))
        return lambda: executable.run(inputs)

    return measure(load, enter)


def torch_memory(request: Request, enter: Callable[[str], None]) -> Memory | None:
    """Of the module in PyTorch eager; to be called by `harness.worker.run_isolated`."""
    import torch

    from harness.model.upstream import upstream
    from harness.threads import configure_threads

    configure_threads(request.threads)
    inputs = [torch.from_numpy(array) for array in _arrays(request.folder, "input")]
    with upstream():

        def load() -> Callable[[], object]:
            module = torch.load(request.folder / "module.pt", weights_only=False)

            def run() -> object:
                with torch.no_grad():
                    return module(*inputs)

            return run

        load()  # imports what the module is made of
        return measure(load, enter)


def measure(load: Callable[[], Callable[[], object]], enter: Callable[[str], None]) -> Memory | None:
    """None where the system does not tell the peak."""
    before = _resident()
    enter("load")
    run = load()
    loaded = _resident()
    if before is None or loaded is None or not _forget_peak():
        return None
    enter("run")
    for _ in range(RUNS):
        run()
    return Memory(loaded - before, _status("VmHWM") - loaded)


def _arrays(folder: Path, kind: str) -> list[np.ndarray]:
    import numpy as np

    return [np.load(path) for path in sorted(folder.glob(f"{kind}*.npy"))]


def _resident() -> int | None:
    """Resident bytes once everything that is free has been given back."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        return _status("VmRSS")
    except (AttributeError, OSError):  # not Linux, not glibc
        return None


def _forget_peak() -> bool:
    """Lets the kernel's mark of the peak start anew (proc(5), clear_refs); whether it did."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(name: str) -> int:
    """A size in /proc/self/status."""
    text = Path("/proc/self/status").read_text()
    match = re.search(rf"^{name}:\s*(\d+) kB$", text, re.M)
    if match is None:
        raise OSError(f"/proc/self/status has no {name}")
    return int(match.group(1)) * 1024
