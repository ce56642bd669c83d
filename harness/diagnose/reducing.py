"""Makes the piece that shows a fault smaller: fewer operators, then fewer rows, for as long as it is the same fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tvm import ir, relax, tirx

from harness.diagnose.deviation import deviation
from harness.diagnose.fault import Fault
from harness.diagnose.pieces import Piece, Pieces
from harness.schedules.common.graph import is_call
from harness.schedules.common.origins import bindings_of

if TYPE_CHECKING:
    import numpy.typing as npt
    import tvm

    Array = npt.NDArray[Any]

Result = Callable[[Piece], "Array"]
"""Compiles a piece, and returns what it computes."""


@dataclass(frozen=True)
class Reduced:
    """A piece that shows a fault, and nothing smaller that was tried does.

    Attributes:
        piece: The piece.
        fault: What is wrong with its result.
        halved: How often an extent was halved.
    """

    piece: Piece
    fault: Fault
    halved: int = 0


def reduced(pieces: Pieces, fault: Fault, result: Result, right: Result | None) -> Reduced | None:
    """Returns the smallest piece that shows a fault; None if none does.

    A piece shows it if its result is wrong in the same way and at the same elements (`Fault.same`). A piece that cannot
    be compiled, or is wrong otherwise, does not.

    Args:
        pieces: Cuts pieces of the program, all with one result.
        fault: What is wrong with that in the program.
        result: Compiles a piece in the way that is wrong.
        right: Compiles it in one that is right, to tell whether fewer rows are still rows of the same result; None if
            there is none: then the wrong result must stay what it was.
    """
    for sources in pieces.shorter():
        try:
            piece = pieces.cut(sources)
            actual = result(piece)
        except Exception:  # a piece that cannot be compiled by itself is no smaller one
            continue
        if fault.same(piece.fault(actual)):
            return _with_fewer_rows(Reduced(piece, fault), actual, result, right)
    return None


def _with_fewer_rows(whole: Reduced, actual: Array, result: Result, right: Result | None) -> Reduced:
    """Halves extents, the first axes first, for as long as the fault stays."""
    found = whole
    while True:
        for half, slices in _halves(found.piece):
            expected = found.fault.part(slices)
            try:
                wrong = result(half).reshape(half.torch_value.shape)
                honest = half.judged(right(half)).excess <= 1 if right else _alike(wrong, _part(actual, found, slices))
            except Exception:  # shapes that do not fit are no smaller piece
                continue
            if honest and expected.same(half.fault(wrong)):
                found, actual = Reduced(half, expected, found.halved + 1), wrong
                break
        else:
            return found


def _part(actual: Array, found: Reduced, slices: tuple[slice, ...]) -> Array:
    part: Array = actual.reshape(found.piece.torch_value.shape)[slices]
    return part


def _alike(value: Array, other: Array) -> bool:
    """Returns whether two values differ by rounding at most."""
    return deviation(value, other, other).excess <= 1


def _halves(piece: Piece) -> Iterator[tuple[Piece, tuple[slice, ...]]]:
    """Yields the piece with half of an extent of its result, the last axis aside, and the part of the result it is.

    Whether it computes that part is not known.
    """
    shape = piece.torch_value.shape
    if any(is_call(binding.value, "relax.call_tir") for binding in bindings_of(piece.module["main"])):
        return  # loops have extents of their own
    for extent in dict.fromkeys(shape[:-1] or shape):
        if not extent or extent % 2:
            continue
        for flattened in (False, True):
            halve = _Halving(extent, flattened)
            try:
                module = halve.module(piece)
            except Exception:  # TVM refuses shapes that do not fit
                continue
            arguments = [
                array[halve.slices(array.shape)] if n < piece.inputs else array
                for n, array in enumerate(piece.arguments)
            ]
            slices = halve.slices(shape)
            yield (
                replace(
                    piece,
                    module=module,
                    arguments=tuple(arguments),
                    torch_value=piece.torch_value[slices],
                    exact=piece.exact[slices],
                ),
                slices,
            )


@dataclass(frozen=True)
class _Halving:
    """Takes the first half of an extent, wherever it is.

    Attributes:
        extent: The extent, even.
        flattened: Whether its multiples are halved, too: axes that were joined.
    """

    extent: int
    flattened: bool

    def module(self, piece: Piece) -> tvm.IRModule:
        """Returns the module with its inputs and the shapes in its operators halved.

        Raises:
            Exception: TVM's own, where shapes do not fit.
        """
        main = piece.module["main"]
        parameters = [
            relax.Var(parameter.name, relax.TensorType(self._shape(parameter.ty.shape), str(parameter.ty.dtype)))
            if n < piece.inputs
            else parameter
            for n, parameter in enumerate(main.params)
        ]
        new: dict[relax.Var, Any] = dict(zip(main.params, parameters, strict=True))
        builder = relax.BlockBuilder()
        with builder.function("main", parameters):
            with builder.dataflow():
                *bindings, last = bindings_of(main)
                for binding in bindings:
                    new[binding.var] = builder.emit(self._expression(binding.value, new))
                output = builder.emit_output(self._expression(last.value, new))
            builder.emit_func_output(output)
        changed = piece.module.clone()
        changed["main"] = builder.get()["main"].with_attr("num_input", piece.inputs)
        return changed

    def slices(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Returns the part of a tensor that stays."""
        return tuple(slice(0, self._halved(extent)) for extent in shape)

    def _halved(self, extent: int) -> int:
        multiple = extent > 0 and extent % self.extent == 0
        return extent // 2 if extent == self.extent or (self.flattened and multiple) else extent

    def _shape(self, shape: Any) -> list[int]:
        if not all(isinstance(extent, tirx.IntImm) for extent in shape):
            raise ValueError("symbolic extents have no half")
        return [self._halved(int(extent)) for extent in shape]

    def _expression(self, value: Any, new: dict[relax.Var, Any]) -> Any:
        if isinstance(value, relax.Var):
            return new.get(value, value)
        if isinstance(value, relax.ShapeExpr):
            return relax.ShapeExpr(self._shape(value.values))
        if isinstance(value, relax.Tuple):
            return relax.Tuple([self._expression(part, new) for part in value.fields])
        if isinstance(value, relax.TupleGetItem):
            return relax.TupleGetItem(self._expression(value.tuple_value, new), value.index)
        if isinstance(value, ir.Call):
            arguments = [self._expression(argument, new) for argument in value.args]
            return ir.Call(value.op, arguments, value.attrs, value.ty_args)
        return value
