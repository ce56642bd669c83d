"""The compiled entry point `resize_masks`: the masks of the queries that were kept, at the image's size.

What upstream's `Sam3Processor` does with `interpolate(masks[kept], (h, w), mode="bilinear").sigmoid() > 0.5`, with
PyTorch's arithmetic in its order, but without the logits at the image's size: a task interpolates a line of the small
mask along x, two such lines along y, and writes only whether the logit is large enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from harness.models.sam3.deployed.preprocessing import Fma
from harness.schedules.common.kernel import Argument, fp32, prim_func
from harness.schedules.common.variables import array, constant

SIZE = 288
"""Height and width of the masks that the model gives."""
NAME = "resize_masks"
LARGEST_OUTSIDE = 1.5 * 2.0**-24
"""The largest fp32 logit whose sigmoid is not above 0.5 in fp32: 1 + exp(-x) rounds to 2."""

_BLOCKS = 16
"""Tasks for one mask."""
_LANES = 64
"""Pixels of a line that are decided together: one 64-byte store."""
_GATHERED = 16


def resize_masks_module() -> tvm.IRModule:
    """Builds the function `resize_masks` and its kernels, ready for `harness.schedules.common.vm.lower_to_vm`.

    The function takes `masks`, logits fp32 [1, q, 288, 288], `kept`, int64 [k], the numbers of some of the q masks, and
    `like`, uint8 [h, w, 3], of which only the shape matters; it returns bool [k, h, w]. k may be zero. A number that no
    mask has is a ValueError.
    """
    queries, count, height, width = (tirx.Var(name, "int64") for name in "qkhw")
    masks = relax.Var("masks", relax.TensorType([1, queries, SIZE, SIZE], "float32"))
    kept = relax.Var("kept", relax.TensorType([count], "int64"))
    like = relax.Var("like", relax.TensorType([height, width, 3], "uint8"))
    builder = relax.BlockBuilder()
    with builder.function(NAME, [masks, kept, like]):
        rows = _positions(builder, like, 0, height)
        columns = _positions(builder, like, 1, width)
        result = builder.emit(
            relax.call_tir(
                builder.add_func(_kernel(), "resize_kept_masks"),
                [masks, kept, *rows, *columns],
                relax.TensorType([count, height, width], "bool"),
            )
        )
        builder.emit_func_output(result)
    return builder.get()


def _positions(builder: relax.BlockBuilder, like: relax.Var, axis: int, size: tirx.Var) -> list[relax.Expr]:
    """Emits neighbours and weights of one axis."""
    pair = builder.emit(
        relax.call_tir(
            builder.add_func(_table(axis), f"interpolation_weights_{'yx'[axis]}"),
            [like],
            [relax.TensorType([2, size], "int32"), relax.TensorType([2, size], "float32")],
        )
    )
    return [builder.emit(relax.TupleGetItem(pair, 0)), builder.emit(relax.TupleGetItem(pair, 1))]


def _table(axis: int) -> tirx.PrimFunc:
    """Builds the table of each output position's neighbours int32 [2, n] in the small mask and weights fp32 [2, n]."""
    shape = (tirx.Var("h", "int64"), tirx.Var("w", "int64"), 3)
    size = shape[axis]

    def body(_like: tirx.Buffer, neighbours: tirx.Buffer, weights: tirx.Buffer) -> None:
        with T.serial(tirx.const(0, "int64"), size) as i:
            source = source_indices(i, size)
            for end in range(2):
                T.buffer_store(neighbours, source.neighbours[end], [end, i])
                T.buffer_store(weights, source.weights[end], [end, i])

    arguments = [
        Argument("like", shape, "uint8"),
        Argument("neighbours", (2, size), "int32"),
        Argument("weights", (2, size), "float32"),
    ]
    return prim_func("interpolation_weights", arguments, body)


@dataclass(frozen=True)
class SourceIndices:
    """The two values of the small mask between which an output position lies along an axis.

    Attributes:
        neighbours: Their positions, int32.
        weights: Their shares, fp32.
    """

    neighbours: tuple[Any, Any]
    weights: tuple[Any, Any]


