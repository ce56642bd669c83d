"""Which places of each layer a component reaches: a fault is drawn among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import tvm
from tvm import ir, relax, tirx
from tvm_ffi import StructuralKey

from harness.compiler.schedules.common import folding
from harness.compiler.schedules.common.graph import default
from harness.compiler.schedules.cpu import epilogue, pipeline, rewrite
from harness.compiler.schedules.cpu.lowering import Build, Lowering


@dataclass
class Reached:
    """Keys of operators (`key_of`), each once, in the order in which the pipeline comes to them.

    Attributes:
        legalized: Those that are legalized, with the functions that they become.
        kernels: Those that become kernels, with their functions.
        folded: Those that kernels read through.
        steps: Names of the operators that kernels do before they store.
    """

    legalized: dict[str, list[tirx.PrimFunc]] = field(default_factory=dict)
    kernels: dict[str, list[tirx.PrimFunc]] = field(default_factory=dict)
    folded: dict[str, None] = field(default_factory=dict)
    steps: dict[str, None] = field(default_factory=dict)


def key_of(call: ir.Call) -> str:
    """Returns the name of an operator with the types of what it reads."""
    return f"{call.op.name}({', '.join(str(getattr(argument, 'ty', '')) for argument in call.args)})"


def functions_of(module: tvm.IRModule) -> dict[str, ir.GlobalVar]:
    """Returns the variables of the compiled functions of a module, by name."""
    return {v.name_hint: v for v, f in module.functions_items() if isinstance(f, tirx.PrimFunc)}


def content(function: tirx.PrimFunc) -> StructuralKey:
    """Returns what a function computes, to be compared; its name is no part of it."""
    return StructuralKey(tirx.PrimFunc(function.params, function.body))


def new_functions(builder: relax.BlockBuilder, before: set[str]) -> list[ir.GlobalVar]:
    """Returns the functions that a builder has got since, by name."""
    after = functions_of(builder.get())
    return [after[name] for name in sorted(set(after) - before)]


def built_by(lowering: Lowering, build: Build, permuted: Callable[[Lowering], Lowering]) -> Lowering:
    """Returns a lowering that is built in another way, also where a permutation follows."""

    def moved(axes: tuple[int, ...]) -> Lowering | None:
        other = None if lowering.permuted is None else lowering.permuted(axes)
        return None if other is None else permuted(other)

    return replace(lowering, build=build, permuted=None if lowering.permuted is None else moved)


def _added(builder: relax.BlockBuilder, before: set[str]) -> list[tirx.PrimFunc]:
    module = builder.get()
    return [module[variable] for variable in new_functions(builder, before)]


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
            before = set(functions_of(builder.get()))
            result = right(builder, call)
            found.legalized.setdefault(key_of(call), []).extend(_added(builder, before))
            return result

        return noted

    def building(lowering: Lowering, functions: list[tirx.PrimFunc]) -> Lowering:
        def build(builder: relax.BlockBuilder, inputs: Any, after: epilogue.Epilogue) -> relax.Expr:
            before = set(functions_of(builder.get()))
            result = lowering.build(builder, inputs, after)
            functions.extend(_added(builder, before))
            return result

        return built_by(lowering, build, lambda other: building(other, functions))

    def kernel(right: Callable[..., Any]) -> Callable[..., Any]:
        def noted(context: Any, call: ir.Call) -> Any:
            lowering = right(context, call)
            return lowering if lowering is None else building(lowering, found.kernels.setdefault(key_of(call), []))

        return noted

    def rule(name: str) -> Callable[..., Any]:
        right = folding._RULES[name]

        def noted(scope: Any, call: ir.Call, shape: tuple[Any, ...]) -> Any:
            folded = right(scope, call, shape)
            if folded is None:
                return None

            def element(reader: Any, at: Sequence[Any]) -> Any:
                found.folded[key_of(call)] = None
                return folded.element(reader, at)

            return replace(folded, element=element)

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
