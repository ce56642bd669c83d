"""Chooses kernels of scaled dot-product attention, which never store the full score matrix; softmax is exact.

Scores are stored transposed, as a strip [keys, queries] of a block of keys and of queries, so that the steps per query
(maximum, exponentials, their sum) are vectorized over queries and need no reduction across lanes:

    strip[key, query] = Σ_d key[key, d] · (scale · query[query, d])  (+ bias, -inf where masked)
    factor = exp(maximum before - maximum),  strip = exp(strip - maximum)
    sum = factor · sum + Σ_key strip
    result[query, c] = factor · result[query, c] + Σ_key strip[key, query] · value[key, c]

and result / sum at the end. The exponentials of a chunk of keys are computed just before the product takes the chunk. A
query whose keys are all masked gives zero, as in PyTorch.

There are three kernels: tasks that each copy the keys and values of a head (`attention_per_head.py`), keys and values
that are packed a block at a time for all queries (`attention_streaming.py`), and, for a few queries, keys and values
that are read in place (`few_queries.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tvm import ir, relax

from harness.compiler import tir as T
from harness.compiler.schedules.common.attention import Attention as Problem
from harness.compiler.schedules.common.attention import recognized
from harness.compiler.schedules.common.folding import Folded, Index, Reader, fold, stored
from harness.compiler.schedules.common.graph import Facts, call, extents, is_call, static_shape
from harness.compiler.schedules.cpu import schedule
from harness.compiler.schedules.cpu.attention_operands import Attention, Layer
from harness.compiler.schedules.cpu.attention_per_head import AttentionSchedule, per_head_kernel
from harness.compiler.schedules.cpu.attention_streaming import AttentionTiles, streaming_kernel
from harness.compiler.schedules.cpu.bf16 import BF16
from harness.compiler.schedules.cpu.bias_of_image import bias_of_image
from harness.compiler.schedules.cpu.epilogue import Epilogue, Step
from harness.compiler.schedules.cpu.few_queries import few_queries_kernel
from harness.compiler.schedules.cpu.gemm import lower_matmul
from harness.compiler.schedules.cpu.key_projection import KeyLayer, key_layer_of
from harness.compiler.schedules.cpu.lowering import Context, Lowering
from harness.compiler.schedules.cpu.microkernels.fp32 import FP32
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel
from harness.compiler.schedules.cpu.moves import Reindex
from harness.compiler.schedules.cpu.tile import Tile
from harness.compiler.schedules.cpu.value_projection import Projection, projection_of

_Kernel = Callable[[Attention], T.PrimFunc]


def lower_attention(context: Context, attention: ir.Call) -> Lowering | None:
    """Lowers `relax.nn.attention` and `attention_bias` in fp32, with static shapes except for the number of keys."""
    bias = _bias_of(attention)
    projection = _projection_of(context, attention)
    problem = _recognized(attention, projection)
    if problem is None:
        return None
    arithmetic = _arithmetic(context, attention, problem)
    kernel, tile = _choose(context, problem, arithmetic)
    query, key, value = _operands(context, attention, projection, few=tile is None)
    operands = Attention(
        query,
        key,
        value,
        bias,
        problem.scale,
        problem.diagonal,
        projected=projection is not None,
        arithmetic=arithmetic,
    )
    layer = context.key_layers.get(attention.args[1])
    if layer is not None and tile is not None:
        operands = _with_layer(context, operands, layer, attention.args[1], tile)
    per_head = tile is not None and not _workload(problem).streams
    axial_bias = bias_of_image(context, bias) if per_head else None
    if axial_bias is not None:
        operands = replace(operands, bias=None, axial_bias=axial_bias)
    if projection is None:
        return _lowering(operands, kernel)
    return _projected(context, operands, kernel, projection, static_shape(attention) or ())


def key_layers(context: Context, facts: Facts) -> dict[relax.Var, KeyLayer]:
    """Returns the linear layers that the kernels of attentions compute, by the attention's key."""
    layers = {}
    for variable, attention in context.bindings.items():
        if not is_call(attention, "relax.nn.attention", "relax.nn.attention_bias"):
            continue
        problem = _recognized(attention, _projection_of(context, attention))
        if problem is None or problem.heads != 1 or _workload(problem).few(context.unit):
            continue
        layer = key_layer_of(context, facts, variable) if _workload(problem).streams else None
        if layer is not None:
            layers[attention.args[1]] = layer
    return layers


