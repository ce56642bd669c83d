"""Keys that are a linear layer of something narrower: the kernel computes them while it packs a block of keys.

    K = X·W + b

A block of keys is packed once for all queries, so that the layer takes as many operations as it takes by itself, and
the keys, whose number may not be known when the kernel is compiled, never lie in memory. What follows the layer and
reads one row of its result for each key (permutations, slices, rotary position encoding) is done as keys are packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import ir, relax, sym, tirx

from harness.compiler.schedules.common.folding import FOLDED, Folded, Reader, fold
from harness.compiler.schedules.common.graph import Facts, extents, is_call, same, static_shape
from harness.compiler.schedules.common.scope import Scope
from harness.compiler.schedules.cpu.moves import Reindex
from harness.compiler.schedules.cpu.value_projection import layer_of


@dataclass(frozen=True)
class KeyLayer:
    """A linear layer whose result is the key of an attention with one head.

    Attributes:
        result: The variable that holds its result.
        source: What it is a layer of, [..., narrow].
        rows: Batch and number of a key → index of its row in the source.
        weight: [narrow, wide].
        bias: Broadcast to the result, one number for each channel; None if there is none.
        bindings: The variables from the layer's product to the key, all of which nothing but the key needs.
    """

    result: relax.Var
    source: relax.Expr
    rows: Reindex
    weight: relax.Expr
    bias: relax.Expr | None
    bindings: tuple[relax.Var, ...]

    def key(self, scope: Scope, key: relax.Expr) -> tuple[Folded, int | None]:
        """The key as a function of the layer's result, and the number of that among the inputs, if it is one."""
        folded = fold(replace(scope, results={*scope.results, self.result}, symbolic=True), key)
        return folded, next((n for n, value in enumerate(folded.inputs) if value.same_as(self.result)), None)


def key_layer_of(scope: Scope, facts: Facts, variable: relax.Var) -> KeyLayer | None:
    """The linear layer that the kernel of an attention with one head can compute; None if there is none.

    Args:
        scope: The function around it.
        facts: Who reads what in the function.
        variable: Holds the attention.
    """
    attention = scope.definition(variable)
    key = attention.args[1]
    shape = extents(key)
    if shape is None or len(shape) != 4 or not isinstance(shape[3], int):
        return None
    result = _result(scope, key, shape[3])
    if result is None:
        return None
    product, _, bias = layer_of(scope, result, shape[3])
    matmul = scope.definition(product)
    source, weight = matmul.args[0], scope.unexpanded(matmul.args[1])
    matrix, rows = static_shape(weight), extents(source)
    if matrix is None or len(matrix) != 2 or rows is None or len(rows) < 2 or str(source.ty.dtype) != "float32":
        return None
    own = _between(scope, facts, product, variable)
    if own is None or any(part.same_as(other) for part in own for other in (attention.args[0], attention.args[2])):
        return None
    if matrix[0] >= shape[3] or not scope.is_parameter(weight):
        return None
    layer = KeyLayer(result, source, _unmoved, weight, bias, own)
    folded, place = layer.key(scope, key)
    if place is None or len(set(own).intersection(folded.inputs)) > 1:
        return None
    row = _row_of(folded, place)
    return None if row is None else replace(layer, rows=row)


def _unmoved(_analyzer: sym.Analyzer, at: Sequence[Any]) -> list[Any]:
    return list(at)


def _result(scope: Scope, key: relax.Expr, width: int) -> relax.Var | None:
    """The only linear layer that a tensor comes from by operations that can be folded; None if there is not one."""
    found: list[relax.Var] = []
    waiting: list[Any] = [key]
    seen: set[relax.Var] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, relax.Tuple):
            waiting.extend(value.fields)
            continue
        if (
            not isinstance(value, relax.Var)
            or value in seen
            or value not in scope.bindings
            or scope.is_parameter(value)
        ):
            continue
        seen.add(value)
        definition = scope.bindings[value]
        if layer_of(scope, value, width)[0] is not None:
            found.append(value)
        elif isinstance(definition, relax.TupleGetItem):
            waiting.append(definition.tuple_value)
        elif isinstance(definition, relax.Tuple):
            waiting.append(definition)
        elif is_call(definition, *FOLDED):
            waiting.extend(definition.args)
    return found[0] if len(found) == 1 else None


def _between(scope: Scope, facts: Facts, product: relax.Var, attention: relax.Var) -> tuple[relax.Var, ...] | None:
    """The variables from a layer's product, with it, to the attention; None where something else needs one of them."""
    found: dict[relax.Var, None] = {product: None}
    waiting = [product]
    while waiting:
        for user in facts.users.get(waiting.pop(), ()):
            if user is not None and user.same_as(attention):
                continue
            if user is None or not _folds(scope.bindings[user]):
                return None
            if user not in found:
                found[user] = None
                waiting.append(user)
    return tuple(found)


def _folds(definition: relax.Expr) -> bool:
    return isinstance(definition, relax.Tuple | relax.TupleGetItem) or is_call(definition, *FOLDED)


def _row_of(key: Folded, place: int) -> Reindex | None:
    """(batch, key, head) → index of the one row of input number `place` that a key needs; None if it needs several."""
    b, token, pair = (tirx.Var(name, "int64") for name in ("b", "key", "pair"))
    batch, _, _, channels = key.shape
    analyzer = sym.Analyzer()
    for variable, count in ((b, batch), (pair, channels // key.period)):
        analyzer.bind(variable, ir.Range(tirx.const(0, "int64"), tirx.const(count, "int64")))

    def rows(analyzer: sym.Analyzer, at: Sequence[Any], channel: Any) -> list[list[Any]]:
        records = [_Record() for _ in key.inputs]
        key.element(Reader(records, analyzer), [*at, channel])
        return [[analyzer.simplify(tirx.convert(part)) for part in row] for row in records[place].rows]

    def row(analyzer: sym.Analyzer, at: Sequence[Any]) -> list[Any]:
        return rows(analyzer, at, 0)[0]

    own = row(analyzer, (b, token, 0))
    read = [other for n in range(key.period) for other in rows(analyzer, (b, token, 0), pair * key.period + n)]
    return row if all(same(other, own) for other in read) else None


class _Record:
    """Stands in for a buffer: writes down of which rows elements are read."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []

    def __getitem__(self, index: tuple[Any, ...]) -> Any:
        self.rows.append(tuple(index[:-1]))
        return tirx.const(0.0, "float32")
