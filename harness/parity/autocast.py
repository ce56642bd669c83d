"""Runs the reference of half-precision cases: upstream under `torch.autocast`, with a GPU's arithmetic.

Upstream runs on GPUs under autocast, so a compiled component must match its half-precision outputs, not those in
float32. The component's error is divided by the error of autocast; both are measured against float64.

PyTorch's autocast chooses which values are half precision, and runs here on the CPU. A GPU differs in two respects,
which are emulated below PyTorch's operators:

- Matrix products, convolutions and attention sum in float32 (cuBLAS's and cuDNN's default for half operands, the tensor
  cores' accumulators) and round once. A CPU's arithmetic depends on its instructions: with some, float16 takes a
  hundred times as long as float32, and results differ between machines.
- Normalization, softmax, sums, exponentials, logarithms and powers return float32 (PyTorch's documentation of
  torch.amp, "CUDA ops that can autocast to float32"; the CPU's list lacks them).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from harness.core.precision import Precision
from harness.core.program import Arrays
from harness.parity.oracle import reference

_HALF = (torch.float16, torch.bfloat16)

_FLOAT32_SUM_OPERATORS = frozenset((
    "addbmm", "addmm", "addmv", "baddbmm", "bmm", "convolution", "dot", "linear", "mm", "mv",
    "_scaled_dot_product_attention_math", "_scaled_dot_product_flash_attention_for_cpu",
))  # fmt: skip
"""ATen operators that a GPU computes with half operands, float32 sums and a half result."""

_FLOAT32_OPERATORS = frozenset((
    "_softmax", "cumsum", "exp", "linalg_vector_norm", "log", "log10", "log1p", "log2", "_log_softmax",
    "native_group_norm", "native_layer_norm", "norm", "pow", "prod", "reciprocal", "rsqrt", "softplus", "sum", "tan",
))  # fmt: skip
"""ATen operators that a GPU's autocast runs in float32, so that their results are float32."""


class _GpuArithmetic(TorchDispatchMode):
    """Computes operators with half operands as a GPU does under autocast."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name not in _FLOAT32_SUM_OPERATORS | _FLOAT32_OPERATORS:
            return func(*args, **kwargs)
        dtypes = {value.dtype for value in tree_leaves((args, kwargs)) if _has_dtype(value, *_HALF)}
        if not dtypes:
            return func(*args, **kwargs)
        wide_args, wide_kwargs = tree_map(half_to_float32, (args, kwargs))
        result = func(*wide_args, **wide_kwargs)
        if name in _FLOAT32_OPERATORS:
            return result
        (dtype,) = dtypes
        return tree_map(lambda value: value.to(dtype) if _has_dtype(value, torch.float32) else value, result)


@contextmanager
def gpu_autocast(dtype: torch.dtype) -> Iterator[None]:
    """Enables a GPU's autocast arithmetic in a half type within the context."""
    with torch.autocast("cpu", dtype), _GpuArithmetic():  # type: ignore[no-untyped-call]
        yield


def half_reference(
    module: torch.nn.Module, args: Sequence[torch.Tensor], names: Sequence[str], precision: Precision
) -> Arrays:
    """Runs a module under autocast, and returns its outputs as float32.

    Args:
        module: As for `harness.parity.oracle.reference`, in fp32; it is not changed.
        args: The module's fp32 inputs.
        names: Names of the outputs, in the order in which the module returns them.
        precision: A half precision.
    """

    def run(*inputs: torch.Tensor) -> Any:
        with gpu_autocast(getattr(torch, precision.dtype)):
            outputs = module(*inputs)
        return tree_map(half_to_float32, outputs)

    return reference(run, args, names)


def has_float32_sums(operator: Any) -> bool:
    """Returns whether an object is an ATen operator with half operands, float32 sums and a half result."""
    schema = getattr(operator, "_schema", None)
    name = "" if schema is None else schema.name.removeprefix("aten::")
    return name in _FLOAT32_SUM_OPERATORS or name == "scaled_dot_product_attention"


def _has_dtype(value: Any, *dtypes: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in dtypes


def half_to_float32(value: Any) -> Any:
    """Returns a tensor of a half type in float32, and any other value unchanged."""
    return value.float() if _has_dtype(value, *_HALF) else value
