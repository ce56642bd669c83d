"""Builds the compiled entry point `resize_masks`, which resizes the masks of the kept queries to the image's size.

It computes `interpolate(masks[kept], (h, w), mode="bilinear").sigmoid() > 0.5` of upstream's `Sam3Processor` with
PyTorch's arithmetic and order, but without logits at the image's size. A task interpolates a line of the small mask
along x and two such lines along y, and writes only whether the logit is large enough.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import Argument, fp32, prim_func, registers, scalar
from harness.models.sam3.deployed.preprocessing import Fma, emit_call
from harness.runtime.sam3.images import MASK_SIZE

NAME = "resize_masks"
LARGEST_OUTSIDE = 1.5 * 2.0**-24
"""The largest fp32 logit whose sigmoid is not above 0.5 in fp32: 1 + exp(-x) rounds to 2."""

_BLOCKS = 16
"""Tasks for one mask."""
_LANES = 64
"""Pixels of a line that are decided in one vector: one 64-byte store."""
_GATHERED = 16
"""Pixels of a line that are interpolated in one vector, whose operands are gathered."""


def resize_masks_module() -> tvm.IRModule:
    """Builds the function `resize_masks` and its kernels, ready for `harness.compiler.schedules.common.vm.lower_to_vm`.

    The function returns masks bool [k, h, w]. It takes `masks`, logits fp32 [1, q, 288, 288], `kept`, int64 [k], the
    indices of the kept masks, and `like`, uint8 [h, w, 3], of which only the shape is read. k may be zero. An index
    outside of 0 … q - 1 is a ValueError.
    """
    queries, count, height, width = (T.Var(name, "int64") for name in "qkhw")
    masks = relax.Var("masks", relax.TensorType([1, queries, MASK_SIZE, MASK_SIZE], "float32"))
    kept_queries = relax.Var("kept", relax.TensorType([count], "int64"))
    shape_image = relax.Var("like", relax.TensorType([height, width, 3], "uint8"))
    builder = relax.BlockBuilder()
    with builder.function(NAME, [masks, kept_queries, shape_image]):
        rows = _positions(builder, shape_image, 0, height)
        columns = _positions(builder, shape_image, 1, width)
        arguments = [masks, kept_queries, *rows, *columns]
        types = [count, height, width], "bool"
        builder.emit_func_output(emit_call(builder, "resize_kept_masks", _kernel(), arguments, types))
    return builder.get()


def _positions(builder: relax.BlockBuilder, shape_image: relax.Var, axis: int, size: T.Var) -> list[relax.Expr]:
    """Emits neighbours and weights of one axis."""
    types = ([2, size], "int32"), ([2, size], "float32")
    pair = emit_call(builder, f"interpolation_weights_{'yx'[axis]}", _table(axis), [shape_image], *types)
    return [builder.emit(relax.TupleGetItem(pair, index)) for index in range(2)]


def _table(axis: int) -> T.PrimFunc:
    """Builds the table of each output position's neighbours int32 [2, n] in the small mask and weights fp32 [2, n]."""
    shape = (T.Var("h", "int64"), T.Var("w", "int64"), 3)
    size = shape[axis]

    def body(_shape_image: T.Buffer, neighbours: T.Buffer, weights: T.Buffer) -> None:
        with T.serial(T.const(0, "int64"), size) as i:
            places, shares = source_indices(i, size)
            for end in range(2):
                T.buffer_store(neighbours, places[end], [end, i])
                T.buffer_store(weights, shares[end], [end, i])

    arguments = [
        Argument("like", shape, "uint8"),
        Argument("neighbours", (2, size), "int32"),
        Argument("weights", (2, size), "float32"),
    ]
    return prim_func("interpolation_weights", arguments, body)


def source_indices(
    position: T.Index, size: T.Index, fma: Fma = T.fma
) -> tuple[tuple[T.Expr, T.Expr], tuple[T.Expr, T.Expr]]:
    """Computes `compute_source_index_and_lambda` of PyTorch's `UpSample.h`, in its fp32 arithmetic.

    Args:
        position: Position in the output.
        size: Size of the output.
        fma: The target's fused multiply-add.

    Returns:
        The places int32 of the two values of the small mask on both sides of the position, and their weights fp32.
    """
    is_unchanged = size == MASK_SIZE
    scale = fp32(MASK_SIZE) / T.Cast("float32", size)
    # Compilers must keep the sum with 0, which prevents contraction with the subtraction.
    middle = fma(scale, T.Cast("float32", position) + fp32(0.5), fp32(0.0)) - fp32(0.5)
    place = T.Select(is_unchanged, T.Cast("float32", position), T.max(middle, fp32(0.0)))
    lower = T.min(T.Cast("int32", place), MASK_SIZE - 1)
    upper = T.min(lower + T.Cast("int32", T.Not(is_unchanged)), MASK_SIZE - 1)
    share = place - T.Cast("float32", lower)
    return (lower, upper), (fp32(1.0) - share, share)


