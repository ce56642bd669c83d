"""The sides of a component that every run has: PyTorch eager, and what TVM compiled; for `perf.seats.Seat`.

Both read what `save` wrote: PyTorch's module, TVM's parameters, and the inputs of the main sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perf.seats import Calls, Load

if TYPE_CHECKING:
    import torch

MODULE = "module.pt"
RUN, KERNELS = "run", "kernels"
"""What the sides can do: the outputs of one run, and where its time goes (`perf.profiling.kernel_times`)."""


@dataclass(frozen=True)
class Request:
    """What a side loads.

    Attributes:
        folder: Where `save` wrote.
        target: What TVM compiled for.
        library: What TVM compiled; None for others.
    """

    folder: Path
    target: str = "llvm"
    library: Path | None = None


def save(module: torch.nn.Module, inputs: Sequence[torch.Tensor], weights: Sequence[np.ndarray], folder: Path) -> None:
    """Writes what the sides need."""
    import torch

    torch.save(module, folder / MODULE)
    for kind, arrays in (("weight", weights), ("input", [tensor.numpy() for tensor in inputs])):
        for number, array in enumerate(arrays):
            np.save(folder / f"{kind}{number:05}.npy", array)


def read(folder: Path, kind: str) -> list[np.ndarray]:
    """The arrays of a kind, `weight` or `input`, in order."""
    return [np.load(path) for path in sorted(folder.glob(f"{kind}*.npy"))]


def read_module(folder: Path) -> torch.nn.Module:
    """PyTorch's module; to be used inside `harness.models.sam3.upstream.upstream()`."""
    import torch

    module: torch.nn.Module = torch.load(folder / MODULE, weights_only=False)
    return module


@contextmanager
def tvm_side(request: Request) -> Iterator[Load]:
    """`harness.runtime.executable.Executable`."""
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
    """PyTorch eager."""
    from harness.models.sam3.upstream import upstream

    inputs = torch_inputs(request.folder)
    with upstream():
        read_module(request.folder)  # imports what it is made of
        yield lambda: {RUN: runner(read_module(request.folder), inputs)}


def torch_inputs(folder: Path) -> list[torch.Tensor]:
    """The inputs as tensors."""
    import torch

    return [torch.from_numpy(array) for array in read(folder, "input")]


def runner(module: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Callable[[], list[np.ndarray]]:
    """Runs a module without gradients; its outputs as arrays, which share their memory."""
    import torch

    def run() -> list[np.ndarray]:
        with torch.no_grad():
            outputs = module(*inputs)
        return [tensor.numpy() for tensor in (outputs if isinstance(outputs, tuple | list) else (outputs,))]

    return run
