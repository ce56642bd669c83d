"""Rewrites products with pixels of a 1×1 convolution: the far fewer rows are projected instead of the pixels.

    A · (W·P + b) = (A·W) · P + A·b

It is exact but for rounding. In the segmentation head A has a row for each of 200 queries, and P 82,944 pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import tvm
from tvm import ir, relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from harness.compiler.schedules.common.folding import moved, row_starts
from harness.compiler.schedules.common.graph import MOVES, between, is_call, same, static_shape
from harness.compiler.schedules.common.origins import join_tags
from harness.compiler.schedules.common.scope import Scope, scope_of
from harness.compiler.schedules.cpu.bf16 import allow_bf16, allows_bf16
from harness.compiler.schedules.cpu.operand_layer import is_only_reader


@dataclass(frozen=True)
class Projection:
    """A product with pixels that are a 1×1 convolution.

    Attributes:
        product: The product; its operands are A, [..., channels], and the moved result of the convolution.
        convolved: The variable of the convolution.
        convolution: Its operands are P, [1, narrow, height, width], and W, [channels, narrow, 1, 1].
        biased: The variable of its sum with the bias; None if there is none.
        bias: b, [1, channels, 1, 1]; None if there is none.
        moves: The variables of the moves. Like the convolution's, they come to nothing.
    """

    product: ir.Call
    convolved: relax.Var
    convolution: ir.Call
    biased: relax.Var | None
    bias: relax.Expr | None
    moves: tuple[relax.Var, ...]

    @property
    def bindings(self) -> tuple[relax.Var, ...]:
        """Returns the variables that only the product may depend on."""
        return (*self.moves, *([] if self.biased is None else [self.biased]), self.convolved)


@tvm.transform.module_pass(opt_level=0, name="ProjectRows")
def project_rows(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Multiplies the rows of a product by the weight of a 1×1 convolution, where that is less work."""
    changed = module.clone()
    for variable, function in module.functions_items():
        if isinstance(function, relax.Function):
            scope = scope_of(function)
            computed = {bound for bound, value in scope.bindings.items() if not is_call(value, *MOVES)}
            projections = _projections(replace(scope, results=computed))
            changed.update_func(variable, _Rewriter(module, projections).visit_expr(function))
    return changed


def _projections(scope: Scope) -> dict[relax.Var, Projection]:
    """Returns the projections by the variable of the product; nothing else may read the convolution."""
    projections = {
        variable: projection
        for variable, value in scope.bindings.items()
        if is_call(value, "relax.matmul") and (projection := _projection(scope, value)) is not None
    }
    return {v: projection for v, projection in projections.items() if is_only_reader(scope, projection.bindings, v, 1)}


def _projection(scope: Scope, matmul: ir.Call) -> Projection | None:
    left, right = (static_shape(argument) for argument in matmul.args)
    if left is None or right is None or len(right) < 2 or math.prod(right[:-2]) != 1:
        return None
    (channels, count), rows = right[-2:], math.prod(left[:-1])
    folded = moved(scope, matmul.args[1])
    start = row_starts(folded, 1, channels * count)
    if start is None or not same([start(0)], [0]):
        return None
    image, biased, bias = folded.inputs[0], None, None
    definition = scope.definition(image)
    if is_call(definition, "relax.add"):
        biased, (image, bias) = image, definition.args
        definition = scope.definition(image)
    if not is_call(definition, "relax.nn.conv2d") or not _projects_pixels(definition):
        return None
    shape = static_shape(definition.args[0])
    source = static_shape(bias) if bias is not None else (1, channels, 1, 1)
    if shape is None or shape[0] != 1 or shape[2] * shape[3] != count or source != (1, channels, 1, 1):
        return None
    if rows * (channels + count) >= channels * count:
        return None
    moves = between(scope.bindings, matmul.args[1], folded.inputs)
    return Projection(matmul, image, definition, biased, bias, tuple(moves))


def _projects_pixels(convolution: ir.Call) -> bool:
    """Returns whether a convolution computes each pixel from the pixel in its place alone."""
    kernel, attributes = static_shape(convolution.args[1]), convolution.attrs
    plain = (attributes.data_layout, attributes.kernel_layout, attributes.out_layout) == ("NCHW", "OIHW", "NCHW")
    whole = all(int(n) == 1 for n in attributes.strides) and not any(int(n) for n in attributes.padding)
    return kernel is not None and kernel[2:] == (1, 1) and int(attributes.groups) == 1 and plain and whole


@mutator
class _Rewriter(PyExprMutator):  # type: ignore[misc]
    def __init__(self, module: tvm.IRModule, projections: Mapping[relax.Var, Projection]) -> None:
        super().__init__(module)
        self.projections = projections
        self.dropped = {variable for one in projections.values() for variable in one.bindings}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        projection = self.projections.get(binding.var)
        if binding.var in self.dropped:
            return
        if projection is None:
            super().visit_var_binding_(binding)
            return
        emit, op, product, convolution = self.builder_.emit, relax.op, projection.product, projection.convolution
        left, pixels, weight = map(self.visit_expr, (product.args[0], *convolution.args))
        channels, narrow = (static_shape(weight) or ())[:2]
        rows, matrix = emit(op.reshape(left, (-1, channels))), emit(op.reshape(weight, (channels, narrow)))
        narrowed = self._named([projection.convolved], _like(convolution, op.matmul(rows, matrix)))
        columns = emit(op.reshape(pixels, (narrow, -1)))
        result = self._named([binding.var, *projection.moves], _like(product, op.matmul(narrowed, columns)))
        if projection.bias is not None and projection.biased is not None:
            bias = emit(op.reshape(self.visit_expr(projection.bias), (channels, 1)))
            result = emit(op.add(result, self._named([projection.biased], op.matmul(rows, bias))))
        shaped = self.builder_.normalize(op.reshape(result, static_shape(binding.var)))
        variable = type(binding.var)("projected", shaped.ty)
        self.builder_.emit_normalized(relax.VarBinding(variable, shaped))
        self.set_var_remap(binding.var, variable)

    def _named(self, variables: Sequence[relax.Var], value: relax.Expr) -> relax.Var:
        """Emits a value in place of the values of some variables."""
        value = self.builder_.normalize(value)
        variable = relax.DataflowVar(join_tags(variables), value.ty)
        self.builder_.emit_normalized(relax.VarBinding(variable, value))
        return variable


def _like(operator: ir.Call, product: ir.Call) -> ir.Call:
    """Returns a product that rounds its operands if an operator does."""
    return allow_bf16(product) if allows_bf16(operator) else product