def _kernel() -> T.PrimFunc:
    """Builds the kernel from logits, kept queries and the tables of both axes to masks bool [k, h, w].

    A task computes up to ⌈h / 16⌉ successive rows of one mask. Each row lies between two neighbouring rows of the small
    mask, which the task interpolates along x once and keeps as long as they are neighbours of the next row.
    """
    queries, count, height, width = (T.Var(name, "int64") for name in "qkhw")

    def body(
        masks: T.Buffer,
        kept_queries: T.Buffer,
        rows: T.Buffer,
        row_weights: T.Buffer,
        columns: T.Buffer,
        column_weights: T.Buffer,
        result: T.Buffer,
    ) -> None:
        with T.serial(T.const(0, "int64"), count) as n:
            is_valid = T.And(kept_queries[n] >= 0, kept_queries[n] < queries)
            with T.Assert(is_valid, "kept queries are numbers of masks, counted from 0", "ValueError"):
                T.evaluate(0)
        share = scalar(T.ceildiv(height, _BLOCKS), "int64")
        with T.parallel(T.const(0, "int64"), count * _BLOCKS) as task:
            mask = scalar(T.floordiv(task, _BLOCKS), "int64")
            query = scalar(kept_queries[mask], "int64")
            start = scalar(T.floormod(task, _BLOCKS) * share, "int64")
            # Rows of the small mask after interpolation along x; neighbours differ in parity.
            lines = T.alloc_buffer((2, width), "float32")
            row_of_line = registers((2,), "int32")
            for line in range(2):
                T.buffer_store(row_of_line, T.const(-1, "int32"), [line])
            with T.serial(T.const(0, "int64"), T.max(T.min(share, height - start), 0)) as step:
                y = start + step
                for neighbour in range(2):
                    row = scalar(rows[neighbour, y], "int32")
                    parity = row & 1
                    with T.If(row_of_line[parity] != row), T.Then():
                        T.buffer_store(row_of_line, row, [parity])

                        def interpolate(x: T.Index, row: T.Index = row, parity: T.Index = parity) -> None:
                            left, right = (masks[0, query, row, columns[end, x]] for end in range(2))
                            value = interpolate_pair(left, column_weights[0, x], right, column_weights[1, x])
                            T.buffer_store(lines, value, [parity, x])

                        _for_each_index(width, _GATHERED, interpolate)
                upper, lower = (scalar(rows[neighbour, y] & 1, "int32") for neighbour in range(2))
                above, below = (scalar(row_weights[neighbour, y], "float32") for neighbour in range(2))

                def decide(x: T.Index) -> None:
                    logit = interpolate_pair(lines[upper, x], above, lines[lower, x], below)
                    T.buffer_store(result, logit > fp32(LARGEST_OUTSIDE), [mask, y, x])

                _for_each_index(width, _LANES, decide)

    arguments = [
        Argument("masks", (1, queries, MASK_SIZE, MASK_SIZE)),
        Argument("kept", (count,), "int64"),
        Argument("rows", (2, height), "int32"),
        Argument("row_weights", (2, height)),
        Argument("columns", (2, width), "int32"),
        Argument("column_weights", (2, width)),
        Argument("result", (count, height, width), "bool"),
    ]
    return prim_func("resize_kept_masks", arguments, body)


def _for_each_index(count: T.Index, lanes: int, body: Callable[[T.Index], None]) -> None:
    """Emits `body(index)` for 0 … count, in whole vectors and a scalar remainder."""
    whole = T.floordiv(count, lanes)
    with T.serial(T.const(0, "int64"), whole) as v, T.vectorized(0, lanes) as lane:
        body(v * lanes + lane)
    with T.serial(T.const(0, "int64"), count - whole * lanes) as remainder:
        body(whole * lanes + remainder)


def interpolate_pair(
    first: T.Index, first_weight: T.Expr, second: T.Expr, second_weight: T.Expr, fma: Fma = T.fma
) -> T.Expr:
    """Computes the weighted sum of two values; like PyTorch's compiled code, it rounds one product and then fuses."""
    return fma(first, first_weight, second * second_weight)
