"""A compiled library on a device, with its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.runtime.loading import load_library

if TYPE_CHECKING:
    import tvm

TRANSFORM_PARAMETERS = "main_transform_params"
"""The function that Relax's LiftTransformParams makes: parameters as imported to parameters as `main` wants them."""


class Executable:
    """A compiled component that is ready to run.

    Attributes:
        device: TVM's device that it runs on.
    """

    def __init__(
        self,
        library: Path,
        device: tvm.runtime.Device,
        parameters: Sequence[np.ndarray],
        instrument: Callable[..., None] | None = None,
    ) -> None:
        """Loads the library and moves the parameters to the device, packed as the compiled code wants them.

        Args:
            library: Written by `harness.targets.compiling.compile_module`.
            device: Where to run.
            parameters: Values of everything that `main` takes after its inputs, in order.
            instrument: Told of each call before and after it, as TVM's virtual machine tells its instruments.

        Raises:
            LoadError: The library is none, or was compiled for a processor that this machine has not.
        """
        import tvm

        self.device = device
        self._vm = load_library(library, device)
        if instrument is not None:
            self._vm["set_instrument"](instrument)
        tensors: list[Any] = [tvm.runtime.tensor(array, device) for array in parameters]
        if TRANSFORM_PARAMETERS in self._vm:
            tensors = list(self._vm[TRANSFORM_PARAMETERS](tensors))
        self._parameters = tensors
        on_cpu = device == tvm.cpu()
        self._constants = {np.from_dlpack(tensor).ctypes.data for tensor in tensors} if on_cpu else set()

    def run(self, inputs: Sequence[np.ndarray | tvm.runtime.Tensor]) -> list[np.ndarray]:
        """Runs it once, and returns the outputs in order.

        Arrays are copied to the device, tensors are there already. On the CPU no output is copied: it owns the memory
        that it was computed in, and one that does not depend on the inputs is a read-only view of the model's own.
        """
        import tvm

        arguments = [
            tvm.runtime.tensor(value, self.device) if isinstance(value, np.ndarray) else value for value in inputs
        ]
        results = list(self._vm.call("main", *arguments, *self._parameters))
        if self.device != tvm.cpu():
            return [result.numpy() for result in results]
        arrays = [np.from_dlpack(result) for result in results]
        for array in arrays:
            if array.ctypes.data in self._constants:
                array.flags.writeable = False
        return arrays
