"""Applies epilogues: the steps from an element of a product to the stored value, such as bias, activation, residual.

An epilogue is a chain of elementwise steps. It is found on Relax (`rewrite.py`), carried as plain data, and emitted in
the write-back of the register tile, so that the product's result does not travel through memory once per step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm import ir, relax

from harness.compiler import tir as T
from harness.compiler.schedules.common.folding import BINARY
from harness.compiler.schedules.common.graph import number, operator_name, permutation, static_shape
from harness.compiler.schedules.common.kernel import Argument, fp32, view
from harness.compiler.schedules.cpu import math as elementary
from harness.compiler.schedules.cpu.bf16 import BF16, to_bf16

UNARY: dict[str, Callable[[T.Expr], T.Expr]] = {
    "relax.nn.relu": lambda x: T.Select(x < fp32(0.0), fp32(0.0), x),
    "relax.nn.gelu": elementary.gelu,
    "relax.nn.silu": elementary.silu,
    "relax.sigmoid": elementary.sigmoid,
    "relax.negative": lambda x: fp32(0.0) - x,
}
_UNARY_FOR_BF16: dict[str, Callable[[T.Expr], T.Expr]] = {"relax.nn.gelu": elementary.gelu_for_bf16}
"""Functions that replace those of `_UNARY` right before the result is rounded to bfloat16."""
_ROUND = "relax.astype"
"""The step that rounds to bfloat16, always the last one."""
Value = Callable[[T.Index, T.Index, T.Index], T.Expr]
"""Takes batch, row and column, and returns an element of a tensor."""
Store = Callable[[T.Index, T.Index, T.Index, T.Expr], None]
"""Takes batch, row, column and value, and emits the store of an element."""
Touched = Callable[[T.Index, T.Index, T.Index], list[T.Expr]]
"""Takes batch, row and column, and returns the elements in memory that a store touches."""
Finished = Callable[[T.Index, T.Index, T.Index, T.Expr], T.Expr]
"""Takes batch, row, column and value, and returns the value after the last step."""


@dataclass(frozen=True)
class ResultLayout:
    """The positions of a product's elements in its result.

    Attributes:
        shape: The result's shape.
        flat: (batch, row, column) → index into the result as one contiguous line.
        coordinates: (batch, row, column) → index along each dimension.
        cheap: The dimensions whose coordinate needs no division by a column; others are only read through `flat`.
        reshaped: Returns the layout of the same elements in the result of a new shape.
        permuted: Returns the layout of the same elements in the result permuted by axes; None if rows of the product
            would be split.
        contiguous: Whether neighbouring columns are neighbours in memory.
    """

    shape: tuple[int, ...]
    flat: Callable[[T.Index, T.Index, T.Index], T.Index]
    coordinates: Callable[[T.Index, T.Index, T.Index], Sequence[T.Index]]
    cheap: frozenset[int]
    reshaped: Callable[[tuple[int, ...]], ResultLayout] | None = None
    permuted: Callable[[tuple[int, ...]], ResultLayout | None] = lambda axes: None
    contiguous: bool = True

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Returns whether a tensor of this shape, broadcast to the result, can be an operand of a step."""
        if shape == self.shape:
            return True
        if len(shape) > len(self.shape):
            return False
        offset = len(self.shape) - len(shape)
        return all(
            extent == 1 or (extent == self.shape[d + offset] and d + offset in self.cheap)
            for d, extent in enumerate(shape)
        )


@dataclass(frozen=True)
class Step:
    """One elementwise operation: `op` applied to the running value and, if binary, to a constant or the next operand.

    Attributes:
        op: Relax name; a reshape or permutation changes no value, but its place in the result and the shape that
            operands of later steps are broadcast to.
        constant: Second argument of a binary operation, if it is a number.
        operand: Whether the second argument is a tensor instead.
        swapped: Whether the running value is the right-hand side.
        shape: The result of a reshape or permutation.
        axes: Axes of a permutation.
    """

    op: str
    constant: float | None = None
    operand: bool = False
    swapped: bool = False
    shape: tuple[int, ...] | None = None
    axes: tuple[int, ...] | None = None

    def moved(self, layout: ResultLayout) -> ResultLayout:
        """Returns the layout after this step."""
        if self.shape is None:
            return layout
        after = layout.permuted(self.axes) if self.axes is not None else layout.reshaped and layout.reshaped(self.shape)
        if after is None:
            raise ValueError(f"{self.op} cannot follow this product")
        return after


def following_step(value: ir.Call, running: relax.Var, layout: ResultLayout) -> tuple[Step, relax.Expr | None] | None:
    """Returns an operator on the running value as a step, and its tensor operand; None if no write-back can do it.

    Args:
        value: The operator.
        running: The variable of the running value.
        layout: The layout of the running value.
    """
    name, shape = operator_name(value), static_shape(value)
    if shape and name == "relax.reshape" and value.args[0].same_as(running):
        return None if layout.reshaped is None else (Step(name, shape=shape), None)
    if shape and name == "relax.permute_dims":
        axes = permutation(value)
        return None if layout.permuted(axes) is None else (Step(name, shape=shape, axes=axes), None)
    if shape != layout.shape or name not in (UNARY | BINARY):
        return None
    if name in UNARY:
        return Step(name), None
    swapped = value.args[1].same_as(running)
    other = value.args[0] if swapped else value.args[1]
    constant, extent = number(other), static_shape(other)
    if constant is not None:
        return Step(name, constant=constant, swapped=swapped), None
    if extent is None or not layout.accepts(extent):
        return None
    return Step(name, operand=True, swapped=swapped), other


