"""Lowers operators that act on each part separately: moves, concatenations, selections, sums, changes of sign."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from harness.compiler.lowering.frontends.rewriting import overloads
from harness.compiler.lowering.frontends.torch_export.complex.values import (
    TENSOR,
    Interleaved,
    Pair,
    Value,
    Writer,
    real_dtype,
    unsupported,
)

_aten = torch.ops.aten

_ONE_OPERAND = (
    *overloads("view reshape _unsafe_view permute t expand repeat unsqueeze alias squeeze clone detach", "default"),
    *overloads("index_select gather flip roll diagonal tril triu split_with_sizes lift_fresh_copy", "default"),
    *overloads("sum mean cumsum neg _neg_view", "default"),
    *overloads("transpose select unbind", "int"),
    *overloads("slice index split", "Tensor"),
    *overloads("squeeze mean", "dim"),
    *(_aten.squeeze.dims, _aten.sum.dim_IntList),
)
_TWO_OPERANDS = overloads("copy slice_scatter select_scatter", "default")
_OPERAND_LIST = overloads("cat stack", "default")

REPLACEMENTS = {
    _aten.view.default: _aten.reshape.default,
    _aten._unsafe_view.default: _aten.reshape.default,
    _aten._neg_view.default: _aten.neg.default,
    _aten.lift_fresh_copy.default: _aten.clone.default,
}
"""Operators on a part, whose strides may differ from those of the complex tensor."""


def _part_by_part(writer: Writer, value: Value, *args: Any, **kwargs: Any) -> Value:
    """Applies the operator to each part: the tensor comes first, other arguments are real and shared by both parts."""
    operator, pair = writer.source.target, writer.pair(value, writer.part_dtype)
    target = REPLACEMENTS.get(operator, operator)
    if operator is _aten.index.Tensor and any(
        isinstance(index, Node) and index.meta["val"].dtype in (torch.bool, torch.uint8) for index in args[0]
    ):
        # two calls would have two data-dependent lengths; the last dimension of the packed form is not indexed
        return writer.unpacked(writer.call(target, writer.packed(pair), *args))
    if "dtype" in kwargs:
        kwargs["dtype"] = real_dtype(kwargs["dtype"])
    re, im = (None if part is None else writer.call(target, part, *args, **kwargs) for part in (pair.re, pair.im))
    assert re is not None
    results = re.meta["val"]
    if isinstance(results, torch.Tensor):
        return Pair(re, im)
    return [Pair(writer.item(re, n), None if im is None else writer.item(im, n)) for n in range(len(results))]


def _both_parts(writer: Writer, apply: Callable[..., Node], *values: Value) -> Pair:
    """Applies a function to the real parts of tensors, and to the imaginary parts if one of them is not zero."""
    pairs = [writer.pair(value, writer.part_dtype) for value in values]
    re = apply(*(pair.re for pair in pairs))
    if all(pair.im is None for pair in pairs):
        return Pair(re, None)
    return Pair(re, apply(*(writer.imaginary(pair) for pair in pairs)))


def _two_operands(writer: Writer, a: Value, b: Value, *args: Any, **kwargs: Any) -> Value:
    return _both_parts(writer, lambda *parts: writer.call(writer.source.target, *parts, *args, **kwargs), a, b)


def _operand_list(writer: Writer, values: Sequence[Value], *args: Any, **kwargs: Any) -> Value:
    return _both_parts(writer, lambda *parts: writer.call(writer.source.target, list(parts), *args, **kwargs), *values)


def _where(writer: Writer, condition: Node, if_true: Value, if_false: Value) -> Value:
    return _both_parts(writer, lambda *parts: writer.call(_aten.where.self, condition, *parts), if_true, if_false)


def _index_put(writer: Writer, x: Value, indices: Any, values: Value, *args: Any, **kwargs: Any) -> Value:
    def put(part: Node, part_of_values: Node) -> Node:
        return writer.call(writer.source.target, part, indices, part_of_values, *args, **kwargs)

    return _both_parts(writer, put, x, values)


def _pad(writer: Writer, x: Value, padding: Sequence[int], value: complex = 0) -> Value:
    number, pair = complex(value), writer.pair(x, writer.part_dtype)
    re = writer.call(writer.source.target, pair.re, padding, number.real)
    if pair.im is None and number.imag == 0:
        return Pair(re, None)
    return Pair(re, writer.call(writer.source.target, writer.imaginary(pair), padding, number.imag))


def _to_copy(writer: Writer, value: Value, **kwargs: Any) -> Value:
    """Changes dtype and device, between complex dtypes, and between real and complex dtypes."""
    target, dtype = writer.source.target, kwargs.get("dtype")
    if dtype is not None and not dtype.is_complex:
        assert isinstance(value, Pair)
        return _is_nonzero(writer, value) if dtype == torch.bool else writer.call(target, value.re, **kwargs)
    re, im = (value.re, value.im) if isinstance(value, Pair) else (writer.real(value), None)
    if dtype is not None:
        kwargs["dtype"] = real_dtype(dtype)
        if kwargs == {"dtype": re.meta["val"].dtype}:
            return Pair(re, im)
    return Pair(writer.call(target, re, **kwargs), None if im is None else writer.call(target, im, **kwargs))


def _is_nonzero(writer: Writer, pair: Pair) -> Node:
    re = writer.call(_aten.ne.Scalar, pair.re, 0)
    if pair.im is None:
        return re
    return writer.call(_aten.logical_or.default, re, writer.call(_aten.ne.Scalar, pair.im, 0))


def _fill(writer: Writer, *args: Any, **kwargs: Any) -> Value:
    """Lowers full, full_like and scalar_tensor, whose last argument is a Python number."""
    *leading_args, number = args
    if leading_args and isinstance(leading_args[0], Pair):
        leading_args[0] = leading_args[0].re
    elif leading_args and isinstance(leading_args[0], Interleaved):
        leading_args[0] = writer.real(leading_args[0])
    if not writer.source.meta["val"].is_complex():  # a full_like of a complex tensor's shape
        return writer.call(writer.source.target, *leading_args, number, **kwargs)
    number, kwargs["dtype"] = complex(number), writer.part_dtype
    re = writer.call(writer.source.target, *leading_args, number.real, **kwargs)
    im = writer.call(writer.source.target, *leading_args, number.imag, **kwargs) if number.imag else None
    return Pair(re, im)


def _equal(writer: Writer, a: Value, b: Any) -> Value:
    """Lowers eq, for which both parts must be equal, and ne; the second operand may be a number."""
    is_equality = writer.source.target in (_aten.eq.Tensor, _aten.eq.Scalar)
    combine = _aten.logical_and.default if is_equality else _aten.logical_or.default
    dtypes = [real_dtype(operand.meta["val"].dtype) for operand in writer.source.all_input_nodes]
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    pair, compared = writer.pair(a, wide), _aten.eq if is_equality else _aten.ne
    if isinstance(b, TENSOR):
        operand = writer.pair(b, wide)
        compare, parts = compared.Tensor, (operand.re, writer.imaginary(operand))
    else:
        compare, parts = compared.Scalar, (complex(b).real, complex(b).imag)
    re = writer.call(compare, pair.re, parts[0])
    return writer.call(combine, re, writer.call(compare, writer.imaginary(pair), parts[1]))


def _metadata_only(writer: Writer, value: Value, *args: Any) -> Value:
    """Lowers sym_size and sym_numel, because the parts have the shape of the complex tensor."""
    if not isinstance(value, Pair):
        raise unsupported(writer.source)
    return writer.call(writer.source.target, value.re, *args)


RULES: dict[Callable[..., Any], Callable[..., Value]] = {
    **dict.fromkeys(_ONE_OPERAND, _part_by_part),
    **dict.fromkeys(_TWO_OPERANDS, _two_operands),
    **dict.fromkeys(_OPERAND_LIST, _operand_list),
    _aten.where.self: _where,
    _aten.index_put.default: _index_put,
    _aten.constant_pad_nd.default: _pad,
    _aten._to_copy.default: _to_copy,
    **dict.fromkeys(overloads("full full_like scalar_tensor", "default"), _fill),
    **dict.fromkeys(overloads("eq ne", "Tensor", "Scalar"), _equal),
    **dict.fromkeys((_aten.sym_size.int, _aten.sym_numel.default), _metadata_only),
}
"""Rules by operator; each takes the writer and the operator's arguments in the lowered graph."""
