"""Slices of axes whose extents are symbolic: what they leave, without minima that no later pass could take away.

TVM's importer lets every slice be clipped to its tensor, min(end, extent) - min(begin, extent), because it does not use
what torch.export knows of the range of each symbol. Here the ranges are used: a slice that lies within its tensor for
every value of the symbols says so, and has the extent end - begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import ir, relax, sym, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

_LOWER, _UPPER = "tir_var_lower_bound", "tir_var_upper_bound"
"""Attributes of an imported function: the ranges of its symbols, by name."""
_OPEN = 2**62
"""Ends from here on mean the end of the tensor; PyTorch writes the largest integer."""


def within_bounds(module: tvm.IRModule) -> tvm.IRModule:
    """Returns an imported module whose slices say that they lie within their tensors, where that can be proved.

    A module without symbolic extents is returned as it is.
    """
    if _LOWER not in (module["main"].attrs or {}):
        return module
    changed = module.clone()
    changed["main"] = _Slices(module).visit_expr(module["main"])
    return changed


def _ranges(function: relax.Function) -> sym.Analyzer:
    """An analyzer that knows the ranges of the symbols in the shapes of a function's parameters."""
    analyzer = sym.Analyzer()
    lower, upper = (dict(function.attrs.get(name, {})) for name in (_LOWER, _UPPER))
    extents = [extent for parameter in function.params for extent in getattr(parameter.ty.shape, "values", ())]
    symbols = {variable for extent in extents for variable in tirx.analysis.undefined_vars(extent)}
    for symbol in symbols:
        least, most = (bounds.get(str(symbol.name)) for bounds in (lower, upper))
        if least is not None and most is not None:
            begin, end = (tirx.const(int(bound), "int64") for bound in (least, most))
            analyzer.bind(symbol, ir.Range(begin, end + 1))
    return analyzer


@mutator
class _Slices(PyExprMutator):  # type: ignore[misc]
    """Rewrites the slices of a function; types of what follows are inferred again."""

    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self.analyzer = _ranges(module["main"])

    def visit_call_(self, op: ir.Call) -> relax.Expr:
        call = super().visit_call_(op)
        if getattr(call.op, "name", None) != "relax.strided_slice" or call.attrs.assume_inbound:
            return call
        source, axes, begin, end, *strides = call.args
        bounds = _bounds(self.analyzer, source, axes, begin, end, strides)
        if bounds is None:
            return call
        return relax.op.strided_slice(source, axes, *bounds, assume_inbound=True)


def _bounds(
    analyzer: sym.Analyzer,
    source: relax.Expr,
    axes: relax.Expr,
    begin: relax.Expr,
    end: relax.Expr,
    strides: Sequence[relax.Expr],
) -> tuple[list[Any], list[Any]] | None:
    """The bounds of a slice within its tensor; None for a static one, and where they may lie outside."""
    extents = [source.ty.shape.values[int(axis)] for axis in axes.fields]
    if all(isinstance(extent, tirx.IntImm) for extent in extents):
        return None
    if any(not isinstance(stride, tirx.IntImm) or int(stride) != 1 for group in strides for stride in group.fields):
        return None
    found: tuple[list[Any], list[Any]] = ([], [])
    for extent, *bounds in zip(extents, begin.fields, end.fields, strict=True):
        first, last = (_counted(analyzer, tirx.convert(bound), extent) for bound in bounds)
        if not analyzer.can_prove(tirx.all(first >= 0, first <= last, last <= extent)):
            return None
        found[0].append(first)
        found[1].append(last)
    return found


def _counted(analyzer: sym.Analyzer, bound: Any, extent: Any) -> Any:
    """A bound of a slice, counted from the first element, where it was counted from the last one or left open."""
    if isinstance(bound, tirx.IntImm) and int(bound) >= _OPEN:
        return extent
    return analyzer.simplify(extent + bound) if analyzer.can_prove(bound < 0) else bound
