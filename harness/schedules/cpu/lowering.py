"""The plain data between recognising an operator on Relax and emitting its kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import ir, relax, tirx
from tvm.relax.expr_functor import PyExprVisitor, visitor

from harness.schedules import UNTUNED, Schedules
from harness.schedules.cpu.epilogue import Epilogue, Place
from harness.schedules.cpu.schedule import Problem, decided
from harness.schedules.cpu.tile import VectorUnit

Build = Callable[[relax.BlockBuilder, Sequence[relax.Expr], Epilogue], relax.Expr]
"""(builder, the lowering's inputs and then the epilogue's operands, epilogue) → the call of the kernel."""


@dataclass(frozen=True)
class Lowering:
    """How one operator becomes a kernel.

    Attributes:
        inputs: The expressions that the kernel reads; not necessarily the operator's own arguments.
        place: How the result is laid out; None if no epilogue may be attached.
        build: Emits packing and kernel.
        permuted: Takes the axes of a `permute_dims` that follows; returns the lowering that does it as well.
    """

    inputs: tuple[relax.Expr, ...]
    place: Place | None
    build: Build
    permuted: Callable[[tuple[int, ...]], Lowering | None] | None = None


@dataclass(frozen=True)
class Context:
    """What a lowering may ask about the function around it.

    Attributes:
        unit: The target's vector registers.
        bindings: The value of every bound variable.
        parameters: Variables that depend on nothing but parameters and constants.
        results: Variables that hold what a kernel computes, as far as the function has been planned.
        functions: The functions of the module, by the variables that calls name them by.
        schedules: What tuning found, by key of the kernel's problem.
        problems: What schedules were asked for, call by call.
    """

    unit: VectorUnit
    bindings: dict[relax.Var, relax.Expr]
    parameters: frozenset[relax.Var]
    results: set[relax.Var] = field(default_factory=set)
    functions: Mapping[ir.GlobalVar, ir.BaseFunc] = field(default_factory=dict)
    schedules: Schedules = field(default_factory=lambda: UNTUNED)
    problems: list[Problem] = field(default_factory=list)

    def decide(self, problem: Problem) -> dict[str, int]:
        """The complete schedule of a problem, which is noted.

        Raises:
            HarnessError: Tuning found one that cannot be used.
        """
        self.problems.append(problem)
        return decided(problem, self.unit, self.schedules.get(problem.key, {}))

    def is_parameter(self, value: relax.Expr) -> bool:
        """Whether the value is known when the model is loaded."""
        return isinstance(value, ir.Constant) or value in self.parameters

    def definition(self, value: relax.Expr) -> relax.Expr:
        """The expression that a variable is bound to; anything else is returned as it is."""
        return self.bindings.get(value, value) if isinstance(value, relax.Var) else value

    def transposed(self, value: relax.Expr) -> relax.Expr | None:
        """The source of a swap of the last two dimensions, or None."""
        definition = self.definition(value)
        if not is_call(definition, "relax.permute_dims"):
            return None
        order = permutation(definition)
        rank = len(order)
        return definition.args[0] if rank >= 2 and order == (*range(rank - 2), rank - 1, rank - 2) else None

    def unexpanded(self, value: relax.Expr) -> relax.Expr:
        """What a value was before its leading dimensions were expanded; the value itself if they were not."""
        definition = self.definition(value)
        if not is_call(definition, "relax.broadcast_to"):
            return value
        source = definition.args[0]
        before, after = static_shape(source), static_shape(value)
        if before is None or after is None or len(before) < 2 or before[-2:] != after[-2:]:
            return value
        return self.unexpanded(source)


def permutation(call: ir.Call) -> tuple[int, ...]:
    """The axes of a `relax.permute_dims`."""
    rank = len(call.ty.shape)
    axes = call.attrs.axes
    return tuple(range(rank))[::-1] if axes is None else tuple(int(axis) % rank for axis in axes)


def is_call(value: Any, *names: str) -> bool:
    """Whether this is a call of one of these Relax operators."""
    return isinstance(value, ir.Call) and getattr(value.op, "name", None) in names


def static_shape(value: relax.Expr, dtype: str | None = "float32") -> tuple[int, ...] | None:
    """The shape of a tensor of that dtype (any if None); None where either is unknown or differs."""
    ty = value.ty
    if not isinstance(ty, relax.TensorType) or ty.shape is None or (dtype is not None and str(ty.dtype) != dtype):
        return None
    extents = list(ty.shape)
    if not all(isinstance(extent, tirx.IntImm) for extent in extents):
        return None
    return tuple(int(extent) for extent in extents)


def call(
    builder: relax.BlockBuilder, name: str, function: tirx.PrimFunc, arguments: Sequence[relax.Expr]
) -> relax.Expr:
    """A call of a kernel whose last parameter is its result; identical kernels share one function."""
    result = function.params[-1]
    variable = builder.add_func(function, name)
    ty = relax.TensorType([int(extent) for extent in result.shape], str(result.dtype))
    return relax.call_tir(variable, list(arguments), out_ty=ty)


@dataclass(frozen=True)
class Facts:
    """What is bound in a function, in order, and the variables whose values read each; None is the function itself."""

    bindings: dict[relax.Var, relax.Expr] = field(default_factory=dict)
    users: dict[relax.Var, list[relax.Var | None]] = field(default_factory=dict)


def facts_of(function: relax.Function) -> Facts:
    """What is bound in a function, and who reads it."""
    facts = Facts()
    _Collector(facts).visit_expr(function)
    return facts


@visitor
class _Collector(PyExprVisitor):  # type: ignore[misc]
    """Writes down facts."""

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self.facts = facts
        self.current: relax.Var | None = None

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        self.facts.bindings[binding.var] = binding.value
        self.current = binding.var
        self.visit_expr(binding.value)
        self.current = None

    def visit_var_(self, op: relax.Var) -> None:
        self.facts.users.setdefault(op, []).append(self.current)

    def visit_dataflow_var_(self, op: relax.Var) -> None:
        self.facts.users.setdefault(op, []).append(self.current)
