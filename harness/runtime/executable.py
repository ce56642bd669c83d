"""Runs a compiled library on a device with its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.runtime.loading import load_library

if TYPE_CHECKING:
    import tvm

TRANSFORM_PARAMETERS = "main_transform_params"
"""The function of Relax's LiftTransformParams that turns imported parameters into those that `main` takes."""


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
        """Loads the library, moves the parameters to the device, and packs them as the compiled code takes them.

        Args:
            library: A library that `harness.compiler.targets.compiling.compile_module` wrote.
            device: The device to run on.
            parameters: Values of the parameters that follow the inputs of `main`, in order.
            instrument: Called before and after each kernel, with the arguments of TVM's instruments.

        Raises:
            LoadError: The file is no library, or was compiled for a processor that this machine does not have.
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
        """Runs the component once and returns its outputs in order.

        Arrays are copied to the device; tensors must be on the device already. On the CPU no output is copied: it owns
        the memory that it was computed in. An output that does not depend on the inputs is a read-only view of the
        model's memory.
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
