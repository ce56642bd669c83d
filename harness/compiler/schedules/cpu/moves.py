"""Traces rows of moved tensors to their place before the moves, for tensors whose extents may be symbolic.

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
"""Takes an analyzer and an index after a move, and returns the index before it."""

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
    moved = Moved(value, lambda _, index: list(index))
    while True:
        definition = scope.definition(moved.source)
        step = None if moved.source in scope.results or scope.is_parameter(moved.source) else _step(definition)
        if step is None:
            return moved
        moved = Moved(definition.args[0], _after(step, moved.index), (*moved.between, moved.source))


def _after(step: Reindex, index: Reindex) -> Reindex:
    return lambda analyzer, position: step(analyzer, index(analyzer, position))


def _step(definition: relax.Expr) -> Reindex | None:
    """Returns the function to the index before one move; None if the move cannot be followed."""
    if not is_call(definition, "relax.permute_dims", *_RESHAPES):
        return None
    source, result = extents(definition.args[0]), extents(definition)
    if source is None or result is None:
        return None
    if is_call(definition, "relax.permute_dims"):
        axes = permutation(definition)
        if axes[-1:] != (len(axes) - 1,):
            return None
        return lambda _, index: [index[axes.index(d)] for d in range(len(axes) - 1)]
    return _reshaped(source[:-1], result[:-1]) if source[-1:] == result[-1:] else None


def _reshaped(source_shape: Sequence[Any], result_shape: Sequence[Any]) -> Reindex | None:
    """Returns the function to the index before a reshape of static dimensions around symbolic ones; None for others."""
    parts, result_parts = _parts(source_shape), _parts(result_shape)
    if len(parts) != len(result_parts):
        return None
    if any(
        math.prod(static) != math.prod(counterpart)
        for (static, _), (counterpart, _) in zip(parts, result_parts, strict=True)
    ):
        return None
    symbolic = [
        (extent, counterpart) for (_, extent), (_, counterpart) in zip(parts[:-1], result_parts[:-1], strict=True)
    ]
    if not all(sym.Analyzer().can_prove_equal(extent, counterpart) for extent, counterpart in symbolic):
        return None

    def index(analyzer: sym.Analyzer, position: Sequence[Any]) -> list[Any]:
        indices: list[Any] = []
        start = 0
        for (static, extent), (counterpart, _) in zip(parts, result_parts, strict=True):
            part = list(position[start : start + len(counterpart)])
            indices += part if static == counterpart else unravel(analyzer, ravel(part, counterpart), static)
            start += len(counterpart)
            if extent is not None:
                indices.append(position[start])
                start += 1
        return indices

    return index


def _parts(shape: Sequence[Any]) -> list[tuple[list[int], Any]]:
    """Returns static extents with the symbolic extent that follows them, None at the end."""
    parts: list[tuple[list[int], Any]] = []
    static: list[int] = []
    for extent in shape:
        if isinstance(extent, int):
            static.append(extent)
        else:
            parts.append((static, extent))
            static = []
    return [*parts, (static, None)]