def source_indices(position: Any, size: Any, fma: Fma = tirx.op.fma) -> SourceIndices:
    """Computes what `compute_source_index_and_lambda` in PyTorch's `UpSample.h` does, in its fp32.

    Args:
        position: Position in the output.
        size: Size of the output.
        fma: How the target computes it.
    """
    same = size == SIZE
    scale = fp32(SIZE) / tirx.Cast("float32", size)
    # A sum with 0, which compilers must keep, because they may not contract it with the subtraction.
    middle = fma(scale, tirx.Cast("float32", position) + fp32(0.5), fp32(0.0)) - fp32(0.5)
    place = tirx.Select(same, tirx.Cast("float32", position), tirx.max(middle, fp32(0.0)))
    left = tirx.min(tirx.Cast("int32", place), SIZE - 1)
    right = tirx.min(left + tirx.Cast("int32", tirx.Not(same)), SIZE - 1)
    share = place - tirx.Cast("float32", left)
    return SourceIndices((left, right), (fp32(1.0) - share, share))


def _kernel() -> tirx.PrimFunc:
    """Builds the masks bool [k, h, w] from the logits and the tables of both axes."""
    queries, count, height, width = (tirx.Var(name, "int64") for name in "qkhw")

    def body(
        masks: tirx.Buffer,
        kept: tirx.Buffer,
        rows: tirx.Buffer,
        row_weights: tirx.Buffer,
        columns: tirx.Buffer,
        column_weights: tirx.Buffer,
        result: tirx.Buffer,
    ) -> None:
        with T.serial(tirx.const(0, "int64"), count) as n:
            known = tirx.And(kept[n] >= 0, kept[n] < queries)
            with T.Assert(known, "kept queries are numbers of masks, counted from 0", "ValueError"):
                T.evaluate(0)
        share = constant(tirx.ceildiv(height, _BLOCKS), "int64")
        with T.parallel(tirx.const(0, "int64"), count * _BLOCKS) as task:
            mask = constant(tirx.floordiv(task, _BLOCKS), "int64")
            query = constant(kept[mask], "int64")
            start = constant(tirx.floormod(task, _BLOCKS) * share, "int64")
            # Rows of the small mask that are interpolated along x already: neighbours differ in parity.
            lines = T.alloc_buffer((2, width), "float32")
            held = array(2, "int32")
            for parity in range(2):
                T.buffer_store(held, tirx.const(-1, "int32"), [parity])
            with T.serial(tirx.const(0, "int64"), tirx.max(tirx.min(share, height - start), 0)) as step:
                y = start + step
                for neighbour in range(2):
                    row = constant(rows[neighbour, y], "int32")
                    parity = row & 1
                    with T.If(held[parity] != row), T.Then():
                        T.buffer_store(held, row, [parity])

                        def interpolate(x: Any, row: Any = row, parity: Any = parity) -> None:
                            ends = [masks[0, query, row, columns[end, x]] for end in range(2)]
                            value = mixed(ends[0], column_weights[0, x], ends[1], column_weights[1, x])
                            T.buffer_store(lines, value, [parity, x])

                        _each(width, _GATHERED, interpolate)
                upper, lower = (constant(rows[neighbour, y] & 1, "int32") for neighbour in range(2))
                above, below = (constant(row_weights[neighbour, y], "float32") for neighbour in range(2))

                def decide(x: Any) -> None:
                    logit = mixed(lines[upper, x], above, lines[lower, x], below)
                    T.buffer_store(result, logit > fp32(LARGEST_OUTSIDE), [mask, y, x])

                _each(width, _LANES, decide)

    arguments = [
        Argument("masks", (1, queries, SIZE, SIZE)),
        Argument("kept", (count,), "int64"),
        Argument("rows", (2, height), "int32"),
        Argument("row_weights", (2, height)),
        Argument("columns", (2, width), "int32"),
        Argument("column_weights", (2, width)),
        Argument("result", (count, height, width), "bool"),
    ]
    return prim_func("resize_kept_masks", arguments, body)


def _each(count: Any, lanes: int, body: Callable[[Any], None]) -> None:
    """Emits `body(index)` for 0 … count, in vectors as far as they are whole."""
    whole = tirx.floordiv(count, lanes)
    with T.serial(tirx.const(0, "int64"), whole) as v, T.vectorized(0, lanes) as lane:
        body(v * lanes + lane)
    with T.serial(tirx.const(0, "int64"), count - whole * lanes) as rest:
        body(whole * lanes + rest)


def mixed(first: Any, share: Any, second: Any, other: Any, fma: Fma = tirx.op.fma) -> Any:
    """Computes the mean of two values; like PyTorch's compiled code, it rounds one product and then fuses."""
    return fma(first, share, second * other)
