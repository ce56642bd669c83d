"""What a call is to write is filled before it: an element that it leaves out must not be right by chance."""

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


def tensors_of(arguments: tuple[Any, ...]) -> list[int]:
    """Returns which arguments of a compiled function are tensors."""
    return [n for n, argument in enumerate(arguments) if hasattr(argument, "dtype")]


def results_of(module: tvm.IRModule) -> dict[str, int]:
    """Returns how many tensors each compiled function writes, which are its last ones.

    Args:
        module: What `harness.diagnose.flow.BeforeMemory` kept.
    """
    functions = (function for _, function in module.functions_items() if isinstance(function, relax.Function))
    calls = (binding for function in functions for binding in bindings_of(function) if is_call(binding.value, *CALLS))
    return {
        callee(call.value): len(call.var.ty.fields) if isinstance(call.var.ty, relax.TupleType) else 1 for call in calls
    }


def filling(results: Mapping[str, int]) -> Callable[..., None]:
    """Returns an instrument of TVM's virtual machine that fills what each call is to write.

    Args:
        results: How many tensors each compiled function writes.
    """

    def note(_function: Any, name: str, before: bool, _result: Any, *arguments: Any) -> None:
        if before and name in results:
            for n in tensors_of(arguments)[-results[name] :]:
                fill(arguments[n])

    return note
