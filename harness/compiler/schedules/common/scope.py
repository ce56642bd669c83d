"""Describes the Relax function around an operator, for the rewrites of every target."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tvm import ir, relax
from tvm.relax.expr_functor import PyExprVisitor, visitor

from harness.compiler.schedules.common.graph import is_call, static_shape


@dataclass(frozen=True)
class Scope:
    """The values of a function.

    Attributes:
        bindings: The value of every bound variable, in order.
        users: The variables whose values use each variable, once for each use; None stands for the function itself.
        parameters: Variables that depend only on parameters and constants.
        results: Variables that hold the results of known kernels.
        functions: The functions of the module by their global variables.
        symbolic: Whether tensors with symbolic extents are folded, too.
        known: Tensors that are already folded (`folding.Folded`).
    """

    bindings: dict[relax.Var, relax.Expr]
    users: dict[relax.Var, list[relax.Var | None]]
    parameters: frozenset[relax.Var] = frozenset()
    results: set[relax.Var] = field(default_factory=set)
    functions: Mapping[ir.GlobalVar, ir.BaseFunc] = field(default_factory=dict)
    symbolic: bool = False
    known: Mapping[relax.Var, Any] = field(default_factory=dict)

    def only_user(self, variable: relax.Var) -> relax.Var | None:
        """Returns the binding that is the only one to use a variable of the same dataflow block, which it uses once."""
        users = self.users.get(variable, [])
        return users[0] if isinstance(variable, relax.DataflowVar) and len(users) == 1 else None

    def only_users(self, variable: relax.Var) -> Iterator[relax.Var]:
        """Yields the only user of a variable, then the only user of that one, and so on."""
        user = self.only_user(variable)
        while user is not None:
            yield user
            user = self.only_user(user)

    def is_parameter(self, value: relax.Expr) -> bool:
        """Returns whether the value is known when the model is loaded."""
        return isinstance(value, ir.Constant) or value in self.parameters

    def definition(self, value: relax.Expr) -> relax.Expr:
        """Returns the expression that a variable is bound to; anything else is returned as it is."""
        return self.bindings.get(value, value) if isinstance(value, relax.Var) else value

    def before_broadcast(self, value: relax.Expr) -> relax.Expr:
        """Returns the source of a value whose leading dimensions were broadcast; otherwise the value itself."""
        definition = self.definition(value)
        if is_call(definition, "relax.reshape"):
            return self._before_reshape(value, definition.args[0])
        if not is_call(definition, "relax.broadcast_to"):
            return value
        source = definition.args[0]
        source_shape, shape = static_shape(source, None), static_shape(value, None)
        if source_shape is None or shape is None or len(source_shape) < 2 or source_shape[-2:] != shape[-2:]:
            return value
        return self.before_broadcast(source)

    def _before_reshape(self, value: relax.Expr, expanded: relax.Expr) -> relax.Expr:
        """Returns the weight whose broadcast `expanded` was reshaped to the value; otherwise the value itself."""
        matrix = self.before_broadcast(expanded)
        matrix_shape, shape = static_shape(matrix, None), static_shape(value, None)
        if matrix.same_as(expanded) or not self.is_parameter(matrix) or matrix_shape is None or shape is None:
            return value
        is_same = (
            math.prod(matrix_shape[:-2]) == 1 and len(matrix_shape) <= len(shape) and matrix_shape[-2:] == shape[-2:]
        )
        return matrix if is_same else value


def scope_of(function: relax.Function) -> Scope:
    """Returns the values of a function, of which none is known to be the result of a kernel."""
    collector = _Collector()
    collector.visit_expr(function)
    return Scope(collector.bindings, collector.users, _parameters_of(function, collector.bindings))


def _parameters_of(function: relax.Function, bindings: Mapping[relax.Var, relax.Expr]) -> frozenset[relax.Var]:
    """Returns the variables that depend only on parameters (after the first `num_input`) and constants."""
    attributes = function.attrs or {}
    if "num_input" not in attributes:
        return frozenset()
    parameters: set[relax.Var] = set(function.params[int(attributes["num_input"]) :])
    for variable, value in bindings.items():
        variables = relax.analysis.free_vars(value)
        if isinstance(value, ir.Call | relax.Var | relax.TupleGetItem | relax.Tuple) and all(
            v in parameters for v in variables
        ):
            parameters.add(variable)
    return frozenset(parameters)


@visitor
class _Collector(PyExprVisitor):  # type: ignore[misc]
    """Collects the bindings of a function and the users of their variables."""

    def __init__(self) -> None:
        super().__init__()
        self.bindings: dict[relax.Var, relax.Expr] = {}
        self.users: dict[relax.Var, list[relax.Var | None]] = {}
        self.current: relax.Var | None = None

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        self.bindings[binding.var] = binding.value
        self.current = binding.var
        self.visit_expr(binding.value)
        self.current = None

    def visit_var_(self, op: relax.Var) -> None:
        self.users.setdefault(op, []).append(self.current)

    def visit_dataflow_var_(self, op: relax.Var) -> None:
        self.users.setdefault(op, []).append(self.current)
