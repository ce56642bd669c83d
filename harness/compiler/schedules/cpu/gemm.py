"""Lowers matrix products, linear layers and batched products with broadcasting, to blocked kernels.

The operand that depends only on parameters is resident, so that its packing is lifted out and runs once at load time;
with two activations the smaller one is. Leading dimensions that only the left operand has are folded into its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import ir, relax, sym

from harness.compiler import tir as T
from harness.compiler.schedules.common.folding import moved, ravel, row_starts
from harness.compiler.schedules.common.graph import call, is_call, static_shape
from harness.compiler.schedules.common.kernel import Argument, view
from harness.compiler.schedules.common.kernel_info import KernelInfo, Kind
from harness.compiler.schedules.cpu.bf16 import BF16, has_pairs
from harness.compiler.schedules.cpu.blocking import Extents, Side, panel_width
from harness.compiler.schedules.cpu.epilogue import Epilogue, ResultLayout
from harness.compiler.schedules.cpu.lowering import Context, LinearLayer, Lowering
from harness.compiler.schedules.cpu.microkernels.choice import choose
from harness.compiler.schedules.cpu.microkernels.fp32 import FP32
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel
from harness.compiler.schedules.cpu.packing import (
    Pack,
    PanelRead,
    Read,
    pack_function,
    read_left,
    read_right,
    stream,
    stream_rows,
)
from harness.compiler.schedules.cpu.product import Access, product_function
from harness.compiler.schedules.cpu.schedule import Product, blocking_of


@dataclass(frozen=True)
class Operand:
    """One side of a matrix product.

    Attributes:
        value: The Relax expression.
        shape: Its shape.
        batch: Its batch dimensions, aligned with those of the result; 1 where it is broadcast.
        transposed: Whether its last two dimensions are stored the other way round.
    """

    value: relax.Expr
    shape: tuple[int, ...]
    batch: tuple[int, ...]
    transposed: bool

    @property
    def matrices(self) -> int:
        """Returns the number of stored matrices."""
        return math.prod(self.batch)

    def index(self, batch: tuple[int, ...], b: Any) -> Any:
        """Returns the stored matrix that belongs to matrix b of the result."""
        if self.batch == batch:
            return b
        if self.matrices == 1:
            return 0
        result: Any = 0
        inner = math.prod(batch)
        for extent, stored_extent in zip(batch, self.batch, strict=True):
            inner //= extent
            if stored_extent != 1:
                result = result * stored_extent + b // inner % extent
            b = b % inner if inner > 1 else 0
        return result

    def reader(self, buffer: T.Buffer, rows: int, columns: int) -> Read:
        """Returns (matrix, row, column) → element."""
        if self.transposed:
            data = view(buffer, self.matrices, columns, rows)
            return lambda m, i, j: data[m, j, i]
        data = view(buffer, self.matrices, rows, columns)
        return lambda m, i, j: data[m, i, j]


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
    left = _operand(context, factors[0], left_shape, batch, may_transpose=not vector_left)
    right = _operand(context, factors[1], right_shape, batch, may_transpose=not vector_right)
    if right.matrices == 1 and not left.transposed and left.batch == batch:
        rows *= math.prod(batch)
        batch = ()
        left = Operand(left.value, left.shape, (), left.transposed)
        right = Operand(right.value, right.shape, (), right.transposed)
    extents = Extents(math.prod(batch), rows, columns, depth)
    lies_by_row = not left.transposed or _streaming_side(context, left, right) == "right"
    if rounded is None:
        arithmetic = context.micro_kernel(matmul, rows, depth, row_major=lies_by_row)
        return matrix_product(context, left, right, batch, extents, shape, arithmetic)
    arithmetic = choose(context.kernels, rows, depth, row_major=lies_by_row, layer=True)
    return replace(matrix_product(context, left, right, batch, extents, shape, arithmetic), rounds=True)


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
    arithmetic: MicroKernel = FP32,
) -> Lowering:
    """Lowers result[b] = left[b] · right[b], stored row by row as a tensor of any shape of that size."""
    streaming = _streaming_side(context, left, right)
    moving, staying = (left, right) if streaming == "left" else (right, left)
    at_load = context.is_parameter(staying.value)
    packed_extents = extents.packed(arithmetic.terms)
    workload = Product(extents, streaming, staying.matrices, at_load, moving.transposed, arithmetic.multiplies)
    decided = context.decide(workload, arithmetic)
    blocking = blocking_of(arithmetic, context.unit, packed_extents, streaming, decided)
    tile = blocking.tile
    resident: Side = "right" if streaming == "left" else "left"
    width = extents.width(resident)
    layout = _row_layout(extents, shape)
    by_row = streaming == "left" and not moving.transposed
    starts = None
    if by_row and extents.batch == 1:
        moving, starts = _moved_rows(context, moving, extents)

    def in_elements(term: Read) -> Read:
        return lambda m, i, k: arithmetic.pack(lambda index: term(m, i, index), k, packed_extents.depth)

    def pack_reader(buffer: T.Buffer) -> Read:
        if resident == "right":
            element = staying.reader(buffer, extents.depth, extents.columns)
            return in_elements(lambda m, j, k: element(m, k, j))
        return in_elements(staying.reader(buffer, extents.rows, extents.depth))

    def panels_of(panels: T.Buffer) -> PanelRead:
        read = read_left(panels, arithmetic) if resident == "left" else read_right(panels, arithmetic, blocking.chunk)
        return lambda b, p, k, i: read(staying.index(batch, b), p, k, i)

    def packing(builder: relax.BlockBuilder, value: relax.Expr) -> relax.Var:
        function = pack_function(
            resident,
            Argument("source", staying.shape, str(staying.value.ty.dtype)),
            staying.matrices,
            width,
            packed_extents.depth,
            tile,
            pack_reader,
            arithmetic,
            blocking.chunk,
        )
        return builder.emit(call(builder, "pack", function, [value]))

    def begins(b: Any, row: Any) -> Any:
        if starts is not None:
            return starts(row)
        return (moving.index(batch, b) * extents.rows + row) * extents.depth

    def pack_rows(streamed: T.Buffer) -> Pack:
        run = view(streamed, math.prod(moving.shape))
        return stream_rows(
            lambda index: arithmetic.pack(lambda place: run[place], index, packed_extents.depth),
            begins,
            extents,
            tile,
        )

    def build(builder: relax.BlockBuilder, inputs: Sequence[relax.Expr], epilogue: Epilogue) -> relax.Expr:
        packed = packing(builder, inputs[1])
        packed_shape = tuple(int(extent) for extent in packed.ty.shape)

        def body(*buffers: T.Buffer) -> Access:
            streamed, panels, *extras, result = buffers
            if streaming == "left":
                element = moving.reader(streamed, extents.rows, extents.depth)
            else:
                matrix = moving.reader(streamed, extents.depth, extents.columns)

                def element(m: Any, j: Any, k: Any) -> Any:
                    return matrix(m, k, j)

            store, touched = epilogue.write_back(layout, extras, result)
            if by_row:
                run = view(streamed, math.prod(moving.shape))
                return Access(
                    pack_rows(streamed), panels_of(panels), store, touched, lambda b, row, k: run[begins(b, row) + k]
                )
            pack = stream(
                in_elements(lambda b, i, k: element(moving.index(batch, b), i, k)),
                extents.width(streaming),
                panel_width(streaming, tile),
                tile.lanes if streaming == "right" and not moving.transposed else 1,
            )
            return Access(pack, panels_of(panels), store, touched)

        name = kernel_name("matmul", arithmetic, epilogue)
        function = product_function(
            name,
            packed_extents,
            streaming,
            blocking,
            [
                Argument("streamed", moving.shape, str(inputs[0].ty.dtype)),
                Argument("packed", packed_shape, arithmetic.dtype),
                *epilogue.arguments,
                epilogue.result(layout),
            ],
            body,
            KernelInfo(Kind.KERNEL, "matmul", writes=epilogue.operators),
            by_row,
            arithmetic,
        )
        return call(builder, name, function, [inputs[0], packed, *inputs[2:]])

    linear = None
    if by_row and at_load and extents.batch == 1 and arithmetic is FP32:
        linear = LinearLayer(extents, blocking, layout, moving.shape, packing, pack_rows, in_order=starts is None)
    return Lowering((moving.value, staying.value), layout, build, linear=linear)


def kernel_name(operator: str, arithmetic: MicroKernel, epilogue: Epilogue) -> str:
    """Returns a kernel's name, from its operator, its arithmetic and its epilogue."""
    return "_".join(filter(None, (operator, arithmetic.name))) + epilogue.label


