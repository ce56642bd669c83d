"""Lowers sums, products, quotients and matrix products.

Products are (a + bi)(c + di) = (ac − bd) + (ad + bc)i with two real products and one sum for each part. Quotients
follow Smith, Algorithm 116: Complex division, CACM 5 (1962). They divide by the larger part of the divisor first, so
that they neither overflow nor underflow if the result is well inside the range of the dtype. A part that is known to be
zero takes part in no operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from harness.compiler.lowering.frontends.rewriting import overloads
from harness.compiler.lowering.frontends.torch_export.complex.values import TENSOR, Pair, Value, Writer

_aten = torch.ops.aten


@dataclass(frozen=True)
class _Parts:
    """Both parts of an operand of any kind: a node, a Python number, or None for zero."""

    re: Node | float | None
    im: Node | float | None


def _parts(writer: Writer, value: Any) -> _Parts:
    if isinstance(value, TENSOR):
        pair = writer.pair(value, writer.part_dtype)
        return _Parts(pair.re, pair.im)
    number = complex(value)
    return _Parts(number.real if number.real or not number.imag else None, number.imag or None)


def _times(
    writer: Writer, a: Node | float | None, b: Node | float | None, multiply: Any = _aten.mul.Tensor
) -> Node | float | None:
    if a is None or b is None:
        return None
    if isinstance(a, Node):
        return writer.call(multiply, a, b)
    return writer.call(multiply, b, a) if isinstance(b, Node) else a * b


def _plus(writer: Writer, a: Node | float | None, b: Node | float | None) -> Node | float | None:
    if a is None or b is None:
        return a if b is None else b
    if isinstance(a, Node):
        return writer.call(_aten.add.Tensor, a, b)
    return writer.call(_aten.add.Tensor, b, a) if isinstance(b, Node) else a + b


def _minus(writer: Writer, a: Node | float | None, b: Node | float | None) -> Node | float | None:
    if b is None:
        return a
    if not isinstance(b, Node):
        return _plus(writer, a, -b)
    if a is None:
        return writer.call(_aten.neg.default, b)
    return writer.call(_aten.sub.Tensor, a, b)


def _make_pair(writer: Writer, re: Node | float | None, im: Node | float | None) -> Pair:
    """Returns a pair of parts of one shape; at least one part is a node."""
    if not isinstance(re, Node):
        assert isinstance(im, Node)
        return Pair(writer.call(_aten.full_like.default, im, re or 0.0), im)
    if im is None:
        return Pair(re, None)
    if not isinstance(im, Node):
        return Pair(re, writer.call(_aten.full_like.default, re, im))
    shapes = re.meta["val"].shape, im.meta["val"].shape
    if shapes[0] != shapes[1]:
        whole = torch.broadcast_shapes(*shapes)
        # a part of one operand alone has that operand's shape; the other part has the broadcast shape
        if shapes[0] == whole:
            im = writer.call(_aten.expand_as.default, im, re)
        else:
            re = writer.call(_aten.expand_as.default, re, im)
    return Pair(re, im)


def _sum(combine: Callable[..., Any]) -> Callable[..., Value]:
    """Returns the rule of aten.add or aten.sub: a ± alpha·b, with `combine` for each part."""

    def rule(writer: Writer, first: Any, second: Any, alpha: Any = 1) -> Value:
        a, b = _parts(writer, first), _scaled(writer, _parts(writer, second), alpha)
        return _make_pair(writer, combine(writer, a.re, b.re), combine(writer, a.im, b.im))

    return rule


def _scaled(writer: Writer, x: _Parts, factor: Any) -> _Parts:
    return x if factor == 1 else _product(writer, x, _parts(writer, factor))


def _product(writer: Writer, a: _Parts, b: _Parts, multiply: Any = _aten.mul.Tensor) -> _Parts:
    """Multiplies a by b, element by element or with another product of real tensors, such as aten.mm."""
    return _Parts(
        _minus(writer, _times(writer, a.re, b.re, multiply), _times(writer, a.im, b.im, multiply)),
        _plus(writer, _times(writer, a.re, b.im, multiply), _times(writer, a.im, b.re, multiply)),
    )


def _mul(writer: Writer, a: Any, b: Any, multiply: Any = _aten.mul.Tensor) -> Value:
    result = _product(writer, _parts(writer, a), _parts(writer, b), multiply)
    return _make_pair(writer, result.re, result.im)


def _added_product(writer: Writer, added: Any, b: Any, c: Any, multiply: Any, beta: Any = 1, alpha: Any = 1) -> Value:
    """Lowers addmm and baddbmm: beta·a + alpha·(b @ c)."""
    added, b, c = (_parts(writer, value) for value in (added, b, c))
    product = _scaled(writer, _product(writer, b, c, multiply), alpha)
    added = _scaled(writer, added, beta)
    return _make_pair(writer, _plus(writer, product.re, added.re), _plus(writer, product.im, added.im))


def _div(writer: Writer, a: Any, b: Any) -> Value:
    return _quotient(writer, _parts(writer, a), _parts(writer, b))


def _reciprocal(writer: Writer, value: Any) -> Value:
    return _quotient(writer, _Parts(1.0, None), _parts(writer, value))


def _quotient(writer: Writer, a: _Parts, b: _Parts) -> Pair:
    """Divides a by b; which part of b is larger is decided for each element at run time."""
    if b.im is None:
        re, im = (None if part is None else _divide(writer, part, b.re) for part in (a.re, a.im))
        return _make_pair(writer, re, im)
    if not isinstance(b.re, Node) and not isinstance(b.im, Node):
        return _divide_by_number(writer, a, complex(b.re or 0.0, b.im))
    assert isinstance(b.re, Node) and isinstance(b.im, Node)
    # p is the larger part of the divisor, q the smaller; a·conj(b)/|b|² with p divided out of both
    real_is_larger = writer.call(_aten.ge.Tensor, *(writer.call(_aten.abs.default, part) for part in (b.re, b.im)))
    p = writer.call(_aten.where.self, real_is_larger, b.re, b.im)
    q = writer.call(_aten.where.self, real_is_larger, b.im, b.re)
    # if both are 0, each part of the dividend is divided by 0
    zero = writer.call(_aten.eq.Scalar, p, 0.0)
    ratio = writer.call(_aten.where.self, zero, p, writer.call(_aten.div.Tensor, q, p))
    divisor = writer.call(_aten.add.Tensor, p, writer.call(_aten.mul.Tensor, q, ratio))
    if a.im is None:
        ones = writer.call(_aten.full_like.default, ratio, 1.0)
        re = _times(writer, writer.call(_aten.where.self, real_is_larger, ones, ratio), a.re)
        negated = _times(writer, writer.call(_aten.where.self, real_is_larger, ratio, ones), a.re)
        im = writer.call(_aten.neg.default, negated)
    else:
        a_re = a.re if isinstance(a.re, Node) else writer.call(_aten.full_like.default, a.im, a.re or 0.0)
        x = writer.call(_aten.where.self, real_is_larger, a_re, a.im)
        y = writer.call(_aten.where.self, real_is_larger, a.im, a_re)
        re = _plus(writer, x, _times(writer, y, ratio))
        turned = writer.call(_aten.sub.Tensor, y, _times(writer, x, ratio))
        im = writer.call(_aten.where.self, real_is_larger, turned, writer.call(_aten.neg.default, turned))
    return _make_pair(writer, _divide(writer, re, divisor), _divide(writer, im, divisor))


def _divide(writer: Writer, a: Any, b: Any) -> Node:
    if not isinstance(a, Node):
        return writer.call(_aten.mul.Tensor, writer.call(_aten.reciprocal.default, b), a)
    return writer.call(_aten.div.Tensor, a, b)


def _divide_by_number(writer: Writer, a: _Parts, number: complex) -> Pair:
    """Divides by a number, whose p, q, ratio and divisor are computed at lowering."""
    real_is_larger = abs(number.real) >= abs(number.imag)
    p, q = (number.real, number.imag) if real_is_larger else (number.imag, number.real)
    ratio = q / p
    divisor = p + q * ratio
    x, y = (a.re, a.im) if real_is_larger else (a.im, a.re)
    re = _plus(writer, x, _times(writer, y, ratio or None))
    im = _minus(writer, y, _times(writer, x, ratio or None))
    return _make_pair(
        writer,
        None if re is None else _divide(writer, re, divisor),
        None if im is None else _divide(writer, im, divisor if real_is_larger else -divisor),
    )


RULES: dict[Callable[..., Any], Callable[..., Value]] = {
    **dict.fromkeys(overloads("add", "Tensor", "Scalar"), _sum(_plus)),
    **dict.fromkeys(overloads("sub", "Tensor", "Scalar"), _sum(_minus)),
    **dict.fromkeys(overloads("mul", "Tensor", "Scalar"), _mul),
    **dict.fromkeys(overloads("div", "Tensor", "Scalar"), _div),
    _aten.reciprocal.default: _reciprocal,
    **{multiply: partial(_mul, multiply=multiply) for multiply in overloads("mm bmm", "default")},
    _aten.addmm.default: partial(_added_product, multiply=_aten.mm.default),
    _aten.baddbmm.default: partial(_added_product, multiply=_aten.bmm.default),
}
"""Rules by operator; each takes the writer and the operator's arguments in the lowered graph."""
