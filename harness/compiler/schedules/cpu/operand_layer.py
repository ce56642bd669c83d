"""Finds linear layers whose result is an operand of an attention with one head, and which nothing else reads.

Keys that are a linear layer of fewer channels, X·W + b, are computed while a kernel packs a block of keys. A block is
packed once for all queries, so that the layer takes as many operations as it takes by itself, and the keys, whose
number may not be known when the kernel is compiled, never lie in memory. What follows the layer and reads one row of
its result for each key (permutations, slices, rotary position encoding) is done as keys are packed.

Values that are a linear layer of fewer channels are projected behind the attention:

    softmax(Q·Kᵀ) · (X·W + b) = (softmax(Q·Kᵀ) · X) · W + b

because each row of the softmax adds up to one. It is exact but for rounding, and saves work where there are not very
few keys: the second product of attention is narrower, and the projection has as many rows as there are queries. Where a
query may have no keys, its result is zero and not b; so there may be no mask.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from tvm import ir, relax, sym

from harness.compiler import tir as T
from harness.compiler.schedules.common.attention import recognized
from harness.compiler.schedules.common.folding import FOLDED, Folded, Reader, Recorder, fold, index_before, moved
from harness.compiler.schedules.common.graph import MOVES, between, extents, is_call, same, static_shape
from harness.compiler.schedules.common.scope import Scope

_KEY, _VALUE = 1, 2
"""The numbers of attention's operands."""
Reindex = Callable[[sym.Analyzer, Sequence[T.Index]], Sequence[T.Index]]
"""Takes an analyzer and the index of a row of a moved tensor, and returns the index of the same row before the move."""


@dataclass(frozen=True)
class OperandLayer:
    """A linear layer whose result is an operand of an attention with one head.

    Attributes:
        result: The variable that holds its result.
        product: The variable that holds its product; the same where there is no bias.
        source: The layer's input, [..., narrow].
        weight: [narrow, wide].
        bias: Broadcast to the result, one number for each channel; None if there is none.
        narrow: Channels of the source.
        rows: Batch, number and head of a row of the operand → index of its row in the source.
        bindings: The variables from the layer's product to the operand, which nothing but the operand needs.
    """

    result: relax.Var
    product: relax.Var
    source: relax.Expr
    weight: relax.Expr
    bias: relax.Expr | None
    narrow: int
    rows: Reindex = lambda _, index: list(index)
    bindings: tuple[relax.Var, ...] = ()


def key_layer_of(scope: Scope, variable: relax.Var) -> OperandLayer | None:
    """Returns the linear layer of the keys that the kernel of an attention can compute; None if there is none.

    Args:
        scope: The function around it.
        variable: Holds the attention.
    """
    key = scope.definition(variable).args[_KEY]
    shape = extents(key)
    if shape is None or len(shape) != 4 or not isinstance(shape[3], int):
        return None
    found = (_layer_of(scope, result, shape[3]) for result in scope.bindings if not scope.is_parameter(result))
    layers = {layer.result: layer for layer in found if layer is not None}
    folded = fold_key(scope, layers, key)
    results = layers.keys() & set(folded.inputs)
    if len(results) != 1:
        return None
    layer = layers[results.pop()]
    bindings = _dependents(scope, layer.product, variable)
    if layer.narrow >= shape[3] or not scope.is_parameter(layer.weight):
        return None
    if not all(_folds(scope.bindings[v]) for v in bindings[1:]) or not is_only_reader(scope, bindings, variable, _KEY):
        return None
    row = _row_of(folded, layer.result) if set(bindings) & set(folded.inputs) == {layer.result} else None
    return None if row is None else replace(layer, rows=row, bindings=bindings)


def fold_key(scope: Scope, results: Iterable[relax.Var], key: relax.Expr) -> Folded:
    """Returns a key as a function of the results of linear layers and of other tensors."""
    return fold(replace(scope, results={*scope.results, *results}, symbolic=True), key)


def value_layer_of(scope: Scope, attention: ir.Call) -> OperandLayer | None:
    """Returns the linear layer of the values that can follow an attention, if that saves work."""
    if not is_call(attention, "relax.nn.attention") or len(attention.args) > 3:
        return None
    problem = recognized(attention, ("float32",), None, symbolic_keys=True)
    if problem is None or problem.heads != 1 or problem.diagonal is not None:
        return None
    keys, width = problem.keys, problem.width
    source, rows, moves = _before_moves(scope, attention.args[_VALUE])
    layer = _layer_of(scope, source, width)
    if layer is None or layer.narrow >= width:
        return None
    if isinstance(keys, int) and keys * (width - layer.narrow) <= layer.narrow * width:
        return None
    return replace(layer, rows=rows, bindings=tuple(dict.fromkeys([*moves, layer.result, layer.product])))


