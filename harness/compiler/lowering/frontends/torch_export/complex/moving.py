"""Lowers operators that act on each part separately: moves, concatenations, selections, sums, changes of sign."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from harness.compiler.lowering.frontends.torch_export.complex.errors import unsupported
from harness.compiler.lowering.frontends.torch_export.complex.values import (
    TENSOR,
    Interleaved,
    Pair,
    Value,
    Writer,
    real_dtype,
)

_aten = torch.ops.aten

_ONE_OPERAND = (
    *(_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.permute.default, _aten.t.default),
    *(_aten.transpose.int, _aten.expand.default, _aten.repeat.default, _aten.unsqueeze.default, _aten.alias.default),
    *(_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.clone.default, _aten.detach.default),
    *(_aten.slice.Tensor, _aten.select.int, _aten.index.Tensor, _aten.index_select.default, _aten.gather.default),
    *(_aten.flip.default, _aten.roll.default, _aten.diagonal.default, _aten.tril.default, _aten.triu.default),
    *(_aten.split_with_sizes.default, _aten.split.Tensor, _aten.unbind.int, _aten.lift_fresh_copy.default),
    *(_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim, _aten.cumsum.default),
    *(_aten.neg.default, _aten._neg_view.default),
)
_TWO_OPERANDS = (_aten.copy.default, _aten.slice_scatter.default, _aten.select_scatter.default)
_OPERAND_LIST = (_aten.cat.default, _aten.stack.default)

_REPLACEMENTS = {
    # the strides of a part may differ from those of the complex tensor
    _aten.view.default: _aten.reshape.default,
    _aten._unsafe_view.default: _aten.reshape.default,
    _aten._neg_view.default: _aten.neg.default,
    _aten.lift_fresh_copy.default: _aten.clone.default,
}


def _part_by_part(writer: Writer, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
    """Applies the operator to each part: the tensor comes first, other arguments are real and shared by both parts."""
    target = _REPLACEMENTS.get(node.target, node.target)
    if node.target is _aten.index.Tensor and any(
        isinstance(index, Node) and index.meta["val"].dtype in (torch.bool, torch.uint8) for index in args[1]
    ):
        # two calls would have two data-dependent lengths; the last dimension of the packed form is not indexed
        return writer.unpacked(writer.call(target, writer.packed(writer.pair(args[0], writer.part_dtype)), args[1]))
    if "dtype" in kwargs:
        kwargs = kwargs | {"dtype": real_dtype(kwargs["dtype"])}
    pair = writer.pair(args[0], writer.part_dtype)
    if pair.im is None:
        return _pairs(writer, writer.call(target, pair.re, *args[1:], **kwargs), None)
    parts = [writer.call(target, part, *args[1:], **kwargs) for part in (pair.re, pair.im)]
    return _pairs(writer, *parts)


def _pairs(writer: Writer, re: Node, im: Node | None) -> Value:
    """Returns the pair of the results of two calls; a list of pairs if the operator returns several tensors."""
    results = re.meta["val"]
    if isinstance(results, torch.Tensor):
        return Pair(re, im)

    def item(part: Node | None, position: int) -> Any:
        return None if part is None else writer.call(operator.getitem, part, position)

    return [Pair(item(re, position), item(im, position)) for position in range(len(results))]


def _two_operands(writer: Writer, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
    """Applies the operator to both parts of the first two arguments, which are tensors."""
    a, b = (writer.pair(value, writer.part_dtype) for value in args[:2])
    re = writer.call(node.target, a.re, b.re, *args[2:], **kwargs)
    if a.im is None and b.im is None:
        return Pair(re, None)
    return Pair(re, writer.call(node.target, writer.imaginary(a), writer.imaginary(b), *args[2:], **kwargs))


def _operand_list(writer: Writer, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
    """Applies the operator to both parts of the tensors in its first argument, a list."""
    pairs = [writer.pair(value, writer.part_dtype) for value in args[0]]
    re = writer.call(node.target, [pair.re for pair in pairs], *args[1:], **kwargs)
    if all(pair.im is None for pair in pairs):
        return Pair(re, None)
    return Pair(re, writer.call(node.target, [writer.imaginary(pair) for pair in pairs], *args[1:], **kwargs))


def _where(writer: Writer, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
    condition, if_true, if_false = args
    a, b = (writer.pair(value, writer.part_dtype) for value in (if_true, if_false))
    re = writer.call(_aten.where.self, condition, a.re, b.re)
    if a.im is None and b.im is None:
        return Pair(re, None)
    return Pair(re, writer.call(_aten.where.self, condition, writer.imaginary(a), writer.imaginary(b)))


def _index_put(writer: Writer, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
    target, values = (writer.pair(value, writer.part_dtype) for value in (args[0], args[2]))
    parts = [(target.re, values.re), (writer.imaginary(target), writer.imaginary(values))]
    re, im = (writer.call(node.target, part, args[1], value, *args[3:], **kwargs) for part, value in parts)
    return Pair(re, im)


def _pad(writer: Writer, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
    value = complex(args[2] if len(args) > 2 else kwargs.get("value", 0))
    pair = writer.pair(args[0], writer.part_dtype)
    re = writer.call(node.target, pair.re, args[1], value.real)
    if pair.im is None and value.imag == 0:
        return Pair(re, None)
    return Pair(re, writer.call(node.target, writer.imaginary(pair), args[1], value.imag))


def _to_copy(writer: Writer, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
    """Changes dtype and device, between complex dtypes, and between real and complex dtypes."""
    (value,) = args
    dtype = kwargs.get("dtype")
    if dtype is not None and not dtype.is_complex:
        assert isinstance(value, Pair)
        if dtype == torch.bool:
            return _is_nonzero(writer, value)
        return writer.call(node.target, value.re, **kwargs)
    re, im = (value.re, value.im) if isinstance(value, Pair) else (writer.real(value), None)
    if dtype is not None:
        kwargs = kwargs | {"dtype": real_dtype(dtype)}
        if kwargs == {"dtype": re.meta["val"].dtype}:
            return Pair(re, im)
    return Pair(writer.call(node.target, re, **kwargs), None if im is None else writer.call(node.target, im, **kwargs))


def _is_nonzero(writer: Writer, pair: Pair) -> Node:
    re = writer.call(_aten.ne.Scalar, pair.re, 0)
    return (
        re if pair.im is None else writer.call(_aten.logical_or.default, re, writer.call(_aten.ne.Scalar, pair.im, 0))
    )


def _fill(writer: Writer, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
    """Lowers full, full_like and scalar_tensor, whose last argument is a Python number."""
    *leading_args, number = args
    if leading_args and isinstance(leading_args[0], Pair):
        leading_args[0] = leading_args[0].re
    elif leading_args and isinstance(leading_args[0], Interleaved):
        leading_args[0] = writer.real(leading_args[0])
    number = complex(number)
    kwargs = kwargs | {"dtype": writer.part_dtype}
    re = writer.call(node.target, *leading_args, number.real, **kwargs)
    return Pair(re, writer.call(node.target, *leading_args, number.imag, **kwargs) if number.imag else None)


def _filled_real(writer: Writer, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
    """Lowers a real full_like of a complex tensor's shape."""
    if node.meta["val"].is_complex():
        return _fill(writer, node, args, kwargs)
    assert isinstance(args[0], Pair)
    return writer.call(node.target, args[0].re, *args[1:], **kwargs)


