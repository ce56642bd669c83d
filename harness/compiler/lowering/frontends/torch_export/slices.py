"""Simplifies slices of symbolic axes, whose results would have minima that no later pass can remove.

TVM's importer clips every slice to its tensor, min(end, extent) - min(begin, extent), because it does not use
torch.export's range of each symbol. This pass uses the ranges: a slice that lies within its tensor for every value of
the symbols is marked as such, and has the extent end - begin.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, relax, sym, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

_LOWER, _UPPER = "tir_var_lower_bound", "tir_var_upper_bound"
"""Attributes of an imported function with the ranges of its symbols, by name."""
_OPEN_END = 2**62
"""Smallest end that means the end of the tensor; PyTorch writes the largest integer."""


def mark_inbound_slices(module: tvm.IRModule) -> tvm.IRModule:
    """Returns an imported module whose slices are marked as within their tensors, where that can be proved.

    A module without symbolic extents is returned unchanged.
    """
    if _LOWER not in (module["main"].attrs or {}):
        return module
    changed = module.clone()
    changed["main"] = _Slices(module).visit_expr(module["main"])
    return changed


def _ranges(function: relax.Function) -> sym.Analyzer:
    """Returns an analyzer that knows the ranges of the symbols in the shapes of a function's parameters."""
    analyzer = sym.Analyzer()
    lower, upper = (dict(function.attrs.get(name, {})) for name in (_LOWER, _UPPER))
    extents = [extent for parameter in function.params for extent in getattr(parameter.ty.shape, "values", ())]
    symbols = {variable for extent in extents for variable in tirx.analysis.undefined_vars(extent)}
    for symbol in symbols:
        lower_bound, upper_bound = (bounds.get(str(symbol.name)) for bounds in (lower, upper))
        if lower_bound is not None and upper_bound is not None:
            begin, end = (tirx.const(int(bound), "int64") for bound in (lower_bound, upper_bound))
            analyzer.bind(symbol, ir.Range(begin, end + 1))
    return analyzer


@mutator
class _Slices(PyExprMutator):  # type: ignore[misc]
    """A mutator that rewrites the slices of a function; types of later values are inferred again."""

    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self.analyzer = _ranges(module["main"])

    def visit_call_(self, op: ir.Call) -> relax.Expr:
        call = super().visit_call_(op)
        if getattr(call.op, "name", None) != "relax.strided_slice" or call.attrs.assume_inbound:
            return call
        source, axes, begin, end, *strides = call.args
        extents = [source.ty.shape.values[int(axis)] for axis in axes.fields]
        if all(isinstance(extent, tirx.IntImm) for extent in extents):
            return call
        if any(not isinstance(stride, tirx.IntImm) or int(stride) != 1 for group in strides for stride in group.fields):
            return call
        first = [self._from_front(bound, extent) for bound, extent in zip(begin.fields, extents, strict=True)]
        last = [self._from_front(bound, extent) for bound, extent in zip(end.fields, extents, strict=True)]
        for low, high, extent in zip(first, last, extents, strict=True):
            if not self.analyzer.can_prove(tirx.all(low >= 0, low <= high, high <= extent)):
                return call
        return relax.op.strided_slice(source, axes, first, last, assume_inbound=True)

    def _from_front(self, bound: Any, extent: Any) -> Any:
        """Returns a bound of a slice counted from the first element, if it was counted from the last or open."""
        bound = tirx.convert(bound)
        if isinstance(bound, tirx.IntImm) and int(bound) >= _OPEN_END:
            return extent
        return self.analyzer.simplify(extent + bound) if self.analyzer.can_prove(bound < 0) else bound
