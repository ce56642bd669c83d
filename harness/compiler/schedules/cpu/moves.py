"""Where a row of a tensor lay before it was moved, for tensors whose extents may be symbolic.

`harness.compiler.schedules.common.folding` follows elements, and arithmetic on them. This module follows whole rows
through permutations and reshapes, and counts rows within static dimensions only: a symbolic dimension must stay one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax, sym

from harness.compiler.schedules.common.folding import ravel, unravel
from harness.compiler.schedules.common.graph import extents, is_call, permutation
from harness.compiler.schedules.common.scope import Scope

Reindex = Callable[[sym.Analyzer, Sequence[Any]], list[Any]]
"""(analyzer, index after a move) → index before it."""

_RESHAPES = ("relax.reshape", "relax.expand_dims", "relax.squeeze")


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
    """Follows a tensor back through permutations and reshapes, as far as they keep its last dimension as it is.

    Args:
        scope: The function around it.
        value: The tensor.
    """
    moved = Moved(value, lambda _, at: list(at))
    while True:
        definition = scope.definition(moved.source)
        step = None if moved.source in scope.results or scope.is_parameter(moved.source) else _step(definition)
        if step is None:
            return moved
        moved = Moved(definition.args[0], _after(step, moved.index), (*moved.between, moved.source))


def _after(step: Reindex, index: Reindex) -> Reindex:
    return lambda analyzer, at: step(analyzer, index(analyzer, at))


def _step(definition: relax.Expr) -> Reindex | None:
    """The index before one move; None if it is none that can be followed."""
    if not is_call(definition, "relax.permute_dims", *_RESHAPES):
        return None
    before, after = extents(definition.args[0]), extents(definition)
    if before is None or after is None:
        return None
    if is_call(definition, "relax.permute_dims"):
        axes = permutation(definition)
        if axes[-1:] != (len(axes) - 1,):
            return None
        return lambda _, at: [at[axes.index(d)] for d in range(len(axes) - 1)]
    return _reshaped(before[:-1], after[:-1]) if before[-1:] == after[-1:] else None


def _reshaped(before: Sequence[Any], after: Sequence[Any]) -> Reindex | None:
    """The index before a reshape that changes nothing but static dimensions on either side of symbolic ones."""
    parts, others = _parts(before), _parts(after)
    if len(parts) != len(others):
        return None
    if any(math.prod(static) != math.prod(other) for (static, _), (other, _) in zip(parts, others, strict=True)):
        return None
    symbolic = [(extent, other) for (_, extent), (_, other) in zip(parts[:-1], others[:-1], strict=True)]
    if not all(sym.Analyzer().can_prove_equal(extent, other) for extent, other in symbolic):
        return None

    def index(analyzer: sym.Analyzer, at: Sequence[Any]) -> list[Any]:
        found: list[Any] = []
        start = 0
        for (static, extent), (other, _) in zip(parts, others, strict=True):
            own = list(at[start : start + len(other)])
            found += own if static == other else unravel(analyzer, ravel(own, other), static)
            start += len(other)
            if extent is not None:
                found.append(at[start])
                start += 1
        return found

    return index


def _parts(shape: Sequence[Any]) -> list[tuple[list[int], Any]]:
    """Static extents and the symbolic one that follows them, the last time None."""
    found: list[tuple[list[int], Any]] = []
    static: list[int] = []
    for extent in shape:
        if isinstance(extent, int):
            static.append(extent)
        else:
            found.append((static, extent))
            static = []
    return [*found, (static, None)]
