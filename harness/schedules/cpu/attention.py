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

from tvm import ir, relax, tirx

from harness.schedules.common.attention import recognized
from harness.schedules.common.folding import fold, stored
from harness.schedules.common.graph import call
from harness.schedules.cpu import schedule
from harness.schedules.cpu.attention_operands import Attention
from harness.schedules.cpu.attention_per_head import Cut, per_head_kernel
from harness.schedules.cpu.attention_streaming import Tiles, streaming_kernel
from harness.schedules.cpu.epilogue import Epilogue
from harness.schedules.cpu.few_queries import few_queries_kernel
from harness.schedules.cpu.lowering import Context, Lowering


def lower_attention(context: Context, attention: ir.Call) -> Lowering | None:
    """`relax.nn.attention` and `relax.nn.attention_bias`, fp32 and of static shape."""
    bias = attention.args[3] if len(attention.args) > 3 else None
    found = recognized(attention, ("float32",), bias)
    if found is None:
        return None
    operands = [fold(context, argument) for argument in attention.args[:3]]
    query, key, value = operands
    problem = schedule.Attention(
        found.batch,
        found.heads,
        found.queries,
        found.keys,
        found.channels,
        found.width,
        None if bias is None else found.bias_dtype,
        found.diagonal is not None,
        found.bias or (),
    )
    decided = context.decide(problem)
    if problem.few(context.unit):
        # Neighbours of two kinds make no vector of channels.
        query, key, value = (
            operand if operand.period == 1 else stored(argument)
            for operand, argument in zip(operands, attention.args[:3], strict=True)
        )
        few = Attention(query, key, value, bias, found.scale, found.diagonal)
        return _lowering(few, lambda a: few_queries_kernel(a, context.unit.lanes, decided["parts"]))
    tiles = Tiles(
        schedule.tile_of(context.unit, decided),
        schedule.tile_of(context.unit, decided, ("result_rows", "result_vectors")),
    )
    many = Attention(query, key, value, bias, found.scale, found.diagonal)
    if problem.streams:
        return _lowering(many, lambda a: streaming_kernel(tiles, a))
    cut = Cut(tiles.scores, tiles.output, decided["parts"])
    return _lowering(many, lambda a: per_head_kernel(cut, a))


def _lowering(attention: Attention, kernel: Callable[[Attention], tirx.PrimFunc]) -> Lowering:
    def permuted(axes: tuple[int, ...]) -> Lowering | None:
        # Dimension d of the permuted result is dimension axes[d] of ours.
        return _lowering(replace(attention, result=tuple(axes.index(d) for d in attention.result)), kernel)

    def build(builder: relax.BlockBuilder, inputs: Sequence[relax.Expr], _epilogue: Epilogue) -> relax.Expr:
        return call(builder, "attention", kernel(attention), inputs)

    return Lowering(attention.inputs, None, build, permuted)
