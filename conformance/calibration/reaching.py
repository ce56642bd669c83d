"""Which places of each layer a component reaches: a fault is drawn among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from tvm import ir, relax

from harness.schedules.common import folding
from harness.schedules.common.graph import default
from harness.schedules.cpu import epilogue, pipeline, rewrite


@dataclass
class Reached:
    """Keys of operators (`key_of`), each once, in the order in which the pipeline comes to them.

    Attributes:
        legalized: Those that are legalized.
        kernels: Those that become kernels.
        folded: Those that kernels read through.
        steps: Names of the operators that kernels do before they store.
    """

    legalized: dict[str, None] = field(default_factory=dict)
    kernels: dict[str, None] = field(default_factory=dict)
    folded: dict[str, None] = field(default_factory=dict)
    steps: dict[str, None] = field(default_factory=dict)


def key_of(call: ir.Call) -> str:
    """Returns the name of an operator with the types of what it reads."""
    return f"{call.op.name}({', '.join(str(getattr(argument, 'ty', '')) for argument in call.args)})"


@contextmanager
def reached(operators: Sequence[str]) -> Iterator[Reached]:
    """Notes what the pipeline comes to in the context.

    Args:
        operators: Names of the operators of the module.
    """
    found = Reached()

    def legalize(name: str) -> Callable[..., relax.Expr]:
        right = pipeline.LEGALIZE.get(name, default)

        def noted(builder: relax.BlockBuilder, call: ir.Call) -> relax.Expr:
            found.legalized[key_of(call)] = None
            return right(builder, call)

        return noted

    def kernel(right: Callable[..., Any]) -> Callable[..., Any]:
        def noted(context: Any, call: ir.Call) -> Any:
            lowering = right(context, call)
            if lowering is not None:
                found.kernels[key_of(call)] = None
            return lowering

        return noted

    def rule(name: str) -> Callable[..., Any]:
        right = folding._RULES[name]

        def noted(scope: Any, call: ir.Call, shape: tuple[Any, ...]) -> Any:
            folded = right(scope, call, shape)
            if folded is not None:
                found.folded[key_of(call)] = None
            return folded

        return noted

    def step(name: str, right: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*values: Any) -> Any:
            found.steps[name] = None
            return right(*values)

        return noted

    legalized = [name for name in dict.fromkeys(operators) if ir.Op.get(name).has_attr("FLegalize")]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(pipeline.LEGALIZE, {name: legalize(name) for name in legalized}))
        stack.enter_context(mock.patch.dict(rewrite.KERNELS, {name: kernel(f) for name, f in rewrite.KERNELS.items()}))
        stack.enter_context(mock.patch.dict(folding._RULES, {name: rule(name) for name in folding._RULES}))
        stack.enter_context(mock.patch.dict(epilogue.UNARY, {n: step(n, f) for n, f in epilogue.UNARY.items()}))
        binary = {name: step(name, function) for name, function in epilogue.BINARY.items()}
        stack.enter_context(mock.patch.object(epilogue, "BINARY", binary))
        yield found
