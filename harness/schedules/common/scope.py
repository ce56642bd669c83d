"""The Relax function around an operator, as rewrites for every target ask about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tvm import ir, relax


@dataclass(frozen=True)
class Scope:
    """The values of a function.

    Attributes:
        bindings: The value of every bound variable.
        parameters: Variables that depend on nothing but parameters and constants.
        results: Variables that hold what a kernel stores, as far as that is known.
        functions: The functions of the module, by the variables that calls name them by.
        symbolic: Whether tensors with symbolic extents are followed as well as those of static shape.
    """

    bindings: dict[relax.Var, relax.Expr]
    parameters: frozenset[relax.Var] = frozenset()
    results: set[relax.Var] = field(default_factory=set)
    functions: Mapping[ir.GlobalVar, ir.BaseFunc] = field(default_factory=dict)
    symbolic: bool = False

    def is_parameter(self, value: relax.Expr) -> bool:
        """Returns whether the value is known when the model is loaded."""
        return isinstance(value, ir.Constant) or value in self.parameters

    def definition(self, value: relax.Expr) -> relax.Expr:
        """Returns the expression that a variable is bound to; anything else is returned as it is."""
        return self.bindings.get(value, value) if isinstance(value, relax.Var) else value