def _bias_of(attention: ir.Call) -> relax.Expr | None:
    return attention.args[3] if len(attention.args) > 3 else None


def _projection_of(context: Context, attention: ir.Call) -> Projection | None:
    """Returns the linear layer of an attention's values if it follows the attention; otherwise None."""
    projection = projection_of(context, attention)
    moves = projection is not None and context.projected_afterwards.issuperset(projection.bindings)
    return projection if moves else None


def _recognized(attention: ir.Call, projection: Projection | None) -> Problem | None:
    """Returns the problem that a kernel computes; None if there is no kernel."""
    problem = recognized(attention, ("float32",), _bias_of(attention), symbolic_keys=True)
    return problem if problem is None or projection is None else replace(problem, width=projection.narrow)


def _arithmetic(context: Context, attention: ir.Call, problem: Problem) -> MicroKernel:
    """Returns the arithmetic of a kernel: bfloat16 if there is an instruction; shifts would be as slow as fp32."""
    workload = _workload(problem)
    if workload.few(context.unit):
        return FP32
    return context.micro_kernel(attention, workload.keys, problem.channels, row_major=not workload.streams)


def _workload(problem: Problem) -> schedule.Attention:
    """Returns a problem as a workload, with 0 keys if their number is symbolic."""
    return schedule.Attention(
        problem.batch,
        problem.heads,
        problem.queries,
        problem.keys if isinstance(problem.keys, int) else 0,
        problem.channels,
        problem.width,
        None if problem.bias is None else problem.bias_dtype,
        problem.diagonal is not None,
        problem.bias or (),
    )


def _choose(context: Context, problem: Problem, arithmetic: MicroKernel) -> tuple[_Kernel, Tile | None]:
    """Returns the kernel for a problem, and its tile of scores; None as tile for the kernel of few queries."""
    static = isinstance(problem.keys, int)
    workload = _workload(problem)
    if workload.few(context.unit):
        parts = context.decide(workload)["parts"]
        return lambda attention: few_queries_kernel(attention, context.unit.lanes, parts), None
    if arithmetic.choose_tile is not None:
        tile = arithmetic.choose_tile(context.unit, workload.keys, workload.queries)
        attention_schedule = AttentionSchedule(tile, tile, workload.parts_in_tiles(tile))
        return lambda attention: per_head_kernel(attention_schedule, attention), tile
    workload = replace(workload, dtype=arithmetic.multiplies)
    # Tuning knows numbers alone.
    decided = context.decide(workload) if static else schedule.decided(workload, context.unit, {})
    tiles = AttentionTiles(
        schedule.tile_of(context.unit, decided),
        schedule.tile_of(context.unit, decided, ("result_rows", "result_vectors")),
    )
    if workload.streams:
        return lambda attention: streaming_kernel(tiles, attention), tiles.scores
    attention_schedule = AttentionSchedule(tiles.scores, tiles.output, decided["parts"])
    return lambda attention: per_head_kernel(attention_schedule, attention), tiles.scores


def _operands(
    context: Context, attention: ir.Call, projection: Projection | None, *, few: bool
) -> tuple[Folded, Folded, Folded]:
    """Returns query, key and value in the form that the kernel reads."""

    def read(value: relax.Expr) -> Folded:
        folded = fold(replace(context, symbolic=True), value)
        # A few queries read vectors of channels, and neighbours of two kinds make none.
        return stored(value) if few and folded.period != 1 else folded

    query, key, value = attention.args[:3]
    if projection is None:
        return read(query), read(key), read(value)
    return read(query), read(key), _rows(read(projection.source), projection.rows, extents(key) or ())


