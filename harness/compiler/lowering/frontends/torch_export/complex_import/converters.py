"""Converts operators on complex tensors, by their names in TVM's importer.

Arithmetic is written out on pairs. Operators that only move elements become the real operator of the same name on the
tensor with its last dimension of 2, after dimensions are counted from the front and shapes get the last dimension; the
importer's own converter, or its replacement, converts the real operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node
from tvm import relax

from harness.compiler.lowering.frontends.rewriting import argument, value_of
from harness.compiler.lowering.frontends.torch_export.complex import values as complex_values
from harness.compiler.lowering.frontends.torch_export.complex.calling import as_real
from harness.compiler.lowering.frontends.torch_export.complex_import import pairs

if TYPE_CHECKING:
    from tvm.relax import Expr


ComplexConverter = Callable[[Node, Any], "Expr"]
"""Takes a node and the importer: `ComplexImporter`."""


def is_complex(value: object) -> bool:
    """Returns whether an argument of a node is complex: a node with a complex result, or a complex number."""
    return complex_values.is_complex(value) if isinstance(value, Node) else isinstance(value, complex)


def _real_dtype(node: Node) -> str:
    """Returns the dtype of the parts of a node's complex result."""
    return str(value_of(node).dtype.to_real()).removeprefix("torch.")


def _real(value: Any, importer: Any, dtype: str) -> Expr:
    """Returns a real operand: a tensor cast to `dtype`, or a number as a constant."""
    if not isinstance(value, Node):
        return relax.const(float(value), dtype)
    x = importer.env[value]
    return x if pairs.dtype_of(x) == dtype else importer.block_builder.emit(relax.op.astype(x, dtype))


def _complex(value: Any, importer: Any, dtype: str) -> Expr:
    """Returns a real or complex operand as pairs of `dtype`."""
    if not isinstance(value, Node):
        return pairs.constant(complex(value), dtype)
    x = _real(value, importer, dtype)
    return x if is_complex(value) else pairs.from_real(importer.block_builder.emit, x)


def _binary(function: Callable[[Expr, Expr], Expr]) -> ComplexConverter:
    def convert(node: Node, importer: Any) -> Expr:
        left, right = (_complex(operand, importer, _real_dtype(node)) for operand in node.args[:2])
        return importer.block_builder.emit(function(left, right))

    return convert


def _multiply(node: Node, importer: Any) -> Expr:
    emit, dtype = importer.block_builder.emit, _real_dtype(node)
    left, right = node.args
    if not is_complex(left):
        left, right = right, left
    if is_complex(right):
        return pairs.multiply(emit, _complex(left, importer, dtype), _complex(right, importer, dtype))
    return pairs.scale(emit, _complex(left, importer, dtype), _real(right, importer, dtype))


def _divide(node: Node, importer: Any) -> Expr:
    emit, dtype = importer.block_builder.emit, _real_dtype(node)
    left, right = node.args
    numerator = _complex(left, importer, dtype)
    if is_complex(right):
        return pairs.divide(emit, numerator, _complex(right, importer, dtype))
    divisor = emit(relax.op.expand_dims(_real(right, importer, dtype), -1))
    return emit(relax.op.divide(numerator, divisor))


def _reciprocal(node: Node, importer: Any) -> Expr:
    return pairs.divide(importer.block_builder.emit, pairs.constant(1.0, _real_dtype(node)), importer.env[node.args[0]])


def _unary(function: Callable[[pairs.Emit, Expr], Expr]) -> ComplexConverter:
    return lambda node, importer: function(importer.block_builder.emit, importer.env[node.args[0]])


def _from_parts(function: Callable[[pairs.Emit, Expr, Expr], Expr]) -> ComplexConverter:
    """Returns the converter of an operator with two real arguments, which are broadcast."""

    def convert(node: Node, importer: Any) -> Expr:
        emit = importer.block_builder.emit
        shape = list(value_of(node).shape)
        re_or_length, im_or_angle = (
            emit(relax.op.broadcast_to(_real(operand, importer, _real_dtype(node)), shape)) for operand in node.args
        )
        return function(emit, re_or_length, im_or_angle)

    return convert


