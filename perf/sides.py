"""The sides that every component has: PyTorch eager and TVM; each runs in a `perf.processes.BenchmarkProcess`.

Both read what `save` wrote: PyTorch's module, TVM's parameters, and the inputs of the main program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perf.processes import Calls, Load

if TYPE_CHECKING:
    import torch

MODULE = "module.pt"
RUN, KERNELS = "run", "kernels"
"""The functions of the sides: the outputs of one run, and the times of its kernels (`perf.profiling.kernel_times`)."""


@dataclass(frozen=True)
class Request:
    """Where a side finds what it loads.

    Attributes:
        folder: The folder that `save` wrote to.
        model: Name of the model that PyTorch's module is of.
        target: The target that TVM compiled for.
        library: The library that TVM compiled; None for other sides.
    """

    folder: Path
    model: str
    target: str = "llvm"
    library: Path | None = None

    def with_library(self, library: Path) -> Request:
        """Returns the same request with a library of TVM."""
        return replace(self, library=library)

    def context(self) -> AbstractContextManager[None]:
        """Returns the context that PyTorch's module is loaded, exported and run in."""
        from harness.models.registry import models

        return models()[self.model].context()


def save(module: torch.nn.Module, inputs: Sequence[torch.Tensor], weights: Sequence[np.ndarray], folder: Path) -> None:
    """Writes what the sides read."""
    import torch

    torch.save(module, folder / MODULE)
    for kind, arrays in (("weight", weights), ("input", [tensor.numpy() for tensor in inputs])):
        for number, array in enumerate(arrays):
            np.save(folder / f"{kind}{number:05}.npy", array)


def read(folder: Path, kind: str) -> list[np.ndarray]:
    """Returns the arrays of a kind, `weight` or `input`, in order."""
    return [np.load(path) for path in sorted(folder.glob(f"{kind}*.npy"))]


def read_module(folder: Path) -> torch.nn.Module:
    """Loads PyTorch's module; to be used inside `Request.context`."""
    import torch

    module: torch.nn.Module = torch.load(folder / MODULE, weights_only=False)
    return module


@contextmanager
def tvm_side(request: Request) -> Iterator[Load]:
    """Runs the library as `harness.runtime.executable.Executable` does."""
    import tvm
    from tvm import relax  # noqa: F401  (loads the libraries)

    from harness.runtime.executable import Executable
    from harness.targets import TARGETS
    from perf.profiling import kernel_times

    device = TARGETS[request.target].device()
    inputs = [tvm.runtime.tensor(array, device) for array in read(request.folder, "input")]

    def load() -> Calls:
        assert request.library is not None
        executable = Executable(request.library, device, read(request.folder, "weight"))
        return {RUN: lambda: executable.run(inputs), KERNELS: lambda: kernel_times(executable, inputs)}

    yield load


@contextmanager
def torch_side(request: Request) -> Iterator[Load]:
    """Runs PyTorch eager in fp32, whatever the case's precision is."""
    inputs = torch_inputs(request.folder)
    with request.context():
        read_module(request.folder)  # imports what it is made of
        yield lambda: {RUN: runner(read_module(request.folder), inputs)}


def torch_inputs(folder: Path) -> list[torch.Tensor]:
    """Returns the inputs as tensors."""
    import torch

    return [torch.from_numpy(array) for array in read(folder, "input")]


def runner(module: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Callable[[], list[np.ndarray]]:
    """Returns a function that runs a module without gradients; the arrays share the tensors' memory."""
    import torch

    def run() -> list[np.ndarray]:
        with torch.no_grad():
            outputs = module(*inputs)
        return [tensor.numpy() for tensor in (outputs if isinstance(outputs, tuple | list) else (outputs,))]

    return run
