"""The reference (PyTorch eager fp32 on the CPU) and the oracle (the same module in float64).

Upstream hard-codes fp32 in many places (`.float()` around the rotary encoding and `roi_align`, `arange(dtype=float32)`,
tables kept in fp32). Converting the module is not enough, so the oracle runs below PyTorch's operators: whatever
operator is called, its narrower tensors are widened first and its dtype argument is widened too. Nothing can then be
computed in less than float64, and the module needs no second copy of its weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

Array = npt.NDArray[Any]

_WIDE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}

# Tables that upstream fills on the first forward, by class and attribute, with what they are before it: results and not
# weights, so the oracle makes its own, whether the module has already run or not.
_CACHES: dict[str, dict[str, Any]] = {
    "PositionEmbeddingSine": {"cache": {}},
    "TransformerDecoder": {"compilable_cord_cache": None, "compilable_stored_size": None, "coord_cache": {}},
}


# Attributes need no values; the others take the dtype of memory that is there, which no widening can change.
_AS_THEY_ARE = {"__get__", "view", "frombuffer"}


class _Widened(TorchDispatchMode):
    """Runs every ATen operator on float64 and complex128 instead of anything narrower."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.view.dtype, torch.ops.aten._local_scalar_dense.default):
            # A reinterpretation of bits has no wider form; a scalar that leaves the tensors is exact as it is.
            if func is torch.ops.aten.view.dtype and args[1] in _WIDE:
                raise TypeError("the oracle cannot widen a view of bits as another dtype")
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            _refuse_narrow_target(func, args, kwargs)
        wide_args, wide_kwargs = tree_map(_widen, (args, kwargs))
        return func(*wide_args, **wide_kwargs)


class _WidenedCalls(TorchFunctionMode):
    """Widens what a call is given before PyTorch takes it apart.

    Some functions compare dtypes before any operator runs (`conv2d`), and `torch.tensor` rounds what it is given.
    Only parameters are widened here: a forward does not change them, so nothing is written to a copy and lost.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place or name in _AS_THEY_ARE:
            return func(*args, **kwargs)
        wide_args, wide_kwargs = tree_map(_widen_argument, (args, kwargs))
        return func(*wide_args, **wide_kwargs)


def reference(module: torch.nn.Module, args: Sequence[torch.Tensor], names: Sequence[str]) -> dict[str, Array]:
    """Runs the module as it is: PyTorch eager on the CPU, no gradients, no autocast.

    Args:
        module: Returns a tensor, or a tuple or list of tensors.
        args: Its inputs; they are not changed by the harness.
        names: Names of the outputs, in the order in which the module returns them.

    Raises:
        ValueError: If the module returns another number of outputs or something that is no tensor.
    """
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return _named(module(*args), names)


def oracle(module: torch.nn.Module, args: Sequence[torch.Tensor], names: Sequence[str]) -> dict[str, Array]:
    """Runs the module in float64 (complex128 for complex): the same weights and inputs, exact to fp32's eyes.

    Parameters are shared with the module and widened as they are used; buffers, caches and everything else that a
    forward may change are the oracle's own, so the module stays as it is. Integers and booleans stay what they are.

    Args:
        module: As for `reference`, in fp32.
        args: Its fp32 inputs.
        names: Names of the outputs, in the order in which the module returns them.

    Raises:
        ValueError: If the module returns another number of outputs or something that is no tensor.
        TypeError: If the module does something that has no float64 form.
    """
    own = _own_state(module)
    with torch.no_grad(), torch.autocast("cpu", enabled=False), widened():
        outputs = own(*(_widen(tensor) for tensor in args))
    return {name: _wide_array(array) for name, array in _named(outputs, names).items()}


def _own_state(module: torch.nn.Module) -> torch.nn.Module:
    """Copies a module: parameters are shared, buffers widened, tables that a forward left behind dropped."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in module.parameters()}
    # Tables may hold tensors that cannot be copied (traced ones), so deepcopy is not shown them.
    tables = [getattr(part, name) for part in module.modules() for name in _caches_of(part)]
    shared.update({id(table): None for table in tables if _holds_tensors(table)})
    shared.update({id(buffer): _widen(buffer) for buffer in module.buffers() if buffer.dtype in _WIDE})
    own = copy.deepcopy(module, shared)
    for part in own.modules():
        for name, fresh in _caches_of(part).items():
            setattr(part, name, copy.copy(fresh))
    return own


def _caches_of(part: torch.nn.Module) -> Mapping[str, Any]:
    found = {}
    for cls in type(part).__mro__:
        for name, fresh in _CACHES.get(cls.__name__, {}).items():
            if hasattr(part, name):
                found[name] = fresh
    return found


def _holds_tensors(table: Any) -> bool:
    values = table.values() if isinstance(table, dict) else table if isinstance(table, tuple) else ()
    return any(isinstance(value, torch.Tensor) or _holds_tensors(value) for value in values)


def _widen(value: Any) -> Any:
    """Returns a tensor or dtype that is narrower than float64 in its wide form; everything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(_WIDE[value.dtype]) if value.dtype in _WIDE else value
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _widen_argument(value: Any) -> Any:
    return _widen(value) if isinstance(value, torch.dtype | torch.nn.Parameter) else value


def _refuse_narrow_target(func: Any, args: Any, kwargs: Any) -> None:
    """Raises an error for a change of a narrow tensor in place: it would be made on the wide copy and be lost."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        _refuse_narrow(func, argument, value)
    for argument in func._schema.arguments:
        if argument.name in kwargs:
            _refuse_narrow(func, argument, kwargs[argument.name])


def _refuse_narrow(func: Any, argument: Any, value: Any) -> None:
    changed = argument.alias_info is not None and argument.alias_info.is_write
    if changed and isinstance(value, torch.Tensor) and value.dtype in _WIDE:
        raise TypeError(f"{func} changes a {value.dtype} tensor in place that the oracle has no float64 form of")


@contextmanager
def widened() -> Iterator[None]:
    """Runs every operator of PyTorch in float64 (complex128 for complex) for the duration of the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened(), _WidenedCalls():  # type: ignore[no-untyped-call]  # inherits torch's untyped constructor
            yield
    finally:
        torch.set_default_dtype(before)


def _named(outputs: Any, names: Sequence[str]) -> dict[str, Array]:
    tensors = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    if len(tensors) != len(names) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        found = ", ".join(type(tensor).__name__ for tensor in tensors)
        raise ValueError(f"the module returned {len(tensors)} outputs ({found}) instead of {list(names)}")
    return {name: _array(tensor) for name, tensor in zip(names, tensors, strict=True)}


def _array(tensor: torch.Tensor) -> Array:
    """Copies a tensor: an output may be a view of an input, of a weight or of another output."""
    return np.array(tensor.detach().resolve_conj().resolve_neg().numpy(), order="C")


def _wide_array(array: Array) -> Array:
    """Widens an output that no operator touched: an input or weight that was handed through."""
    if array.dtype.kind in "biu":
        return array
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64, copy=False)
