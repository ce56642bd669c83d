"""Attention to values that are a linear layer of something narrower: it attends to that, and projects the result.

    softmax(Q·Kᵀ) · (X·W + b) = (softmax(Q·Kᵀ) · X) · W + b

because each row of the softmax adds up to one. It is exact but for rounding, and saves work where X has fewer channels
than values and there are not very few keys: the second product of attention is narrower, and the projection has as many
rows as there are queries. Where a query may have no keys, its result is zero and not b; so there may be no mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tvm import ir, relax

from harness.compiler.schedules.common.attention import recognized
from harness.compiler.schedules.common.graph import Facts, extents, is_call, static_shape
from harness.compiler.schedules.common.scope import Scope
from harness.compiler.schedules.cpu.moves import Reindex, source_of

_ATTENTION = "relax.nn.attention"


@dataclass(frozen=True)
class Projection:
    """A linear layer whose result is the value of an attention with one head.

    Attributes:
        source: What it is a layer of, [..., narrow].
        rows: Batch, key and head of a value → index of its row in the source.
        weight: [narrow, wide].
        bias: Broadcast to the result, one number for each channel; None if there is none.
        narrow: Channels of the source.
        bindings: The variables from the value back to the layer's product, which is one of them.
    """

    source: relax.Expr
    rows: Reindex
    weight: relax.Expr
    bias: relax.Expr | None
    narrow: int
    bindings: tuple[relax.Var, ...]


def projection_of(scope: Scope, attention: ir.Call) -> Projection | None:
    """The linear layer that can as well follow an attention, if that saves work."""
    if not is_call(attention, _ATTENTION) or len(attention.args) > 3:
        return None
    problem = recognized(attention, ("float32",), None, symbolic_keys=True)
    if problem is None or problem.heads != 1 or problem.diagonal is not None:
        return None
    keys, width = problem.keys, problem.width
    moved = source_of(scope, attention.args[2])
    product, biased, bias = layer_of(scope, moved.source, width)
    if product is None:
        return None
    matmul = scope.definition(product)
    source, weight = matmul.args[0], scope.unexpanded(matmul.args[1])
    matrix, rows = static_shape(weight), extents(source)
    if matrix is None or len(matrix) != 2 or rows is None or len(rows) < 2 or str(source.ty.dtype) != "float32":
        return None
    narrow = matrix[0]
    if narrow >= width or (isinstance(keys, int) and keys * (width - narrow) <= narrow * width):
        return None
    bindings = dict.fromkeys([*moved.between, moved.source, *biased, product])
    return Projection(source, moved.index, weight, bias, narrow, tuple(bindings))


def movable(scope: Scope, facts: Facts) -> frozenset[relax.Var]:
    """The variables of all linear layers that can follow an attention and that nothing else reads."""
    return frozenset(variable for bindings in _movable(scope, facts) for variable in bindings)


def _movable(scope: Scope, facts: Facts) -> Iterator[tuple[relax.Var, ...]]:
    for variable, value in facts.bindings.items():
        projection = projection_of(scope, value) if is_call(value, _ATTENTION) else None
        if projection is None or any(argument.same_as(value.args[2]) for argument in value.args[:2]):
            continue
        own = {*projection.bindings, variable}
        if all(user in own for part in projection.bindings for user in facts.users.get(part, ())):
            yield projection.bindings


def layer_of(
    scope: Scope, value: relax.Expr, width: int
) -> tuple[relax.Expr | None, tuple[relax.Expr, ...], relax.Expr | None]:
    """The product of a linear layer, the sum with its bias, and the bias, as far as there are any.

    Args:
        scope: The function around it.
        value: The layer's result.
        width: Its channels.
    """
    definition = scope.definition(value)
    if is_call(definition, "relax.matmul"):
        return value, (), None
    if is_call(definition, "relax.add"):
        for product, bias in (definition.args, tuple(definition.args)[::-1]):
            if is_call(scope.definition(product), "relax.matmul") and _one_per_channel(bias, width):
                return product, (value,), bias
    return None, (), None


def _one_per_channel(bias: relax.Expr, width: int) -> bool:
    shape: Any = static_shape(bias)
    return bool(shape) and len(shape) <= 4 and shape[-1] == width and all(extent == 1 for extent in shape[:-1])