def _matmul(node: Node, importer: Any) -> Expr:
    left, right = (importer.env[operand] for operand in node.args)
    return pairs.matmul(importer.block_builder.emit, left, right)


def _addmm(node: Node, importer: Any) -> Expr:
    emit, dtype = importer.block_builder.emit, _real_dtype(node)
    bias, left, right = (importer.env[operand] for operand in node.args)
    terms = []
    for term, name in ((bias, "beta"), (pairs.matmul(emit, left, right), "alpha")):
        factor = node.kwargs.get(name, 1)
        terms.append(term if factor == 1 else pairs.multiply(emit, term, pairs.constant(complex(factor), dtype)))
    return emit(relax.op.add(*terms))


def _reduction(function: Callable[..., Expr]) -> ComplexConverter:
    """Returns the converter of a sum or mean over dimensions of the complex tensor, all of them by default."""

    def convert(node: Node, importer: Any) -> Expr:
        source = node.args[0]
        rank = value_of(source).ndim
        is_whole = node.target is torch.ops.aten.mean.default
        dims = range(rank) if is_whole else argument(node, "dim") or range(rank)
        axes = [dim % rank for dim in ([dims] if isinstance(dims, int) else dims)] if rank else []
        x = _complex(source, importer, _real_dtype(node))
        keepdims = not is_whole and argument(node, "keepdim")
        # Relax reads an empty list of axes as all axes
        return importer.block_builder.emit(function(x, axes, keepdims=keepdims)) if axes else x

    return convert


def _where(node: Node, importer: Any) -> Expr:
    emit, dtype = importer.block_builder.emit, _real_dtype(node)
    condition, *branches = node.args
    left, right = (_complex(branch, importer, dtype) for branch in branches)
    return emit(relax.op.where(emit(relax.op.expand_dims(importer.env[condition], -1)), left, right))


def _concatenate(node: Node, importer: Any) -> Expr:
    operands = [_complex(operand, importer, _real_dtype(node)) for operand in node.args[0]]
    dim = argument(node, "dim") % value_of(node).ndim
    return importer.block_builder.emit(relax.op.concat(operands, axis=dim))


def _full(position: int) -> ComplexConverter:
    """Returns the converter of an operator whose argument at `position` is the value of every element."""

    def convert(node: Node, importer: Any) -> Expr:
        value = pairs.constant(complex(node.args[position]), _real_dtype(node))
        return importer.block_builder.emit(relax.op.broadcast_to(value, [*value_of(node).shape, 2]))

    return convert


def _cast(node: Node, importer: Any) -> Expr:
    """Casts complex to complex, real to complex, or complex to real, which drops the imaginary parts."""
    emit = importer.block_builder.emit
    if value_of(node).is_complex():
        return _complex(node.args[0], importer, _real_dtype(node))
    re, _ = pairs.parts(emit, importer.env[node.args[0]])
    dtype = importer._convert_data_type(value_of(node).dtype)
    return re if pairs.dtype_of(re) == dtype else emit(relax.op.astype(re, dtype))


def _identity(node: Node, importer: Any) -> Expr:
    """Returns the operand itself: a complex tensor and its real view are one Relax tensor."""
    return importer.env[node.args[0]]


Arguments = Callable[[Sequence[Any], int], Sequence[Any]]
"""Takes a structural operator's arguments after the first and its operand's rank; returns the arguments for pairs."""


def _leading_dim(extra: int = 0) -> Arguments:
    """Counts the first argument as a dimension of a tensor with `extra` more dimensions than the operand."""
    return lambda arguments, rank: [arguments[0] % (rank + extra), *arguments[1:]]


def _dim_list(arguments: Sequence[Any], rank: int) -> Sequence[Any]:
    """Counts a list of dimensions from the front."""
    return [[dim % max(rank, 1) for dim in arguments[0]]]


