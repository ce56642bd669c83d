"""The sides that every component has: PyTorch eager and TVM; each runs in a `perf.processes.BenchmarkProcess`.

Both read what `save` wrote: PyTorch's module, TVM's parameters, and the inputs of the main program.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perf.processes import Calls, Load

if TYPE_CHECKING:
    import torch

MODULE, IMPORTED = "module.pt", "imported.json"
"""The files of PyTorch's module, and of the Relax module as TVM's JSON."""
RUN, KERNELS = "run", "kernels"
"""The functions of the sides: the outputs of one run, and the times of its kernels (`perf.profiling.kernel_times`).

A peer's run takes other inputs, too, as a list of arrays.
"""


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

    def module(self) -> torch.nn.Module:
        """Returns PyTorch's module; to be called inside `context`."""
        return read_module(self.folder)

    def inputs(self) -> list[np.ndarray]:
        """Returns the inputs of a run."""
        return read(self.folder, "input")


def save(module: torch.nn.Module, inputs: Sequence[torch.Tensor], weights: Sequence[np.ndarray], folder: Path) -> None:
    """Writes what the sides read.

    Args:
        module: PyTorch's module.
        inputs: Its inputs.
        weights: TVM's parameters in the dtypes in which the compiled code takes them.
        folder: The folder that all of it is written to.
    """
    import torch

    torch.save(module, folder / MODULE)
    write(folder, "weight", weights)
    write(folder, "input", [tensor.numpy() for tensor in inputs])


def write(folder: Path, kind: str, arrays: Sequence[np.ndarray]) -> None:
    """Writes arrays of one kind, `weight` or `input`, for `read`."""
    for number, array in enumerate(arrays):
        np.save(_file(folder, kind, number), array)
    (folder / f"{kind}s.json").write_text(json.dumps([array.dtype.name for array in arrays]), encoding="utf-8")


def read(folder: Path, kind: str) -> list[np.ndarray]:
    """Returns the arrays of a kind in their order, with the dtypes that they had."""
    import ml_dtypes  # noqa: F401  (registers bfloat16, of which NumPy's files keep only the size)

    dtypes = json.loads((folder / f"{kind}s.json").read_text(encoding="utf-8"))
    return [np.load(_file(folder, kind, number)).view(np.dtype(name)) for number, name in enumerate(dtypes)]


def _file(folder: Path, kind: str, number: int) -> Path:
    return folder / f"{kind}{number:05}.npy"


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

    from harness.compiler.targets import TARGETS
    from harness.runtime.executable import Executable
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
        request.module()  # imports what it is made of
        yield lambda: {RUN: runner(request.module(), inputs)}


def torch_inputs(folder: Path) -> list[torch.Tensor]:
    """Returns the inputs as tensors."""
    import torch

    return [torch.from_numpy(array) for array in read(folder, "input")]


def runner(
    module: Callable[..., Any], inputs: Sequence[torch.Tensor], autocast: torch.dtype | None = None
) -> Callable[..., list[np.ndarray]]:
    """Returns a function that runs a module without gradients, on its inputs or on the arrays that it is given.

    Args:
        module: The module.
        inputs: Its inputs.
        autocast: The type of `torch.autocast`, under which it runs; None for no autocast. Outputs of this type become
            float32; other arrays share the memory of tensors on the CPU.
    """
    import torch

    device = inputs[0].device.type

    def run(arrays: Sequence[np.ndarray] | None = None) -> list[np.ndarray]:
        tensors = inputs
        if arrays is not None:  # copied where PyTorch must not write into them
            tensors = [torch.from_numpy(np.require(array, requirements="W")).to(device) for array in arrays]
        with torch.no_grad(), torch.autocast(device, autocast, enabled=autocast is not None):
            outputs = module(*tensors)
        several = outputs if isinstance(outputs, tuple | list) else (outputs,)
        return [(tensor if tensor.dtype != autocast else tensor.float()).cpu().numpy() for tensor in several]

    return run
