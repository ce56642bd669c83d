"""The reference of half-precision cases: upstream under `torch.autocast`, with a GPU's arithmetic.

Upstream runs on GPUs under autocast, so its own half-precision outputs, and not float32's, are what a compiled
component must match: an error is put in relation to the error of autocast, both measured against float64.

PyTorch's autocast decides what is half, and runs here as it is: on the CPU. Two things differ on a GPU, and are done
below PyTorch's operators as a GPU does them:

- matrix products, convolutions and attention sum in float32 (cuBLAS's and cuDNN's default for half operands, the tensor
  cores' accumulators) and round once. What a CPU does depends on its instructions: with some, float16 takes a hundred
  times as long as float32, and results differ between machines;
- normalization, softmax, sums, exponentials, logarithms and powers give float32 (PyTorch's documentation of
  torch.amp, "CUDA ops that can autocast to float32"; the CPU's list lacks them).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from harness.core.precision import Precision
from harness.parity.oracle import reference

Arrays = dict[str, npt.NDArray[Any]]

_HALF = (torch.float16, torch.bfloat16)

_SUMMED_IN_FLOAT = frozenset(
    (
        "addbmm",
        "addmm",
        "addmv",
        "baddbmm",
        "bmm",
        "convolution",
        "dot",
        "linear",
        "mm",
        "mv",
        "_scaled_dot_product_attention_math",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
)
"""ATen operators that a GPU computes with half operands, float32 sums and a half result."""

_FLOAT = frozenset(
    (
        "_softmax",
        "cumsum",
        "exp",
        "linalg_vector_norm",
        "log",
        "log10",
        "log1p",
        "log2",
        "_log_softmax",
        "native_group_norm",
        "native_layer_norm",
        "norm",
        "pow",
        "prod",
        "reciprocal",
        "rsqrt",
        "softplus",
        "sum",
        "tan",
    )
)
"""ATen operators that a GPU's autocast gives float32 operands, so that their results are float32."""


class _AsOnAGpu(TorchDispatchMode):
    """Computes operators with half operands as a GPU does under autocast."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name not in _SUMMED_IN_FLOAT | _FLOAT:
            return func(*args, **kwargs)
        dtypes = {tensor.dtype for tensor in _tensors((args, kwargs))} & set(_HALF)
        if not dtypes:
            return func(*args, **kwargs)
        wide_args, wide_kwargs = tree_map(float32_of_half, (args, kwargs))
        result = func(*wide_args, **wide_kwargs)
        if name in _FLOAT:
            return result
        (dtype,) = dtypes
        return tree_map(lambda value: value.to(dtype) if _is(value, torch.float32) else value, result)


class _UnderAutocast(torch.nn.Module):
    """A module that runs under autocast and gives float32 for what is half."""

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = module
        self.dtype = dtype

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with under_autocast(self.dtype):
            outputs = self.module(*args)
        several = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
        return tuple(float32_of_half(output) for output in several)


@contextmanager
def under_autocast(dtype: torch.dtype) -> Iterator[None]:
    """Computes as a GPU does under autocast in a half type, for the duration of the context."""
    with torch.autocast("cpu", dtype), _AsOnAGpu():  # type: ignore[no-untyped-call]
        yield


def half_reference(
    module: torch.nn.Module, args: Sequence[torch.Tensor], names: Sequence[str], precision: Precision
) -> Arrays:
    """Runs a module under autocast; returns its outputs as float32.

    Args:
        module: As for `harness.parity.oracle.reference`, in fp32; it stays as it is.
        args: Its fp32 inputs.
        names: Names of the outputs, in the order in which the module returns them.
        precision: A half one.
    """
    dtype: torch.dtype = getattr(torch, precision.dtype)
    return reference(_UnderAutocast(module, dtype), args, names)


def sums_in_float(operator: Any) -> bool:
    """Returns whether this is an ATen operator of half operands, float32 sums and a half result."""
    schema = getattr(operator, "_schema", None)
    name = "" if schema is None else schema.name.removeprefix("aten::")
    return name in _SUMMED_IN_FLOAT or name == "scaled_dot_product_attention"


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map(lambda value: found.append(value) if isinstance(value, torch.Tensor) else None, values)
    return found


def _is(value: Any, *dtypes: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in dtypes


def float32_of_half(value: Any) -> Any:
    """Returns a tensor of a half type in float32; everything else as it is."""
    return value.float() if _is(value, *_HALF) else value
