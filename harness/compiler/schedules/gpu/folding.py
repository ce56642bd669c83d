"""Folds operands of attention, which are moved, widened or rotated while a block loads them.

An operand is followed back through operations that only move elements (slices of one product of queries, keys and
values, permutations) and through a little arithmetic (rotary position encoding), as on the CPU (`common.folding`).
Moving costs nothing. Arithmetic is done again by every block that loads the operand: once for queries, and for keys
once for each block of queries of a head. It replaces a pass that reads and writes the operand, as long as it is the
shorter of the two by the counts in `pays`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import tvm_ffi
from tvm import ir, relax, sym

from harness.compiler import tir as T
from harness.compiler.schedules.common.folding import BINARY, Folded, can_fold, fold, stored
from harness.compiler.schedules.common.graph import between, is_call
from harness.compiler.schedules.common.scope import Scope, scope_of

_PER_BYTE = 8
"""Instructions of a thread in the time of one byte of memory: H100 10 (33.5·10¹² a second, 3.35 TB/s), A100 6."""

_PRODUCTS = frozenset(f"relax.{name}" for name in ("matmul", "nn.conv2d", "nn.conv2d_transpose"))
_UNARY = frozenset(f"relax.{name}" for name in ("nn.relu", "nn.gelu", "nn.silu", "sigmoid", "negative"))
_FINISHES = frozenset((*_UNARY, *BINARY, "relax.astype"))
"""Operators that a product applies to its sums before it stores them."""


def pays(folded: Folded, item_bytes: int, turns: int) -> bool:
    """Returns whether computing an operand in its load takes less time than a pass that reads and writes it.

    Args:
        folded: The operand.
        item_bytes: Bytes of an element.
        turns: Number of loads of each element.
    """
    return folded.operations * turns <= 2 * item_bytes * _PER_BYTE


def follow(folded: Folded, channels: int) -> bool:
    """Returns whether an operand [batch, position, head, channel] can be loaded four channels at a time."""
    analyzer = sym.Analyzer()
    place = [T.Var(name, "int32") for name in ("batch", "position", "head", "vector")]
    extents = (*folded.shape[:3], math.ceil(channels / 4))
    for variable, extent in zip(place, extents, strict=True):
        analyzer.bind(variable, ir.Range(0, extent))
    reader = folded.placeholders(analyzer)
    return not any(_asks(folded.element(reader, [*place[:3], 4 * place[3] + v])) for v in range(4))


def _asks(value: T.Expr) -> bool:
    calls: list[ir.Call] = []

    def collect(part: object) -> None:
        if isinstance(part, ir.Call) and getattr(part.op, "name", "").endswith("if_then_else"):
            calls.append(part)

    tvm_ffi.structural_walk(value, collect)
    return bool(calls)


class Operands(NamedTuple):
    """Queries, keys and values of an attention as they are loaded."""

    query: Folded
    key: Folded
    value: Folded

    @property
    def inputs(self) -> tuple[relax.Expr, ...]:
        """Returns the tensors in memory that the operands read, each once."""
        return tuple(dict.fromkeys(value for folded in self for value in folded.inputs))


class Folding:
    """The operands of attention that may be folded in one function."""

    def __init__(self, function: relax.Function, functions: Mapping[ir.GlobalVar, ir.BaseFunc]) -> None:
        scope = scope_of(function)
        self.bindings, self._users = scope.bindings, scope.users
        # Nothing is a parameter here: what depends on weights alone is computed in every run, unless it is folded.
        results = _finished_products(self.bindings)
        self._scope = replace(scope, parameters=frozenset(), results=results, functions=functions)

    def operands(self, attention: relax.Var, item_bytes: int, turns: int) -> Operands:
        """Returns the operands of the attention bound to a variable.

        Args:
            attention: The variable.
            item_bytes: Bytes of an element of an operand.
            turns: Number of loads of keys and values: blocks of queries of a head.
        """
        arguments = self.bindings[attention].args[:3]
        scope = self._scope
        while True:
            folded = [
                self._folded(scope, value, item_bytes, often)
                for value, often in zip(arguments, (1, turns, turns), strict=True)
            ]
            inside: set[relax.Var] = set().union(
                *(self._inside(scope, value, x) for value, x in zip(arguments, folded, strict=True))
            )
            shared = {
                variable
                for variable in inside
                if self._computes(scope, variable) and not set(self._users[variable]) <= {attention, *inside}
            }
            if not shared:
                return Operands(*folded)
            # An operand that another operator reads too is computed once, and stored.
            of_shared = {x for x in inside if getattr(self.bindings[x], "tuple_value", None) in shared}
            scope = replace(scope, results=scope.results | shared | of_shared)

    def _folded(self, scope: Scope, value: relax.Expr, item_bytes: int, turns: int) -> Folded:
        if not can_fold(value):  # an unknown number of keys
            return stored(value)
        folded = fold(scope, value)
        if pays(folded, item_bytes, turns) and follow(folded, folded.shape[3]):
            return folded
        # As far back as its elements are only moved.
        computed = {variable for variable in self._inside(scope, value, folded) if self._computes(scope, variable)}
        return fold(replace(scope, results=scope.results | computed), value)

    def _inside(self, scope: Scope, value: relax.Expr, folded: Folded) -> set[relax.Var]:
        """Returns the variables between an operand and its inputs in memory."""
        # One call rotates queries and keys: of the other operand nothing is followed beyond what is stored.
        return set(between(self.bindings, value, (*folded.inputs, *scope.results)))

    def _computes(self, scope: Scope, variable: relax.Var) -> bool:
        """Returns whether a variable's value takes arithmetic on its inputs in memory."""
        if is_call(self.bindings[variable], "relax.call_tir"):
            return True
        return can_fold(variable) and fold(scope, variable).operations > 0


def _finished_products(bindings: Mapping[relax.Var, relax.Expr]) -> set[relax.Var]:
    """Returns the variables of products, with the epilogues in the same kernel."""
    products: set[relax.Var] = set()
    for variable, value in bindings.items():
        operands = value.args if is_call(value, *_FINISHES) else []
        if is_call(value, *_PRODUCTS) or any(isinstance(x, relax.Var) and x in products for x in operands):
            products.add(variable)
    return products
