"""Lowers matrix products, linear layers and batched products with broadcasting, to blocked kernels.

The operand that depends only on parameters is resident, so that its packing is lifted out and runs once at load time;
with two activations the smaller one is. Leading dimensions that only the left operand has are folded into its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm import ir, relax, sym

from harness.compiler import tir as T
from harness.compiler.schedules.common.folding import moved, ravel, row_starts
from harness.compiler.schedules.common.graph import is_call, static_shape, transposed
from harness.compiler.schedules.common.kernel import view
from harness.compiler.schedules.cpu.bf16 import BF16, has_pairs
from harness.compiler.schedules.cpu.blocking import Extents, Side
from harness.compiler.schedules.cpu.contraction import Contraction, Resident, Streaming, across
from harness.compiler.schedules.cpu.epilogue import ResultLayout
from harness.compiler.schedules.cpu.lowering import Context, Lowering, contracted
from harness.compiler.schedules.cpu.microkernels.choice import choose
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel
from harness.compiler.schedules.cpu.packing import Pack, Read, stream_rows
from harness.compiler.schedules.cpu.schedule import Product
from harness.compiler.schedules.cpu.tile import Tile


@dataclass(frozen=True)
class Operand:
    """One side of a matrix product.

    Attributes:
        value: The Relax expression.
        batch: Its batch dimensions, aligned with those of the result; 1 where it is broadcast.
        transposed: Whether its last two dimensions are stored the other way round.
    """

    value: relax.Expr
    batch: tuple[int, ...]
    transposed: bool

    @property
    def size(self) -> int:
        """Returns the number of its elements."""
        return math.prod(static_shape(self.value, None) or ())

    @property
    def matrices(self) -> int:
        """Returns the number of stored matrices."""
        return math.prod(self.batch)

    def matrix(self, batch: tuple[int, ...], b: T.Index) -> T.Index:
        """Returns the stored matrix that belongs to matrix b of a result with these batch dimensions."""
        if self.batch == batch:
            return b
        if self.matrices == 1:
            return 0
        result: T.Index = 0
        inner = math.prod(batch)
        for extent, stored_extent in zip(batch, self.batch, strict=True):
            inner //= extent
            if stored_extent != 1:
                result = result * stored_extent + b // inner % extent
            b = b % inner if inner > 1 else 0
        return result

    def read(self, buffer: T.Buffer, extents: Extents, side: Side) -> Read:
        """Returns (matrix, row of the left or column of the right operand, k) → term."""
        width, depth = extents.width(side), extents.depth
        if self.transposed == (side == "left"):
            columns = view(buffer, self.matrices, depth, width)
            return lambda m, i, k: columns[m, k, i]
        rows = view(buffer, self.matrices, width, depth)
        return lambda m, i, k: rows[m, i, k]


def lower_matmul(context: Context, matmul: ir.Call) -> Lowering | None:
    """Lowers `relax.matmul` of static shape, in fp32 or rounded; None if the kernel does not apply.

    Rounded are the activation of a linear layer with bfloat16 weights (`rounded_left`), and both operands of a product
    of activations that has the note of `bf16.py`.
    """
    shape = static_shape(matmul)
    rounded = rounded_left(context, matmul)
    factors = matmul.args[0] if rounded is None else rounded, matmul.args[1]
    left_shape, right_shape = static_shape(factors[0]), static_shape(factors[1], "float32" if rounded is None else BF16)
    if shape is None or left_shape is None or right_shape is None or 0 in shape + left_shape:
        return None
    vector_left, vector_right = len(left_shape) == 1, len(right_shape) == 1
    rows = 1 if vector_left else left_shape[-2]
    columns = 1 if vector_right else right_shape[-1]
    depth = left_shape[-1]
    batch = shape[: len(shape) - (not vector_left) - (not vector_right)]
    left = _operand(context, factors[0], batch, may_transpose=not vector_left)
    right = _operand(context, factors[1], batch, may_transpose=not vector_right)
    if right.matrices == 1 and not left.transposed and left.batch == batch:
        rows *= math.prod(batch)
        batch = ()
        left, right = replace(left, batch=()), replace(right, batch=())
    extents = Extents(math.prod(batch), rows, columns, depth)
    lies_by_row = not left.transposed or _streaming_side(context, left, right) == "right"
    if rounded is None:
        micro_kernel = context.micro_kernel(matmul, rows, depth, row_major=lies_by_row)
        return matrix_product(context, left, right, batch, extents, shape, micro_kernel)
    micro_kernel = choose(context.kernels, rows, depth, row_major=lies_by_row, layer=True)
    return replace(matrix_product(context, left, right, batch, extents, shape, micro_kernel), rounds=True)


def rounded_left(context: Context, matmul: ir.Call) -> relax.Expr | None:
    """Returns the fp32 operand of a linear layer whose weights are bfloat16 and which rounds it; None of any other."""
    left, right = context.definition(matmul.args[0]), matmul.args[1]
    if not is_call(left, "relax.astype") or static_shape(left.args[0]) is None or not context.is_parameter(right):
        return None
    return left.args[0] if has_pairs(right) and str(left.ty.dtype) == BF16 else None


def matrix_product(
    context: Context,
    left: Operand,
    right: Operand,
    batch: tuple[int, ...],
    extents: Extents,
    shape: tuple[int, ...],
    micro_kernel: MicroKernel,
) -> Lowering:
    """Lowers result[b] = left[b] · right[b], stored row by row as a tensor of any shape of that size."""
    side = _streaming_side(context, left, right)
    resident_side: Side = "right" if side == "left" else "left"
    moving, staying = (left, right) if side == "left" else (right, left)
    workload = Product(
        extents,
        side,
        staying.matrices,
        at_load=context.is_parameter(staying.value),
        transposed=moving.transposed,
        dtype=micro_kernel.multiplies,
    )
    contraction = Contraction(
        "matmul",
        extents,
        _streaming(context, moving, batch, extents, side),
        Resident(
            staying.value,
            staying.matrices,
            lambda buffer: staying.read(buffer, extents, resident_side),
            lambda b: staying.matrix(batch, b),
        ),
        _row_layout(extents, shape),
        micro_kernel,
        context.blocking(workload, micro_kernel),
    )
    return contracted(contraction)


def _streaming(context: Context, operand: Operand, batch: tuple[int, ...], extents: Extents, side: Side) -> Streaming:
    if side == "left" and not operand.transposed:
        return _streaming_rows(context, operand, batch, extents)

    def read(buffer: T.Buffer) -> Read:
        term = operand.read(buffer, extents, side)
        return lambda b, i, k: term(operand.matrix(batch, b), i, k)

    neighbours = side == "right" and not operand.transposed
    return Streaming(side, operand.value, across(side, extents, read, neighbours=neighbours))


def _streaming_rows(context: Context, operand: Operand, batch: tuple[int, ...], extents: Extents) -> Streaming:
    """Describes a left operand whose rows are runs of memory."""
    starts = None
    if extents.batch == 1:
        operand, starts = _moved_rows(context, operand, extents)

    def begins(b: T.Index, row: T.Index) -> T.Index:
        if starts is not None:
            return starts(row)
        return (operand.matrix(batch, b) * extents.rows + row) * extents.depth

    def read(buffer: T.Buffer) -> Read:
        line = view(buffer, operand.size)
        return lambda b, row, k: line[begins(b, row) + k]

    def pack(buffer: T.Buffer, tile: Tile, micro_kernel: MicroKernel) -> Pack:
        line, depth = view(buffer, operand.size), extents.packed(micro_kernel.terms).depth
        return stream_rows(
            lambda index: micro_kernel.pack(lambda place: line[place], index, depth), begins, extents, tile
        )

    return Streaming("left", operand.value, pack, read, in_order=starts is None)


def _moved_rows(
    context: Context, operand: Operand, extents: Extents
) -> tuple[Operand, Callable[[T.Index], T.Index] | None]:
    """Reads the rows of a left operand where they were before they were moved around.

    Returns:
        The operand to read, and (row) → where the row starts in it; None if its rows lie one after the other.
    """
    folded = moved(context, operand.value)
    source = folded.inputs[0]
    starts = None if source.same_as(operand.value) else row_starts(folded, extents.rows, extents.depth)
    if starts is None:
        return operand, None
    operand = replace(operand, value=source)
    row = T.Var("row", "int32")
    in_order = sym.Analyzer().can_prove_equal(starts(row), row * extents.depth)
    return operand, None if in_order and operand.size == extents.rows * extents.depth else starts


def _operand(context: Context, value: relax.Expr, batch: tuple[int, ...], *, may_transpose: bool) -> Operand:
    # PyTorch writes a linear layer on a strided input as a batched product with an expanded weight.
    value = context.before_broadcast(value)
    stored_batch = (static_shape(value, None) or ())[:-2]
    aligned = (1,) * (len(batch) - len(stored_batch)) + stored_batch
    source = transposed(context.definition(value)) if may_transpose else None
    return Operand(value if source is None else source, aligned, transposed=source is not None)


def _streaming_side(context: Context, left: Operand, right: Operand) -> Side:
    if context.is_parameter(right.value):
        return "left"
    if context.is_parameter(left.value):
        return "right"
    return "left" if left.size >= right.size else "right"


def _row_layout(
    extents: Extents, shape: tuple[int, ...], moved_row: Callable[[T.Index], T.Index] = lambda row: row
) -> ResultLayout:
    """Returns the layout of results row by row: the columns are the last dimension, unless it was dropped.

    Args:
        extents: The extents.
        shape: Shape of the result.
        moved_row: (row as the product counts them) → row of the result, if rows were permuted.
    """
    rows, columns = extents.rows, extents.columns
    ends_in_columns = bool(shape) and shape[-1] == columns

    def flat(b: T.Index, i: T.Index, j: T.Index) -> T.Index:
        return moved_row(b * rows + i) * columns + j

    def split(row: T.Index) -> list[T.Index]:
        result: list[T.Index] = []
        inner = math.prod(shape[:-1])
        for extent in shape[:-1]:
            inner //= extent
            result.append(row // inner % extent)
        return result

    def permuted(axes: tuple[int, ...]) -> ResultLayout | None:
        if not ends_in_columns or axes[-1] != len(axes) - 1:
            return None

        def row_after(row: T.Index) -> T.Index:
            index = split(moved_row(row))
            return ravel([index[axis] for axis in axes[:-1]], [shape[axis] for axis in axes[:-1]])

        return _row_layout(extents, tuple(shape[axis] for axis in axes), row_after)

    return ResultLayout(
        shape,
        flat,
        lambda b, i, j: [*split(moved_row(b * rows + i)), j],
        frozenset(range(len(shape))) if ends_in_columns else frozenset[int](),
        lambda reshaped: _row_layout(extents, reshaped, moved_row),
        permuted,
    )
