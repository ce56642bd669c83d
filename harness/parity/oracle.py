"""Runs the reference (PyTorch eager fp32 on the CPU) and the oracle (the same module in float64).

Upstream hard-codes fp32 in many places (`.float()` around the rotary encoding and `roi_align`, `arange(dtype=float32)`,
tables in fp32), so converting the module is not enough. The oracle therefore works below PyTorch's operators: it widens
the narrow tensors and the dtype argument of every operator call. Nothing is then computed in less than float64, and the
module needs no second copy of its weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from harness.core.program import Array
from harness.parity.initial_tables import initial_tables

_WIDE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}


# `__get__` reads attributes, which need no values; the others reinterpret existing memory, which cannot be widened.
_UNWIDENED = {"__get__", "view", "frombuffer"}


class _Float64Operators(TorchDispatchMode):
    """Runs every ATen operator on float64 and complex128 instead of narrower types."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.view.dtype, torch.ops.aten._local_scalar_dense.default):
            # A reinterpretation of bits has no wider form; a scalar that leaves the tensors is already exact.
            if func is torch.ops.aten.view.dtype and args[1] in _WIDE:
                raise TypeError("the oracle cannot widen a view of bits as another dtype")
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            _refuse_narrow_target(func, args, kwargs)
        wide_args, wide_kwargs = tree_map(_widen, (args, kwargs))
        return func(*wide_args, **wide_kwargs)


class _Float64Arguments(TorchFunctionMode):
    """Widens the arguments of a function call before PyTorch decomposes it into operators.

    Some functions compare dtypes before any operator runs (`conv2d`), and `torch.tensor` rounds its arguments. Only
    parameters are widened here: a forward does not change them, so no write to a copy is lost.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place or name in _UNWIDENED:
            return func(*args, **kwargs)
        wide_args, wide_kwargs = tree_map(_widen_argument, (args, kwargs))
        return func(*wide_args, **wide_kwargs)


def reference(module: Callable[..., Any], args: Sequence[torch.Tensor], names: Sequence[str]) -> dict[str, Array]:
    """Runs the module unchanged: PyTorch eager on the CPU, without gradients and autocast.

    Args:
        module: A module, or a function that calls one. It returns a tensor, or a tuple or list of tensors.
        args: Inputs of the module; the harness does not change them.
        names: Names of the outputs, in the order in which the module returns them.

    Raises:
        ValueError: The module returns another number of outputs, or an output that is not a tensor.
    """
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return _arrays_by_name(module(*args), names)


def oracle(module: torch.nn.Module, args: Sequence[torch.Tensor], names: Sequence[str]) -> dict[str, Array]:
    """Runs the module in float64 (complex128 for complex types) with the same weights and inputs.

    Parameters are shared with the module and widened when they are used. Buffers, caches and all other state that a
    forward may change are copied, so the module stays unchanged. Integers and booleans keep their types.

    Args:
        module: As for `reference`, in fp32.
        args: The module's fp32 inputs.
        names: Names of the outputs, in the order in which the module returns them.

    Raises:
        ValueError: The module returns another number of outputs, or an output that is not a tensor.
        TypeError: The module executes an operation that has no float64 form.
    """
    copied = _copy_widened(module)
    with torch.no_grad(), torch.autocast("cpu", enabled=False), float64_arithmetic():
        outputs = copied(*(_widen(tensor) for tensor in args))
    return {name: _wide_array(array) for name, array in _arrays_by_name(outputs, names).items()}


def _copy_widened(module: torch.nn.Module) -> torch.nn.Module:
    """Copies a module: parameters are shared, buffers widened, tables of earlier forwards dropped."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in module.parameters()}
    # Tables may hold traced tensors, which cannot be copied, so deepcopy must skip them.
    tables = [getattr(submodule, name) for submodule in module.modules() for name in initial_tables(submodule)]
    shared.update({id(table): None for table in tables if _holds_tensors(table)})
    shared.update({id(buffer): _widen(buffer) for buffer in module.buffers() if buffer.dtype in _WIDE})
    copied = copy.deepcopy(module, shared)
    for submodule in copied.modules():
        for name, initial in initial_tables(submodule).items():
            setattr(submodule, name, copy.copy(initial))
    return copied


def _holds_tensors(table: Any) -> bool:
    values = table.values() if isinstance(table, dict) else table if isinstance(table, tuple) else ()
    return any(isinstance(value, torch.Tensor) or _holds_tensors(value) for value in values)


def _widen(value: Any) -> Any:
    """Returns the wide form of a tensor or dtype that is narrower than float64, and any other value unchanged."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(_WIDE[value.dtype]) if value.dtype in _WIDE else value
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _widen_argument(value: Any) -> Any:
    return _widen(value) if isinstance(value, torch.dtype | torch.nn.Parameter) else value


def _refuse_narrow_target(func: Any, args: Any, kwargs: Any) -> None:
    """Raises an error for an in-place change of a narrow tensor, which would be lost with its wide copy."""
    arguments = func._schema.arguments
    by_name = [(argument, kwargs[argument.name]) for argument in arguments if argument.name in kwargs]
    for argument, value in [*zip(arguments, args, strict=False), *by_name]:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and isinstance(value, torch.Tensor) and value.dtype in _WIDE:
            raise TypeError(f"{func} changes a {value.dtype} tensor in place that the oracle has no float64 form of")


@contextmanager
def float64_arithmetic() -> Iterator[None]:
    """Runs every PyTorch operator in float64 (complex128 for complex types) within the context."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64Operators(), _Float64Arguments():  # type: ignore[no-untyped-call]  # inherits torch's untyped constructor
            yield
    finally:
        torch.set_default_dtype(default_dtype)


def _arrays_by_name(outputs: Any, names: Sequence[str]) -> dict[str, Array]:
    tensors = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    if len(tensors) != len(names) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        types = ", ".join(type(tensor).__name__ for tensor in tensors)
        raise ValueError(f"the module returned {len(tensors)} outputs ({types}) instead of {list(names)}")
    return {name: _array(tensor) for name, tensor in zip(names, tensors, strict=True)}


def _array(tensor: torch.Tensor) -> Array:
    """Copies a tensor, because an output may be a view of an input, of a weight or of another output."""
    return np.array(tensor.detach().resolve_conj().resolve_neg().numpy(), order="C")


def _wide_array(array: Array) -> Array:
    """Widens an output that no operator has touched: an input or weight that was returned directly."""
    if array.dtype.kind in "biu":
        return array
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64, copy=False)