def _rows(source: Folded, row_of: Reindex, key: Sequence[Any]) -> Folded:
    """Returns the rows of a tensor, one for each key, as an operand [batch, key, head, channel]."""

    def element(reader: Reader, index: Index) -> Any:
        return source.element(reader, [*row_of(reader.analyzer, index[:-1]), index[-1]])

    return replace(source, shape=(*key[:3], source.shape[-1]), element=element)


def _with_layer(context: Context, attention: Attention, layer: KeyLayer, key: relax.Expr, tile: Tile) -> Attention:
    """Returns the attention whose kernel computes the linear layer of its keys."""
    folded, place = layer.key(context, key)
    if place is None:
        raise AssertionError("a key is read of its layer")
    rows = _rows(fold(replace(context, symbolic=True), layer.source), layer.rows, folded.shape)
    source = context.transposed(layer.weight)
    weight = layer.weight if source is None else source
    return replace(attention, key=folded, layer=Layer(rows, weight, source is not None, tile, layer.bias, place))


def _lowering(attention: Attention, kernel: _Kernel) -> Lowering:
    def permuted(axes: tuple[int, ...]) -> Lowering | None:
        # Dimension d of the permuted result is dimension axes[d] of ours.
        return _lowering(replace(attention, result=tuple(axes.index(d) for d in attention.result)), kernel)

    def build(builder: relax.BlockBuilder, inputs: Sequence[relax.Expr], _epilogue: Epilogue) -> relax.Expr:
        return _called(builder, attention, kernel, inputs)

    def rounded() -> Lowering:
        return _lowering(replace(attention, stores=BF16), kernel)

    return Lowering(attention.inputs, None, build, permuted, rounded=rounded)


def _called(
    builder: relax.BlockBuilder, attention: Attention, kernel: _Kernel, inputs: Sequence[relax.Expr]
) -> relax.Expr:
    """Emits the call of a kernel, after the packing of its layer's weight."""
    inputs, layer = list(inputs), attention.layer
    if layer is not None:
        place = len(inputs) - (attention.bias is not None) - len(layer.inputs) + len(layer.source.inputs)
        inputs[place] = builder.emit(call(builder, "pack", layer.packing, [inputs[place]]))
    return call(builder, attention.name, kernel(attention), [*inputs, *attention.variables])


def _projected(
    context: Context, attention: Attention, kernel: _Kernel, projection: Projection, shape: tuple[int, ...]
) -> Lowering:
    """Lowers attention to the source of its values, followed by the projection of the result to this shape."""
    attended = relax.Var("attended", relax.TensorType([*shape[:-1], projection.narrow], "float32"))
    matmul = relax.BlockBuilder().normalize(relax.op.matmul(attended, projection.weight))
    product = lower_matmul(context, matmul)
    if product is None:
        raise AssertionError("a product of static shape has a kernel")
    bias = () if projection.bias is None else (projection.bias,)
    others = tuple(value for value in product.inputs if not value.same_as(attended))
    first = len(attention.inputs)

    def build(builder: relax.BlockBuilder, inputs: Sequence[relax.Expr], epilogue: Epilogue) -> relax.Expr:
        result = builder.emit(_called(builder, attention, kernel, inputs[:first]))
        weights = iter(inputs[first : first + len(others)])
        operands = [result if value.same_as(attended) else next(weights) for value in product.inputs]
        added = tuple(Step("relax.add", operand=True) for _ in bias)
        shapes = tuple(static_shape(value) or () for value in bias)
        whole = Epilogue((*added, *epilogue.steps), (*shapes, *epilogue.shapes))
        return product.build(builder, [*operands, *inputs[first + len(others) :]], whole)

    return Lowering((*attention.inputs, *others, *bias), product.layout, build)