def _moved_rows(context: Context, operand: Operand, extents: Extents) -> tuple[Operand, Callable[[Any], Any] | None]:
    """Reads the rows of a left operand where they were before they were moved around.

    Returns:
        The operand to read, and (row) → where the row starts in it; None if its rows lie one after the other.
    """
    folded = moved(context, operand.value)
    source = folded.inputs[0]
    starts = None if source.same_as(operand.value) else row_starts(folded, extents.rows, extents.depth)
    if starts is None:
        return operand, None
    shape = static_shape(source) or ()
    operand = Operand(source, shape, operand.batch, transposed=False)
    row = T.Var("row", "int32")
    in_order = sym.Analyzer().can_prove_equal(starts(row), row * extents.depth)
    return operand, None if in_order and math.prod(shape) == extents.rows * extents.depth else starts


def _operand(
    context: Context, value: relax.Expr, shape: tuple[int, ...], batch: tuple[int, ...], *, may_transpose: bool
) -> Operand:
    # PyTorch writes a linear layer on a strided input as a batched product with an expanded weight.
    value = context.before_broadcast(value)
    shape = static_shape(value, None) or shape
    stored_batch = shape[:-2]
    aligned = (1,) * (len(batch) - len(stored_batch)) + stored_batch
    source = context.transposed(value) if may_transpose else None
    if source is None:
        return Operand(value, shape, aligned, transposed=False)
    return Operand(source, (*shape[:-2], shape[-1], shape[-2]), aligned, transposed=True)


def _streaming_side(context: Context, left: Operand, right: Operand) -> Side:
    if context.is_parameter(right.value):
        return "left"
    if context.is_parameter(left.value):
        return "right"
    return "left" if math.prod(left.shape) >= math.prod(right.shape) else "right"


def _row_layout(
    extents: Extents, shape: tuple[int, ...], moved_row: Callable[[Any], Any] = lambda row: row
) -> ResultLayout:
    """Returns the layout of results row by row: the columns are the last dimension, unless it was dropped.

    Args:
        extents: The extents.
        shape: Shape of the result.
        moved_row: (row as the product counts them) → row of the result, if rows were permuted.
    """
    rows, columns = extents.rows, extents.columns
    ends_in_columns = bool(shape) and shape[-1] == columns

    def flat(b: Any, i: Any, j: Any) -> Any:
        return moved_row(b * rows + i) * columns + j

    def split(row: Any) -> list[Any]:
        result: list[Any] = []
        inner = math.prod(shape[:-1])
        for extent in shape[:-1]:
            inner //= extent
            result.append(row // inner % extent)
        return result

    def permuted(axes: tuple[int, ...]) -> ResultLayout | None:
        if not ends_in_columns or axes[-1] != len(axes) - 1:
            return None

        def row_after(row: Any) -> Any:
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
