"""Finds keys that are a linear layer of fewer channels, which a kernel computes while it packs a block of keys.

    K = X·W + b

A block of keys is packed once for all queries, so that the layer takes as many operations as it takes by itself, and
the keys, whose number may not be known when the kernel is compiled, never lie in memory. What follows the layer and
reads one row of its result for each key (permutations, slices, rotary position encoding) is done as keys are packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import ir, relax, sym

from harness.compiler import tir as T
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
        source: The layer's input, [..., narrow].
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

    def key(self, scope: Scope, key: relax.Expr) -> Folded:
        """Returns the key as a function of the layer's result, if that is one of its inputs, and of other tensors."""
        return fold(replace(scope, results={*scope.results, self.result}, symbolic=True), key)


def key_layer_of(scope: Scope, facts: Facts, variable: relax.Var) -> KeyLayer | None:
    """Returns the linear layer that the kernel of an attention with one head can compute; None if there is none.

    Args:
        scope: The function around it.
        facts: The bindings of the function and their users.
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
    source, weight = matmul.args[0], scope.before_broadcast(matmul.args[1])
    matrix, rows = static_shape(weight), extents(source)
    if matrix is None or len(matrix) != 2 or rows is None or len(rows) < 2 or str(source.ty.dtype) != "float32":
        return None
    layer_bindings = _between(scope, facts, product, variable)
    if layer_bindings is None or any(
        part.same_as(other) for part in layer_bindings for other in (attention.args[0], attention.args[2])
    ):
        return None
    if matrix[0] >= shape[3] or not scope.is_parameter(weight):
        return None
    layer = KeyLayer(result, source, _unmoved, weight, bias, layer_bindings)
    folded = layer.key(scope, key)
    if set(layer_bindings).intersection(folded.inputs) != {result}:
        return None
    row = _row_of(folded, result)
    return None if row is None else replace(layer, rows=row)


def _unmoved(_analyzer: sym.Analyzer, index: Sequence[Any]) -> list[Any]:
    return list(index)


def _result(scope: Scope, key: relax.Expr, width: int) -> relax.Var | None:
    """Returns the only linear layer that foldable operations make a tensor of; None if there is not exactly one."""
    layers: list[relax.Var] = []
    waiting: list[Any] = [key]
    visited: set[relax.Var] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, relax.Tuple):
            waiting.extend(value.fields)
            continue
        if (
            not isinstance(value, relax.Var)
            or value in visited
            or value not in scope.bindings
            or scope.is_parameter(value)
        ):
            continue
        visited.add(value)
        definition = scope.bindings[value]
        if layer_of(scope, value, width)[0] is not None:
            layers.append(value)
        elif isinstance(definition, relax.TupleGetItem):
            waiting.append(definition.tuple_value)
        elif isinstance(definition, relax.Tuple):
            waiting.append(definition)
        elif is_call(definition, *FOLDED):
            waiting.extend(definition.args)
    return layers[0] if len(layers) == 1 else None


def _between(scope: Scope, facts: Facts, product: relax.Var, attention: relax.Var) -> tuple[relax.Var, ...] | None:
    """Returns the variables from a layer's product, with it, to the attention; None if anything else reads them."""
    variables: dict[relax.Var, None] = {product: None}
    waiting = [product]
    while waiting:
        for user in facts.users.get(waiting.pop(), ()):
            if user is not None and user.same_as(attention):
                continue
            if user is None or not _folds(scope.bindings[user]):
                return None
            if user not in variables:
                variables[user] = None
                waiting.append(user)
    return tuple(variables)


def _folds(definition: relax.Expr) -> bool:
    return isinstance(definition, relax.Tuple | relax.TupleGetItem) or is_call(definition, *FOLDED)


def _row_of(key: Folded, result: relax.Var) -> Reindex | None:
    """Returns a function from (batch, key, head) to a key's only row of a layer's result; None if it needs several."""
    b, token, pair = (T.Var(name, "int64") for name in ("b", "key", "pair"))
    batch, _, _, channels = key.shape
    analyzer = sym.Analyzer()
    for variable, count in ((b, batch), (pair, channels // key.period)):
        analyzer.bind(variable, ir.Range(T.const(0, "int64"), T.const(count, "int64")))

    def rows(analyzer: sym.Analyzer, index: Sequence[Any], channel: Any) -> list[list[Any]]:
        record = _Record()
        records = [record if value.same_as(result) else _Record() for value in key.inputs]
        key.element(Reader(records, analyzer), [*index, channel])
        return [[analyzer.simplify(T.convert(part)) for part in row] for row in record.rows]

    def row(analyzer: sym.Analyzer, index: Sequence[Any]) -> list[Any]:
        return rows(analyzer, index, 0)[0]

    first_row = row(analyzer, (b, token, 0))
    read = [
        row_of_channel
        for n in range(key.period)
        for row_of_channel in rows(analyzer, (b, token, 0), pair * key.period + n)
    ]
    return row if all(same(row_of_channel, first_row) for row_of_channel in read) else None


class _Record:
    """Stands in for a buffer: records the rows of the elements that are read."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []

    def __getitem__(self, index: tuple[Any, ...]) -> Any:
        self.rows.append(tuple(index[:-1]))
        return T.const(0.0, "float32")