def movable(scope: Scope) -> frozenset[relax.Var]:
    """Returns the variables of all linear layers of values that can follow an attention and that nothing else reads."""
    layers = {variable: value_layer_of(scope, value) for variable, value in scope.bindings.items()}
    return frozenset(
        part
        for variable, layer in layers.items()
        if layer is not None and is_only_reader(scope, layer.bindings, variable, _VALUE)
        for part in layer.bindings
    )


def is_only_reader(scope: Scope, variables: Collection[relax.Var], reader: relax.Var, place: int) -> bool:
    """Returns whether some variables are read by each other and by one operand of an operator alone.

    Args:
        scope: The function around them.
        variables: The variables.
        reader: Holds the operator.
        place: The number of its operand.
    """
    arguments = scope.bindings[reader].args
    others = [argument for n, argument in enumerate(arguments) if n != place]
    if any(variable.same_as(argument) for variable in variables for argument in others):
        return False
    readers = {*variables, reader}
    return all(user in readers for variable in variables for user in scope.users.get(variable, ()))


def _layer_of(scope: Scope, result: relax.Expr, width: int) -> OperandLayer | None:
    """Returns the linear layer of a static weight with this result of so many channels; None if it is another value."""
    product, bias = _product_of(scope, result, width)
    if product is None:
        return None
    matmul = scope.definition(product)
    source, weight = matmul.args[0], scope.before_broadcast(matmul.args[1])
    matrix, rows = static_shape(weight), extents(source)
    if matrix is None or len(matrix) != 2 or rows is None or len(rows) < 2 or str(source.ty.dtype) != "float32":
        return None
    return OperandLayer(result, product, source, weight, bias, matrix[0])


def _product_of(scope: Scope, value: relax.Expr, width: int) -> tuple[relax.Var | None, relax.Expr | None]:
    """Returns product and bias of a linear layer; None for missing parts."""
    definition = scope.definition(value)
    if is_call(definition, "relax.matmul"):
        return value, None
    if is_call(definition, "relax.add"):
        for product, bias in (definition.args, tuple(definition.args)[::-1]):
            if is_call(scope.definition(product), "relax.matmul") and _one_per_channel(bias, width):
                return product, bias
    return None, None


def _one_per_channel(bias: relax.Expr, width: int) -> bool:
    shape = static_shape(bias)
    return shape is not None and 1 <= len(shape) <= 4 and shape[-1] == width and all(n == 1 for n in shape[:-1])


def _before_moves(scope: Scope, value: relax.Expr) -> tuple[relax.Expr, Reindex, list[relax.Var]]:
    """Follows a tensor back through permutations and reshapes of whole rows; not where rows are split.

    Returns:
        The source; the index of a row, without the last dimension → index of the same row of the source; the variables
            from the tensor to the source, which is not among them.
    """
    computed = {variable for variable, bound in scope.bindings.items() if not is_call(bound, *MOVES)}
    folded = moved(replace(scope, results=scope.results | computed, symbolic=True), value)
    source = folded.inputs[0]
    if source.same_as(value) or not _keeps_rows(folded):
        return value, lambda _, row: list(row), []

    def rows(analyzer: sym.Analyzer, row: Sequence[T.Index]) -> list[T.Index]:
        return index_before(folded, analyzer, [*row, 0])[:-1]

    return source, rows, between(scope.bindings, value, [source])


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


def _dependents(scope: Scope, product: relax.Var, attention: relax.Var) -> tuple[relax.Var, ...]:
    """Returns the variables that depend on a product, itself the first, otherwise than by way of the attention."""
    variables = {product: None}
    for variable, value in scope.bindings.items():
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
        read: dict[relax.Expr, list[tuple[T.Index, ...]]] = {value: [] for value in key.inputs}
        key.element(Reader({value: Recorder(indices.append) for value, indices in read.items()}, analyzer), index)
        return [[analyzer.simplify(T.convert(part)) for part in row] for *row, _ in read[result]]

    def row(analyzer: sym.Analyzer, index: Sequence[T.Index]) -> list[T.Expr]:
        return rows(analyzer, [*index, 0])[0]

    first_row = row(analyzer, (b, token, 0))
    channels_read = (pair * key.period + n for n in range(key.period))
    others = (other for channel in channels_read for other in rows(analyzer, (b, token, 0, channel)))
    return row if all(same(other, first_row) for other in others) else None
