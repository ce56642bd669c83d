"""Fills output buffers of calls with NaN, so that an element that a kernel leaves out is not right by chance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tvm import relax

from harness.diagnose.flow import CALLS
from harness.execution.unwritten import fill
from harness.schedules.common.graph import is_call
from harness.schedules.common.origins import bindings_of, callee

if TYPE_CHECKING:
    import tvm


def tensor_positions(arguments: tuple[Any, ...]) -> list[int]:
    """Returns the positions of the tensors among a compiled function's arguments."""
    return [n for n, argument in enumerate(arguments) if hasattr(argument, "dtype")]


def result_counts(module: tvm.IRModule) -> dict[str, int]:
    """Returns the number of tensors that each compiled function writes, which are its last arguments.

    Args:
        module: The module that `harness.diagnose.flow.ModuleBeforeMemoryPlanning` kept.
    """
    functions = (function for _, function in module.functions_items() if isinstance(function, relax.Function))
    calls = (binding for function in functions for binding in bindings_of(function) if is_call(binding.value, *CALLS))
    return {
        callee(call.value): len(call.var.ty.fields) if isinstance(call.var.ty, relax.TupleType) else 1 for call in calls
    }


def fill_instrument(results: Mapping[str, int]) -> Callable[..., None]:
    """Returns an instrument of TVM's virtual machine that fills the output buffers of each call.

    Args:
        results: Number of tensors that each compiled function writes.
    """

    def on_call(_function: Any, name: str, before: bool, _result: Any, *arguments: Any) -> None:
        if before and name in results:
            for n in tensor_positions(arguments)[-results[name] :]:
                fill(arguments[n])

    return on_call