def _all_dims(arguments: Sequence[Any], rank: int) -> Sequence[Any]:
    """Counts a list of all dimensions from the front, and appends the dimension of the pairs, which stays the last."""
    return [[*(dim % max(rank, 1) for dim in arguments[0]), rank]]


def _shape(last: int) -> Arguments:
    """Appends `last`, the size or the repetitions of the pairs' dimension, to a list with a number per dimension."""
    return lambda arguments, _rank: [[*arguments[0], last]]


def _slice(arguments: Sequence[Any], rank: int) -> Sequence[Any]:
    """Counts the dimension of `slice` from the front; the bounds and the step follow it."""
    return [arguments[0] % rank if arguments else 0, *arguments[1:]]


def _split(arguments: Sequence[Any], rank: int) -> Sequence[Any]:
    """Counts the dimension of `split_with_sizes` from the front, which comes after the sizes."""
    return [arguments[0], arguments[1] % rank if len(arguments) > 1 else 0]


def _structural(arguments: Arguments) -> ComplexConverter:
    """Returns the converter of an operator that moves elements: the real operator on the tensor of pairs."""

    def convert(node: Node, importer: Any) -> Expr:
        source, *further_args = node.args
        graph = Graph()

        def add_placeholder(original: Node) -> Node:
            """Adds an input with the Relax value of a node, for PyTorch a real tensor [..., 2] if it is complex."""
            placeholder = graph.placeholder(original.name)
            placeholder.meta["val"] = as_real(value_of(original))
            importer.env[placeholder] = importer.env[original]
            return placeholder

        real_arguments = arguments(further_args, value_of(source).ndim)
        return importer.convert_real(
            graph.call_function(node.target, torch.fx.node.map_arg((source, *real_arguments), add_placeholder))
        )

    return convert


CONVERTERS: Mapping[str, ComplexConverter] = {
    **dict.fromkeys(("view_as_real.default", "view_as_complex.default", "clone.default"), _identity),
    **dict.fromkeys(("alias.default", "detach.default", "lift_fresh_copy.default"), _identity),
    "_to_copy.default": _cast,
    "complex.default": _from_parts(pairs.join),
    "polar.default": _from_parts(pairs.polar),
    **dict.fromkeys(("full.default", "full_like.default"), _full(1)),
    "scalar_tensor.default": _full(0),
    **dict.fromkeys(("_conj.default", "_conj_physical.default"), _unary(pairs.conjugate)),
    "abs.default": _unary(pairs.absolute),
    "angle.default": _unary(pairs.angle),
    "exp.default": _unary(pairs.exponential),
    **dict.fromkeys(("neg.default", "_neg_view.default"), _unary(pairs.negative)),
    "reciprocal.default": _reciprocal,
    "add.Tensor": _binary(relax.op.add),
    "sub.Tensor": _binary(relax.op.subtract),
    "mul.Tensor": _multiply,
    "div.Tensor": _divide,
    **dict.fromkeys(("mm.default", "bmm.default"), _matmul),
    "addmm.default": _addmm,
    "sum.dim_IntList": _reduction(relax.op.sum),
    **dict.fromkeys(("mean.dim", "mean.default"), _reduction(relax.op.mean)),
    "where.self": _where,
    "cat.default": _concatenate,
    **dict.fromkeys(("view.default", "expand.default"), _structural(_shape(2))),
    "repeat.default": _structural(_shape(1)),
    "permute.default": _structural(_all_dims),
    "unsqueeze.default": _structural(_leading_dim(extra=1)),
    **dict.fromkeys(("squeeze.dims", "flip.default"), _structural(_dim_list)),
    **dict.fromkeys(("select.int", "index_select.default"), _structural(_leading_dim())),
    "slice.Tensor": _structural(_slice),
    "index.Tensor": _structural(lambda arguments, _rank: arguments),
    "split_with_sizes.default": _structural(_split),
    "getitem": lambda node, importer: importer.convert_real(node),
}
"""Operator name (`abs.default` for `aten.abs.default`) → its converter."""
