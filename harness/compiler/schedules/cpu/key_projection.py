"""Finds keys that are a linear layer of fewer channels, which a kernel computes while it packs a block of keys.

    K = X·W + b

A block of keys is packed once for all queries, so that the layer takes as many operations as it takes by itself, and
the keys, whose number may not be known when the kernel is compiled, never lie in memory. What follows the layer and
reads one row of its result for each key (permutations, slices, rotary position encoding) is done as keys are packed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tvm import ir, relax, sym

from harness.compiler import tir as T
from harness.compiler.schedules.common.folding import FOLDED, Folded, Reader, fold
from harness.compiler.schedules.common.graph import Facts, extents, is_call, same
from harness.compiler.schedules.common.scope import Scope
from harness.compiler.schedules.cpu.moves import Reindex
from harness.compiler.schedules.cpu.operand_layer import OperandLayer, is_only_reader, layer_of

_KEY = 1
"""The number of the operator's operand."""


def key_layer_of(scope: Scope, facts: Facts, variable: relax.Var) -> OperandLayer | None:
    """Returns the linear layer that the kernel of an attention with one head can compute; None if there is none.

    Args:
        scope: The function around it.
        facts: The bindings of the function and their users.
        variable: Holds the attention.
    """
    key = scope.definition(variable).args[_KEY]
    shape = extents(key)
    if shape is None or len(shape) != 4 or not isinstance(shape[3], int):
        return None
    layers = _layers(scope, shape[3])
    folded = fold_key(scope, layers, key)
    results = layers.keys() & set(folded.inputs)
    if len(results) != 1:
        return None
    layer = layers[results.pop()]
    bindings = _dependents(facts, layer.product, variable)
    if layer.narrow >= shape[3] or not scope.is_parameter(layer.weight):
        return None
    if not all(_folds(scope.bindings[v]) for v in bindings[1:]) or not is_only_reader(facts, bindings, variable, _KEY):
        return None
    row = _row_of(folded, layer.result) if set(bindings) & set(folded.inputs) == {layer.result} else None
    return None if row is None else replace(layer, rows=row, bindings=bindings)


def fold_key(scope: Scope, results: Iterable[relax.Var], key: relax.Expr) -> Folded:
    """Returns a key as a function of the results of linear layers and of other tensors."""
    return fold(replace(scope, results={*scope.results, *results}, symbolic=True), key)


def _layers(scope: Scope, width: int) -> dict[relax.Var, OperandLayer]:
    """Returns all linear layers of so many channels whose inputs are not known when weights are, by their results."""
    layers = {variable: layer_of(scope, variable, width) for variable in scope.bindings}
    return {v: layer for v, layer in layers.items() if layer is not None and not scope.is_parameter(v)}


def _dependents(facts: Facts, product: relax.Var, attention: relax.Var) -> tuple[relax.Var, ...]:
    """Returns the variables that depend on a product, itself the first, otherwise than by way of the attention."""
    variables = {product: None}
    for variable, value in facts.bindings.items():
        if not variable.same_as(attention) and any(v in variables for v in relax.analysis.free_vars(value)):
            variables[variable] = None
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

    def rows(analyzer: sym.Analyzer, index: Sequence[T.Index]) -> list[list[T.Expr]]:
        records = [_Record() for _ in key.inputs]
        key.element(Reader(records, analyzer), index)
        (of_result,) = (record for record, value in zip(records, key.inputs, strict=True) if value.same_as(result))
        return [[analyzer.simplify(T.convert(part)) for part in row] for row in of_result.rows]

    def row(analyzer: sym.Analyzer, index: Sequence[T.Index]) -> list[T.Expr]:
        return rows(analyzer, [*index, 0])[0]

    first_row = row(analyzer, (b, token, 0))
    channels_read = (pair * key.period + n for n in range(key.period))
    others = (other for channel in channels_read for other in rows(analyzer, (b, token, 0, channel)))
    return row if all(same(other, first_row) for other in others) else None


class _Record:
    """Stands in for a buffer: records the rows of the elements that are read."""

    def __init__(self) -> None:
        self.rows: list[tuple[T.Index, ...]] = []

    def __getitem__(self, index: tuple[T.Index, ...]) -> T.Expr:
        self.rows.append(tuple(index[:-1]))
        return T.const(0.0, "float32")
