"""The Relax function around an operator, as rewrites for every target ask about it."""

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
        parameters: Variables that depend on nothing but parameters and constants.
        results: Variables that hold what a kernel stores, as far as that is known.
        functions: The functions of the module, by the variables that calls name them by.
        symbolic: Whether tensors with symbolic extents are followed as well as those of static shape.
        known: Tensors that are already known as functions of their index (`folding.Folded`).
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

    def unexpanded(self, value: relax.Expr) -> relax.Expr:
        """Returns what a value was before its leading dimensions were expanded; the value itself if they were not."""
        definition = self.definition(value)
        if is_call(definition, "relax.reshape"):
            return self._unmerged(value, definition.args[0])
        if not is_call(definition, "relax.broadcast_to"):
            return value
        source = definition.args[0]
        before, after = static_shape(source, None), static_shape(value, None)
        if before is None or after is None or len(before) < 2 or before[-2:] != after[-2:]:
            return value
        return self.unexpanded(source)

    def _unmerged(self, value: relax.Expr, several: relax.Expr) -> relax.Expr:
        """Returns the one weight that `several`, which `value` is a reshape of, was expanded from; else the value."""
        matrix = self.unexpanded(several)
        one, after = static_shape(matrix, None), static_shape(value, None)
        if matrix.same_as(several) or not self.is_parameter(matrix) or one is None or after is None:
            return value
        same = math.prod(one[:-2]) == 1 and len(one) <= len(after) and one[-2:] == after[-2:]
        return matrix if same else value
