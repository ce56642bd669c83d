"""Lowers conversions between complex numbers and their parts, and the functions abs, angle, exp and polar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from harness.compiler.lowering.frontends.rewriting import overloads
from harness.compiler.lowering.frontends.torch_export.complex.values import Interleaved, Pair, Value, Writer

_aten = torch.ops.aten

_SCALING = {
    torch.float32: (2.0**-51, 2.0**62, 2.0**100),
    torch.float64: (2.0**-484, 2.0**510, 2.0**700),
}
"""Below the first number, squares lose bits to underflow; above the second, a sum of two squares overflows. The third
number moves both into the range between, exactly, for every number of the dtype."""


def _view_as_complex(writer: Writer, value: Value) -> Value:
    if isinstance(value, Interleaved):
        return value.pair
    assert isinstance(value, Node)
    return writer.unpacked(value)


def _view_as_real(writer: Writer, pair: Pair) -> Value:
    return Interleaved(pair)


def _complex(writer: Writer, re: Value, im: Value) -> Value:
    re, im = writer.real(re), writer.real(im)
    if re.meta["val"].shape != im.meta["val"].shape:
        whole = writer.call(_aten.add.Tensor, re, im)  # only its shape is used
        re, im = (writer.call(_aten.expand_as.default, part, whole) for part in (re, im))
    return Pair(re, im)


def _conj(writer: Writer, pair: Pair) -> Value:
    return pair if pair.im is None else Pair(pair.re, writer.call(_aten.neg.default, pair.im))


def _abs(writer: Writer, pair: Pair) -> Value:
    """Computes √(re² + im²), scaled by a power of two where the squares would leave the dtype's range."""
    re = writer.call(_aten.abs.default, pair.re)
    if pair.im is None:
        return re
    im = writer.call(_aten.abs.default, pair.im)
    small, large, factor = _SCALING[re.meta["val"].dtype]
    largest = writer.call(_aten.maximum.default, re, im)
    ones = writer.call(_aten.full_like.default, re, 1.0)
    larger, smaller = (writer.call(_aten.full_like.default, re, number) for number in (factor, 1 / factor))
    scale = writer.call(_aten.where.self, writer.call(_aten.lt.Scalar, largest, small), larger, ones)
    scale = writer.call(_aten.where.self, writer.call(_aten.gt.Scalar, largest, large), smaller, scale)
    scaled = [writer.call(_aten.mul.Tensor, part, scale) for part in (re, im)]
    squares = [writer.call(_aten.mul.Tensor, part, part) for part in scaled]
    root = writer.call(_aten.sqrt.default, writer.call(_aten.add.Tensor, *squares))
    return writer.call(_aten.div.Tensor, root, scale)


def _angle(writer: Writer, pair: Pair) -> Value:
    return writer.call(_aten.atan2.default, writer.imaginary(pair), pair.re)


def _exp(writer: Writer, pair: Pair) -> Value:
    """Computes e^re·cos(im) and e^re·sin(im), with e^re as a square, which may overflow where the products do not.

    On the real axis the imaginary part is 0 even where e^re overflows.
    """
    if pair.im is None:
        return Pair(writer.call(_aten.exp.default, pair.re), None)
    root = writer.call(_aten.exp.default, writer.call(_aten.mul.Tensor, pair.re, 0.5))
    re, im = (
        writer.call(_aten.mul.Tensor, writer.call(_aten.mul.Tensor, writer.call(function, pair.im), root), root)
        for function in (_aten.cos.default, _aten.sin.default)
    )
    return Pair(re, writer.call(_aten.where.self, writer.call(_aten.eq.Scalar, pair.im, 0.0), pair.im, im))


def _polar(writer: Writer, length: Value, angle: Value) -> Value:
    length, angle = writer.real(length), writer.real(angle)
    parts = [
        writer.call(_aten.mul.Tensor, length, writer.call(function, angle))
        for function in (_aten.cos.default, _aten.sin.default)
    ]
    return Pair(*parts)


def _real(writer: Writer, value: Value) -> Value:
    return value.re if isinstance(value, Pair) else writer.real(value)


def _identity(writer: Writer, value: Value) -> Value:
    return value


RULES: dict[Callable[..., Any], Callable[..., Value]] = {
    _aten.view_as_complex.default: _view_as_complex,
    _aten.view_as_real.default: _view_as_real,
    _aten.complex.default: _complex,
    _aten.real.default: _real,
    _aten.imag.default: Writer.imaginary,
    **dict.fromkeys(overloads("_conj _conj_physical conj_physical", "default"), _conj),
    **dict.fromkeys(overloads("resolve_conj resolve_neg", "default"), _identity),
    _aten.abs.default: _abs,
    _aten.angle.default: _angle,
    _aten.exp.default: _exp,
    _aten.polar.default: _polar,
}
"""Rules by operator; each takes the writer and the operator's arguments in the lowered graph."""


def lower_interleaved(writer: Writer, node: Node, value: Interleaved, args: tuple[Any, ...]) -> Value | None:
    """Lowers an operator on torch.view_as_real of a pair without interleaving; returns None if it needs that."""
    pair = value.pair
    if node.target is _aten.select.int:
        _, dimension, index = args
        last_dimension = node.args[0].meta["val"].dim() - 1
        if dimension in (last_dimension, -1):
            return pair.re if index in (0, -2) else writer.imaginary(pair)
    if node.target is _aten._neg_view.default:
        im = None if pair.im is None else writer.call(_aten.neg.default, pair.im)
        return Interleaved(Pair(writer.call(_aten.neg.default, pair.re), im))
    return None