@dataclass(frozen=True)
class Epilogue:
    """A chain of steps and the shapes of their tensor operands, in order."""

    steps: tuple[Step, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()

    def rounded(self) -> Epilogue:
        """Returns the same epilogue with a result that is stored in bfloat16."""
        return replace(self, steps=(*self.steps, Step(_ROUND)))

    @property
    def arguments(self) -> list[Argument]:
        """Returns the kernel's parameters for the tensor operands."""
        return [Argument(f"extra{n}", shape) for n, shape in enumerate(self.shapes)]

    @property
    def operators(self) -> tuple[str, ...]:
        """Returns the Relax operators that change a value, without `relax.`."""
        return tuple(step.op.removeprefix("relax.") for step in self.steps if step.shape is None)

    @property
    def label(self) -> str:
        """Returns the suffix for the kernel's name."""
        return "".join("_" + operator.rpartition(".")[2] for operator in self.operators)

    def final(self, layout: ResultLayout) -> ResultLayout:
        """Returns the layout after the last step."""
        for step in self.steps:
            layout = step.moved(layout)
        return layout

    def result(self, layout: ResultLayout) -> Argument:
        """Returns the kernel's parameter for the stored result."""
        rounds = bool(self.steps) and self.steps[-1].op == _ROUND
        return Argument("result", self.final(layout).shape, BF16 if rounds else "float32")

    def write_back(self, layout: ResultLayout, operands: Sequence[T.Buffer], result: T.Buffer) -> tuple[Store, Touched]:
        """Returns how an element reaches the result; call it where views of the buffers may be declared.

        Returns:
            A function of (batch, row, column, value) that emits the store; and one of (batch, row, column) that returns
                the elements that it touches in tensors as large as the result: the element that it writes, then those
                that it reads; none where columns are not neighbours in memory.
        """
        readers = self._readers(layout, operands)
        final = self.final(layout)
        line = view(result, math.prod(final.shape))

        def store(b: T.Index, i: T.Index, j: T.Index, value: T.Expr) -> None:
            finished = self._finished(value, [reader(b, i, j) for reader, _ in readers])
            T.buffer_store(line, finished, [final.flat(b, i, j)])

        def touched(b: T.Index, i: T.Index, j: T.Index) -> list[T.Expr]:
            if not final.contiguous:
                return []
            return [line[final.flat(b, i, j)], *(reader(b, i, j) for reader, whole in readers if whole)]

        return store, touched

    def finished(self, layout: ResultLayout, operands: Sequence[T.Buffer]) -> Finished:
        """Returns (batch, row, column, value) → the value after the last step, for a caller that stores it itself."""
        readers = self._readers(layout, operands)
        return lambda b, i, j, value: self._finished(value, [reader(b, i, j) for reader, _ in readers])

    def _readers(self, layout: ResultLayout, operands: Sequence[T.Buffer]) -> list[tuple[Value, bool]]:
        """Returns how each tensor operand is read, and whether it is as large as the result and so read once."""
        readers: list[tuple[Value, bool]] = []
        for step in self.steps:
            layout = step.moved(layout)
            if step.operand:
                shape = self.shapes[len(readers)]
                readers.append((_reader(layout, shape, operands[len(readers)]), shape == layout.shape))
        return readers

    def _finished(self, value: T.Expr, operands: Sequence[T.Expr]) -> T.Expr:
        waiting = iter(operands)
        steps = [step for step in self.steps if step.shape is None]
        for n, step in enumerate(steps):
            if step.op == _ROUND:
                value = to_bf16(value)
                continue
            if step.op in UNARY:
                rounds = n + 1 < len(steps) and steps[n + 1].op == _ROUND
                value = (UNARY | _UNARY_FOR_BF16 if rounds else UNARY)[step.op](value)
                continue
            other = next(waiting) if step.operand else fp32(step.constant or 0.0)
            value = BINARY[step.op](other, value) if step.swapped else BINARY[step.op](value, other)
        return value


def _reader(layout: ResultLayout, shape: tuple[int, ...], buffer: T.Buffer) -> Value:
    if shape == layout.shape:
        line = view(buffer, math.prod(shape))
        return lambda b, i, j: line[layout.flat(b, i, j)]
    offset = len(layout.shape) - len(shape)

    def read(b: T.Index, i: T.Index, j: T.Index) -> T.Expr:
        index = layout.coordinates(b, i, j)
        return buffer[tuple(0 if extent == 1 else index[d + offset] for d, extent in enumerate(shape))]

    return read
