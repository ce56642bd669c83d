"""Records the arguments and results of upstream's methods from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

from harness.models.sam3.patches.patch import replaced


@dataclass(frozen=True)
class Call:
    """One call of a method: its arguments by name, defaults included, and its result."""

    arguments: dict[str, Any]
    result: Any


@contextmanager
def recorded_methods(owner: Any, *names: str) -> Iterator[dict[str, list[Call]]]:
    """Records every call of methods of an object, by method name and in order, for the duration of the context."""
    calls: dict[str, list[Call]] = {name: [] for name in names}

    def recorder(name: str) -> Callable[..., Any]:
        method = getattr(owner, name)
        parameters = signature(method)

        def record(*args: Any, **kwargs: Any) -> Any:
            bound = parameters.bind(*args, **kwargs)
            bound.apply_defaults()
            result = method(*args, **kwargs)
            calls[name].append(Call(dict(bound.arguments), result))
            return result

        return record

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(replaced(owner, name, recorder(name)))
        yield calls