def _equal(writer: Writer, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
    """Lowers eq, for which both parts must be equal, and ne; the second operand may be a number."""
    is_equality = node.target in (_aten.eq.Tensor, _aten.eq.Scalar)
    combine = _aten.logical_and.default if is_equality else _aten.logical_or.default
    dtypes = [real_dtype(value.meta["val"].dtype) for value in node.args if isinstance(value, Node)]
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    if not all(isinstance(value, TENSOR) for value in args):
        number = complex(args[1])
        compare = _aten.eq.Scalar if is_equality else _aten.ne.Scalar
        pair = writer.pair(args[0], wide)
        operands: tuple[Any, Any] = (number.real, number.imag)
    else:
        compare = _aten.eq.Tensor if is_equality else _aten.ne.Tensor
        pair, operand = (writer.pair(value, wide) for value in args)
        operands = (operand.re, writer.imaginary(operand))
    re = writer.call(compare, pair.re, operands[0])
    return writer.call(combine, re, writer.call(compare, writer.imaginary(pair), operands[1]))


def _metadata_only(writer: Writer, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
    """Lowers sym_size and sym_numel, because the parts have the shape of the complex tensor."""
    if not isinstance(args[0], Pair):
        raise unsupported(node)
    return writer.call(node.target, args[0].re, *args[1:], **kwargs)


RULES: dict[Callable[..., Any], Callable[..., Value]] = {
    **dict.fromkeys(_ONE_OPERAND, _part_by_part),
    **dict.fromkeys(_TWO_OPERANDS, _two_operands),
    **dict.fromkeys(_OPERAND_LIST, _operand_list),
    _aten.where.self: _where,
    _aten.index_put.default: _index_put,
    _aten.constant_pad_nd.default: _pad,
    _aten._to_copy.default: _to_copy,
    **dict.fromkeys((_aten.full.default, _aten.scalar_tensor.default), _fill),
    _aten.full_like.default: _filled_real,
    **dict.fromkeys((_aten.eq.Tensor, _aten.eq.Scalar, _aten.ne.Tensor, _aten.ne.Scalar), _equal),
    **dict.fromkeys((_aten.sym_size.int, _aten.sym_numel.default), _metadata_only),
}
"""Rules by operator; each takes the writer, the original node and its arguments in the lowered graph."""
