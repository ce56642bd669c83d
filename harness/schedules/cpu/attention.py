"""Scaled dot-product attention without the full score matrix, its softmax exact and its sums in several levels.

Scores are kept transposed, as a strip [keys, queries] of a block of keys and of queries, so that everything that
happens per query (maximum, exponentials, their sum) is vectorized over queries and needs no reduction across lanes:

    strip[key, query] = Σ_d key[key, d] · (scale · query[query, d])  (+ bias, -inf where masked)
    factor = exp(maximum before - maximum),  strip = exp(strip - maximum)
    sum = factor · sum + Σ_key strip
    result[query, c] = factor · result[query, c] + Σ_key strip[key, query] · value[key, c]

and result / sum at the end. The exponentials of a chunk of keys are computed just before the product takes the chunk. A
query whose keys are all masked gives zero, as in PyTorch.

Three kernels do that: tasks that each copy the keys and values of a head (`attention_per_head.py`), keys and values
that are packed a block at a time for all queries (`attention_streaming.py`), and, for a few queries, keys and values
that are read where they lie (`few_queries.py`). This module chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tvm import ir, relax, tirx

from harness.schedules.common.attention import Attention as Problem
from harness.schedules.common.attention import recognized
from harness.schedules.common.folding import Folded, Index, Reader, fold, stored
from harness.schedules.common.graph import call, extents, static_shape
from harness.schedules.cpu import schedule
from harness.schedules.cpu.attention_operands import Attention
from harness.schedules.cpu.attention_per_head import Cut, per_head_kernel
from harness.schedules.cpu.attention_streaming import Tiles, streaming_kernel
from harness.schedules.cpu.epilogue import Epilogue, Step
from harness.schedules.cpu.few_queries import few_queries_kernel
from harness.schedules.cpu.gemm import lower_matmul
from harness.schedules.cpu.lowering import Context, Lowering
from harness.schedules.cpu.moves import source_of
from harness.schedules.cpu.value_projection import Projection, projection_of

_Kernel = Callable[[Attention], tirx.PrimFunc]


def lower_attention(context: Context, attention: ir.Call) -> Lowering | None:
    """`relax.nn.attention` and `relax.nn.attention_bias`, fp32 and of static shape but for the number of keys."""
    bias = attention.args[3] if len(attention.args) > 3 else None
    found = recognized(attention, ("float32",), bias, symbolic_keys=True)
    if found is None:
        return None
    projection = projection_of(context, attention)
    if projection is not None and not context.projected_afterwards.issuperset(projection.bindings):
        projection = None
    if projection is not None:
        found = replace(found, width=projection.narrow)
    kernel, few = _choose(context, found)
    keys, diagonal = found.keys, found.diagonal
    if not isinstance(keys, int):
        keys = tirx.Var("n", "int64")
        diagonal = diagonal if isinstance(diagonal, int | None) else keys - found.queries
    query, key, value = _operands(context, attention, projection, keys, few)
    operands = Attention(query, key, value, bias, found.scale, diagonal, projected=projection is not None)
    if projection is None:
        return _lowering(operands, kernel)
    return _projected(context, operands, kernel, projection, static_shape(attention) or ())


def _choose(context: Context, found: Problem) -> tuple[_Kernel, bool]:
    """The kernel for a problem, and whether it is the one for a few queries."""
    static = isinstance(found.keys, int)
    problem = schedule.Attention(
        found.batch,
        found.heads,
        found.queries,
        found.keys if static else 0,
        found.channels,
        found.width,
        None if found.bias is None else found.bias_dtype,
        found.diagonal is not None,
        found.bias or (),
    )
    if problem.few(context.unit):
        parts = context.decide(problem)["parts"]
        return lambda attention: few_queries_kernel(attention, context.unit.lanes, parts), True
    decided = context.decide(problem) if static else schedule.decided(problem, context.unit, {})
    tiles = Tiles(
        schedule.tile_of(context.unit, decided),
        schedule.tile_of(context.unit, decided, ("result_rows", "result_vectors")),
    )
    if problem.streams:
        return lambda attention: streaming_kernel(tiles, attention), False
    cut = Cut(tiles.scores, tiles.output, decided["parts"])
    return lambda attention: per_head_kernel(cut, attention), False


def _operands(
    context: Context, attention: ir.Call, projection: Projection | None, keys: Any, few: bool
) -> tuple[Folded, Folded, Folded]:
    """Query, key and value as the kernel reads them, with so many keys."""

    def read(value: relax.Expr) -> Folded:
        folded = _read(context, value)
        # A few queries read vectors of channels, and neighbours of two kinds make none.
        return stored(value) if few and folded.period != 1 else folded

    def with_keys(operand: Folded, width: int) -> Folded:
        batch, _, heads, _ = extents(attention.args[1]) or ()
        return replace(operand, shape=(batch, keys, heads, width))

    query, key, value = attention.args[:3]
    width = int(value.ty.shape[3])
    if projection is None:
        return read(query), with_keys(read(key), int(key.ty.shape[3])), with_keys(read(value), width)
    rows, row_of = read(projection.source), projection.rows

    def element(reader: Reader, at: Index) -> Any:
        return rows.element(reader, [*row_of(reader.analyzer, at[:-1]), at[-1]])

    narrow = with_keys(replace(rows, element=element), projection.narrow)
    return read(query), with_keys(read(key), int(key.ty.shape[3])), narrow


def _read(context: Context, value: relax.Expr) -> Folded:
    """A tensor as far back as that pays; if it has symbolic extents, only through what moves elements."""
    if static_shape(value) is not None:
        return fold(context, value)
    moved = source_of(context, value)

    def element(reader: Reader, at: Index) -> Any:
        return reader.buffers[0][tuple(moved.index(reader.analyzer, at))]

    return Folded((moved.source,), extents(value) or (), element)


def _lowering(attention: Attention, kernel: _Kernel) -> Lowering:
    def permuted(axes: tuple[int, ...]) -> Lowering | None:
        # Dimension d of the permuted result is dimension axes[d] of ours.
        return _lowering(replace(attention, result=tuple(axes.index(d) for d in attention.result)), kernel)

    def build(builder: relax.BlockBuilder, inputs: Sequence[relax.Expr], _epilogue: Epilogue) -> relax.Expr:
        return call(builder, "attention", kernel(attention), inputs)

    return Lowering(attention.inputs, None, build, permuted)


def _projected(
    context: Context, attention: Attention, kernel: _Kernel, projection: Projection, shape: tuple[int, ...]
) -> Lowering:
    """Attention to what values are a projection of, and the projection of its result, which has this shape."""
    attended = relax.Var("attended", relax.TensorType([*shape[:-1], projection.narrow], "float32"))
    matmul = relax.BlockBuilder().normalize(relax.op.matmul(attended, projection.weight))
    product = lower_matmul(context, matmul)
    if product is None:
        raise AssertionError("a product of static shape has a kernel")
    bias = () if projection.bias is None else (projection.bias,)
    others = tuple(value for value in product.inputs if not value.same_as(attended))
    first = len(attention.inputs)

    def build(builder: relax.BlockBuilder, inputs: Sequence[relax.Expr], epilogue: Epilogue) -> relax.Expr:
        result = builder.emit(call(builder, "attention", kernel(attention), inputs[:first]))
        weights = iter(inputs[first : first + len(others)])
        operands = [result if value.same_as(attended) else next(weights) for value in product.inputs]
        added = tuple(Step("relax.add", operand=True) for _ in bias)
        shapes = tuple(static_shape(value) or () for value in bias)
        whole = Epilogue((*added, *epilogue.steps), (*shapes, *epilogue.shapes))
        return product.build(builder, [*operands, *inputs[first + len(others) :]], whole)

    return Lowering((*attention.inputs, *others, *bias), product.layout, build)
