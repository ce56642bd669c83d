"""Describes the Relax function around an operator, for the rewrites of every target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tvm import ir, relax

from harness.compiler.schedules.common.graph import is_call, static_shape


@dataclass(frozen=True)
class Scope:
    """The values of a function.

    Attributes:
        bindings: The value of every bound variable.
        parameters: Variables that depend only on parameters and constants.
        results: Variables that hold the results of known kernels.
        functions: The functions of the module by their global variables.
        symbolic: Whether tensors with symbolic extents are folded, too.
        known: Tensors that are already folded (`folding.Folded`).
    """

    bindings: dict[relax.Var, relax.Expr]
    parameters: frozenset[relax.Var] = frozenset()
    results: set[relax.Var] = field(default_factory=set)
    functions: Mapping[ir.GlobalVar, ir.BaseFunc] = field(default_factory=dict)
    symbolic: bool = False
    known: Mapping[relax.Var, Any] = field(default_factory=dict)

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
