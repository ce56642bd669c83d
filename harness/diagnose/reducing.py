"""Reduces a subgraph that shows a fault: fewer operators, then smaller extents, as long as the fault stays the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tvm import ir, relax, tirx

from harness.diagnose.deviation import deviation
from harness.diagnose.fault import Fault
from harness.diagnose.pieces import Subgraph, SubgraphExtractor
from harness.schedules.common.graph import is_call
from harness.schedules.common.origins import bindings_of

if TYPE_CHECKING:
    import numpy.typing as npt
    import tvm

    Array = npt.NDArray[Any]

RunSubgraph = Callable[[Subgraph], "Array"]
"""Compiles a subgraph, and returns its result."""


@dataclass(frozen=True)
class ReducedSubgraph:
    """A subgraph that shows a fault, while no smaller one that was tried does.

    Attributes:
        subgraph: The subgraph.
        fault: Fault of its result.
        halvings: Number of times that an extent was halved.
    """

    subgraph: Subgraph
    fault: Fault
    halvings: int = 0


def reduce_subgraph(
    extractor: SubgraphExtractor, fault: Fault, result: RunSubgraph, correct_result: RunSubgraph | None
) -> ReducedSubgraph | None:
    """Returns the smallest subgraph that shows a fault; None if none does.

    A subgraph shows the fault if its result is wrong in the same way and at the same elements (`Fault.same`). A
    subgraph that cannot be compiled, or is wrong in another way, does not show it.

    Args:
        extractor: Extracts subgraphs of the program, all with one result.
        fault: Fault of this result in the program.
        result: Compiles a subgraph in the way that is wrong.
        correct_result: Compiles it in a way that is right, to tell whether fewer rows are still rows of the same
            result. If there is none (None), the wrong result must stay the same.
    """
    for sources in extractor.smaller_sources():
        try:
            subgraph = extractor.extract(sources)
            actual = result(subgraph)
        except Exception:  # a subgraph that cannot be compiled is skipped
            continue
        if fault.same(subgraph.fault(actual)):
            return _reduce_extents(ReducedSubgraph(subgraph, fault), actual, result, correct_result)
    return None


def _reduce_extents(
    subgraph: ReducedSubgraph, actual: Array, result: RunSubgraph, correct_result: RunSubgraph | None
) -> ReducedSubgraph:
    """Halves extents, the first axes first, as long as the fault stays."""
    smallest = subgraph
    while True:
        for half, slices in _halved_subgraphs(smallest.subgraph):
            expected = smallest.fault.part(slices)
            try:
                output = result(half).reshape(half.torch_value.shape)
                is_part = (
                    half.deviation(correct_result(half)).excess <= 1
                    if correct_result
                    else _equal_up_to_rounding(output, _part(actual, smallest, slices))
                )
            except Exception:  # shapes that do not fit are skipped
                continue
            if is_part and expected.same(half.fault(output)):
                smallest, actual = ReducedSubgraph(half, expected, smallest.halvings + 1), output
                break
        else:
            return smallest


def _part(actual: Array, reduced: ReducedSubgraph, slices: tuple[slice, ...]) -> Array:
    values: Array = actual.reshape(reduced.subgraph.torch_value.shape)[slices]
    return values


def _equal_up_to_rounding(value: Array, reference: Array) -> bool:
    """Returns whether two values differ by rounding at most."""
    return deviation(value, reference, reference).excess <= 1


def _halved_subgraphs(subgraph: Subgraph) -> Iterator[tuple[Subgraph, tuple[slice, ...]]]:
    """Yields the subgraph with half of one extent of its result, except the last axis, and that part of the result.

    The halved subgraph may or may not compute this part.
    """
    shape = subgraph.torch_value.shape
    if any(is_call(binding.value, "relax.call_tir") for binding in bindings_of(subgraph.module["main"])):
        return  # loops contain extents too
    for extent in dict.fromkeys(shape[:-1] or shape):
        if not extent or extent % 2:
            continue
        for flattened in (False, True):
            halve = _Halving(extent, flattened)
            try:
                module = halve.module(subgraph)
            except Exception:  # TVM refuses shapes that do not fit
                continue
            arguments = [
                array[halve.slices(array.shape)] if n < subgraph.num_inputs else array
                for n, array in enumerate(subgraph.arguments)
            ]
            slices = halve.slices(shape)
            yield (
                replace(
                    subgraph,
                    module=module,
                    arguments=tuple(arguments),
                    torch_value=subgraph.torch_value[slices],
                    exact=subgraph.exact[slices],
                ),
                slices,
            )


@dataclass(frozen=True)
class _Halving:
    """Takes the first half of an extent, wherever it occurs.

    Attributes:
        extent: The extent, even.
        flattened: Whether multiples of the extent are halved too, for axes that were joined.
    """

    extent: int
    flattened: bool

    def module(self, subgraph: Subgraph) -> tvm.IRModule:
        """Returns the module with halved inputs and halved shapes in its operators.

        Raises:
            Exception: TVM raised it because shapes do not fit.
        """
        main = subgraph.module["main"]
        parameters = [
            relax.Var(parameter.name, relax.TensorType(self._shape(parameter.ty.shape), str(parameter.ty.dtype)))
            if n < subgraph.num_inputs
            else parameter
            for n, parameter in enumerate(main.params)
        ]
        replacements: dict[relax.Var, Any] = dict(zip(main.params, parameters, strict=True))
        builder = relax.BlockBuilder()
        with builder.function("main", parameters):
            with builder.dataflow():
                *bindings, last = bindings_of(main)
                for binding in bindings:
                    replacements[binding.var] = builder.emit(self._expression(binding.value, replacements))
                output = builder.emit_output(self._expression(last.value, replacements))
            builder.emit_func_output(output)
        halved = subgraph.module.clone()
        halved["main"] = builder.get()["main"].with_attr("num_input", subgraph.num_inputs)
        return halved

    def slices(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Returns the remaining part of a tensor."""
        return tuple(slice(0, self._halve(extent)) for extent in shape)

    def _halve(self, extent: int) -> int:
        multiple = extent > 0 and extent % self.extent == 0
        return extent // 2 if extent == self.extent or (self.flattened and multiple) else extent

    def _shape(self, shape: Any) -> list[int]:
        if not all(isinstance(extent, tirx.IntImm) for extent in shape):
            raise ValueError("symbolic extents have no half")
        return [self._halve(int(extent)) for extent in shape]

    def _expression(self, value: Any, replacements: dict[relax.Var, Any]) -> Any:
        if isinstance(value, relax.Var):
            return replacements.get(value, value)
        if isinstance(value, relax.ShapeExpr):
            return relax.ShapeExpr(self._shape(value.values))
        if isinstance(value, relax.Tuple):
            return relax.Tuple([self._expression(member, replacements) for member in value.fields])
        if isinstance(value, relax.TupleGetItem):
            return relax.TupleGetItem(self._expression(value.tuple_value, replacements), value.index)
        if isinstance(value, ir.Call):
            arguments = [self._expression(argument, replacements) for argument in value.args]
            return ir.Call(value.op, arguments, value.attrs, value.ty_args)
        return value
