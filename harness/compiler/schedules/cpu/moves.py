"""Traces rows of moved tensors to their place before the moves, for tensors whose extents may be symbolic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm import ir, relax, sym

from harness.compiler import tir as T
from harness.compiler.schedules.common.folding import Folded, index_before, moved
from harness.compiler.schedules.common.graph import MOVES, between, extents, is_call, same
from harness.compiler.schedules.common.scope import Scope

Reindex = Callable[[sym.Analyzer, Sequence[T.Index]], Sequence[T.Index]]
"""Takes an analyzer and an index after a move, and returns the index before it."""


@dataclass(frozen=True)
class Moved:
    """A tensor whose rows are those of another one.

    Attributes:
        source: The other one.
        index: Index of a row, without the last dimension → index of the same row of the source.
        between: The variables from the tensor to the source, which is not among them.
    """

    source: relax.Expr
    index: Reindex
    between: tuple[relax.Var, ...] = ()


def source_of(scope: Scope, value: relax.Expr) -> Moved:
    """Follows a tensor back through permutations and reshapes of whole rows; returns it itself where rows are split.

    Args:
        scope: The function around it.
        value: The tensor.
    """
    computed = {variable for variable, bound in scope.bindings.items() if not is_call(bound, *MOVES)}
    folded = moved(replace(scope, results=scope.results | computed, symbolic=True), value)
    source = folded.inputs[0]

    def index(analyzer: sym.Analyzer, row: Sequence[T.Index]) -> list[T.Index]:
        return index_before(folded, analyzer, [*row, 0])[:-1]

    if source.same_as(value) or not _keeps_rows(folded):
        return Moved(value, lambda _, row: list(row))
    return Moved(source, index, tuple(between(scope.bindings, value, [source])))


def _keeps_rows(folded: Folded) -> bool:
    """Returns whether every row is a whole row of the source."""
    width = folded.shape[-1]
    analyzer = sym.Analyzer()
    index = [T.Var(f"i{n}", "int64") for n in range(len(folded.shape))]
    for variable, extent in zip(index, folded.shape, strict=True):
        analyzer.bind(variable, ir.Range(T.const(0, "int64"), T.Cast("int64", T.convert(extent))))
    *row, column = index_before(folded, analyzer, index)
    *same_row, first = index_before(folded, analyzer, [*index[:-1], 0])
    whole = extents(folded.inputs[0]) or ()
    return same([*row, column, first, *whole[-1:]], [*same_row, index[-1], 0, width])
