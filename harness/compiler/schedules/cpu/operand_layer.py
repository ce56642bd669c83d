"""Finds linear layers whose result is an operand of an attention with one head, and which nothing else reads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tvm import relax

from harness.compiler.schedules.common.graph import Facts, extents, is_call, static_shape
from harness.compiler.schedules.common.scope import Scope
from harness.compiler.schedules.cpu.moves import Reindex


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


def layer_of(scope: Scope, result: relax.Expr, width: int) -> OperandLayer | None:
    """Returns the linear layer of a static weight with this result; None if it is something else.

    Args:
        scope: The function around it.
        result: The layer's result.
        width: Its channels.
    """
    product, bias = _product_of(scope, result, width)
    if product is None:
        return None
    matmul = scope.definition(product)
    source, weight = matmul.args[0], scope.before_broadcast(matmul.args[1])
    matrix, rows = static_shape(weight), extents(source)
    if matrix is None or len(matrix) != 2 or rows is None or len(rows) < 2 or str(source.ty.dtype) != "float32":
        return None
    return OperandLayer(result, product, source, weight, bias, matrix[0])


def is_only_reader(facts: Facts, variables: Collection[relax.Var], reader: relax.Var, place: int) -> bool:
    """Returns whether some variables are read by each other and by one operand of an operator alone.

    Args:
        facts: The bindings of the function and their users.
        variables: The variables.
        reader: Holds the operator.
        place: The number of its operand.
    """
    arguments = facts.bindings[reader].args
    others = [argument for n, argument in enumerate(arguments) if n != place]
    if any(variable.same_as(argument) for variable in variables for argument in others):
        return False
    readers = {*variables, reader}
    return all(user in readers for variable in variables for user in facts.users.get(variable, ()))


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
