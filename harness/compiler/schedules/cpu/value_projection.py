"""Moves a linear layer of attention's values behind the attention, if its input has fewer channels.

    softmax(Q·Kᵀ) · (X·W + b) = (softmax(Q·Kᵀ) · X) · W + b

because each row of the softmax adds up to one. It is exact but for rounding, and saves work where X has fewer channels
than values and there are not very few keys: the second product of attention is narrower, and the projection has as many
rows as there are queries. Where a query may have no keys, its result is zero and not b; so there may be no mask.
"""

from __future__ import annotations

from dataclasses import replace

from tvm import ir, relax

from harness.compiler.schedules.common.attention import recognized
from harness.compiler.schedules.common.graph import Facts, is_call
from harness.compiler.schedules.common.scope import Scope
from harness.compiler.schedules.cpu.moves import source_of
from harness.compiler.schedules.cpu.operand_layer import OperandLayer, is_only_reader, layer_of

_VALUE = 2
"""The number of the operator's operand."""


def projection_of(scope: Scope, attention: ir.Call) -> OperandLayer | None:
    """Returns the linear layer of the values that can follow an attention, if that saves work."""
    if not is_call(attention, "relax.nn.attention") or len(attention.args) > 3:
        return None
    problem = recognized(attention, ("float32",), None, symbolic_keys=True)
    if problem is None or problem.heads != 1 or problem.diagonal is not None:
        return None
    keys, width = problem.keys, problem.width
    moved = source_of(scope, attention.args[_VALUE])
    layer = layer_of(scope, moved.source, width)
    if layer is None or layer.narrow >= width:
        return None
    if isinstance(keys, int) and keys * (width - layer.narrow) <= layer.narrow * width:
        return None
    bindings = dict.fromkeys([*moved.between, layer.result, layer.product])
    return replace(layer, rows=moved.index, bindings=tuple(bindings))


def movable(scope: Scope, facts: Facts) -> frozenset[relax.Var]:
    """Returns the variables of all linear layers that can follow an attention and that nothing else reads."""
    layers = {variable: projection_of(scope, value) for variable, value in facts.bindings.items()}
    return frozenset(
        part
        for variable, layer in layers.items()
        if layer is not None and is_only_reader(facts, layer.bindings, variable, _VALUE)
        for part in layer.bindings
    )
