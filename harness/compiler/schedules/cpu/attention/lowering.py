"""Chooses operands, score changes and schedule of attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from tvm import ir, relax

from harness.compiler import tir as T
from harness.compiler.schedules.common.attention import Attention as Problem
from harness.compiler.schedules.common.attention import recognized
from harness.compiler.schedules.common.folding import Folded, Index, Reader, fold, stored
from harness.compiler.schedules.common.graph import call, extents, is_call, static_shape, transposed
from harness.compiler.schedules.common.kernel import free_variables
from harness.compiler.schedules.cpu import schedule
from harness.compiler.schedules.cpu.attention.axial_bias import axial_bias
from harness.compiler.schedules.cpu.attention.few_queries import few_queries_kernel
from harness.compiler.schedules.cpu.attention.linear_key import WEIGHT, LinearKey
from harness.compiler.schedules.cpu.attention.operands import Attention
from harness.compiler.schedules.cpu.attention.per_head import per_head_kernel
from harness.compiler.schedules.cpu.attention.score_mod import Bias, Diagonal, ScoreMod
from harness.compiler.schedules.cpu.attention.streaming import streaming_kernel
from harness.compiler.schedules.cpu.bf16 import BF16
from harness.compiler.schedules.cpu.epilogue import Epilogue, Step
from harness.compiler.schedules.cpu.gemm import lower_matmul
from harness.compiler.schedules.cpu.lowering import Context, Lowering
from harness.compiler.schedules.cpu.microkernels.fp32 import FP32
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel
from harness.compiler.schedules.cpu.operand_layer import OperandLayer, Reindex, fold_key, key_layer_of, value_layer_of
from harness.compiler.schedules.cpu.tile import Tile

Build = Callable[[Attention], T.PrimFunc]
"""Takes the operands, and builds the kernel of a schedule."""


def lower_attention(context: Context, attention: ir.Call) -> Lowering | None:
    """Lowers `relax.nn.attention` and `attention_bias` in fp32, with static shapes except for the number of keys."""
    problem, projection = _recognized(context, attention)
    if problem is None:
        return None
    workload = _workload(problem)
    few = workload.few(context.unit)
    build, micro_kernel, scores = _choose(context, attention, workload)
    operands = Attention(
        problem,
        *_operands(context, attention, projection, scores, few=few),
        _score_mods(context, attention, problem, axial=not few and not workload.streams),
        projected=projection is not None,
        micro_kernel=micro_kernel,
    )
    if projection is None:
        return _lowering(operands, build)
    return _projected(context, operands, build, projection, static_shape(attention) or ())


def key_layers(context: Context) -> dict[relax.Var, OperandLayer]:
    """Returns the linear layers that the kernels of attentions compute, by the attention's key."""
    layers = {}
    for variable, attention in context.bindings.items():
        if not is_call(attention, "relax.nn.attention", "relax.nn.attention_bias"):
            continue
        problem, _ = _recognized(context, attention)
        if problem is None or problem.heads != 1 or _workload(problem).few(context.unit):
            continue
        layer = key_layer_of(context, variable) if _workload(problem).streams else None
        if layer is not None:
            layers[attention.args[1]] = layer
    return layers


def _bias_of(attention: ir.Call) -> relax.Expr | None:
    return attention.args[3] if len(attention.args) > 3 else None


def _recognized(context: Context, attention: ir.Call) -> tuple[Problem | None, OperandLayer | None]:
    """Returns the problem of a kernel, if there is one, and the linear layer of the values if that follows it."""
    problem = recognized(attention, ("float32",), _bias_of(attention), symbolic_keys=True)
    projection = value_layer_of(context, attention)
    if problem is None or projection is None or not context.projected_afterwards.issuperset(projection.bindings):
        return problem, None
    return replace(problem, width=projection.narrow), projection


def _workload(problem: Problem) -> schedule.Attention:
    """Returns a problem as a workload, with 0 keys if their number is symbolic."""
    return schedule.Attention(
        problem.batch,
        problem.heads,
        problem.queries,
        problem.static_keys,
        problem.channels,
        problem.width,
        None if problem.bias is None else problem.bias_dtype,
        problem.diagonal is not None,
        problem.bias or (),
    )


def _score_mods(context: Context, attention: ir.Call, problem: Problem, *, axial: bool) -> tuple[ScoreMod, ...]:
    """Returns the changes of the scores, a bias in its parts where it has them and the kernel may be `axial`."""
    mods: list[ScoreMod] = []
    bias = _bias_of(attention)
    if bias is not None:
        parts = axial_bias(context, bias) if axial else None
        mods.append(Bias(stored(bias), problem.bias_dtype == "bool") if parts is None else parts)
    if problem.diagonal is not None:
        mods.append(Diagonal(problem.diagonal))
    return tuple(mods)


def _choose(
    context: Context, attention: ir.Call, workload: schedule.Attention
) -> tuple[Build, MicroKernel, Tile | None]:
    """Returns schedule, micro-kernel and the tile of scores if there is one.

    The micro-kernel is of bfloat16 if there is an instruction; shifts would be as slow as fp32.
    """
    unit = context.unit
    if workload.few(unit):
        parts = context.decide(workload)["parts"]
        return partial(few_queries_kernel, lanes=unit.lanes, most_parts=parts), FP32, None
    micro_kernel = context.micro_kernel(attention, workload.keys, workload.channels, row_major=not workload.streams)
    if micro_kernel.choose_tile is not None:
        tile = micro_kernel.choose_tile(unit, workload.keys, workload.queries)
        parts = workload.parts_in_tiles(tile)
        return partial(per_head_kernel, scores=tile, output=tile, parts=parts), micro_kernel, tile
    workload = replace(workload, dtype=micro_kernel.multiplies)
    # Tuning knows numbers alone.
    decided = context.decide(workload) if workload.keys else schedule.decided(workload, unit, {})
    scores = schedule.tile_of(unit, decided)
    output = schedule.tile_of(unit, decided, schedule.RESULT_TILE)
    if workload.streams:
        return partial(streaming_kernel, scores=scores, output=output), micro_kernel, scores
    return partial(per_head_kernel, scores=scores, output=output, parts=decided["parts"]), micro_kernel, scores


def _operands(
    context: Context, attention: ir.Call, projection: OperandLayer | None, scores: Tile | None, *, few: bool
) -> tuple[Folded, Folded | LinearKey, Folded]:
    """Returns query, key and value in the form that the kernel reads."""
    query, key, value = attention.args[:3]
    layer = context.key_layers.get(key)

    def read(value: relax.Expr) -> Folded:
        folded = fold(replace(context, symbolic=True), value)
        # A few queries read vectors of channels, and neighbours of two kinds make none.
        return stored(value) if few and folded.period != 1 else folded

    return (
        read(query),
        read(key) if layer is None or scores is None else _linear_key(context, layer, key, scores),
        read(value) if projection is None else _rows(read(projection.source), projection.rows, key),
    )


def _rows(source: Folded, row_of: Reindex, key: relax.Expr) -> Folded:
    """Returns the rows of a tensor, one for each key, as an operand [batch, key, head, channel]."""

    def element(reader: Reader, index: Index) -> T.Expr:
        return source.element(reader, [*row_of(reader.analyzer, index[:-1]), index[-1]])

    return replace(source, shape=(*(extents(key) or ())[:3], source.shape[-1]), element=element)


def _linear_key(context: Context, layer: OperandLayer, key: relax.Expr, scores: Tile) -> LinearKey:
    """Returns the key whose linear layer the kernel computes, in tiles of the schedule's scores."""
    folded = fold_key(context, [layer.result], key)
    rows = _rows(fold(replace(context, symbolic=True), layer.source), layer.rows, key)
    source = transposed(context.definition(layer.weight))
    stored_layer = layer if source is None else replace(layer, weight=source)
    return LinearKey(folded, stored_layer, rows, source is not None, scores)


def _lowering(attention: Attention, kernel: Build) -> Lowering:
    def permuted(axes: tuple[int, ...]) -> Lowering | None:
        # Dimension d of the permuted result is dimension axes[d] of ours.
        return _lowering(replace(attention, result=tuple(axes.index(d) for d in attention.result)), kernel)

    def build(builder: relax.BlockBuilder, inputs: Sequence[relax.Expr], _epilogue: Epilogue) -> relax.Expr:
        return _called(builder, attention, kernel, inputs)

    def rounded() -> Lowering:
        return _lowering(replace(attention, stores=BF16), kernel)

    return Lowering(attention.inputs, None, build, permuted, rounded=rounded)


def _called(
    builder: relax.BlockBuilder, attention: Attention, kernel: Build, inputs: Sequence[relax.Expr]
) -> relax.Expr:
    """Emits the call of a kernel, after the packing of the weight of its key's layer."""
    operands = attention.by_role(inputs)
    if isinstance(attention.key, LinearKey):
        packed = call(builder, "pack", attention.key.packing, operands[WEIGHT])
        operands[WEIGHT] = [builder.emit(packed)]
    tensors = [value for values in operands.values() for value in values]
    return call(builder, attention.name, kernel(attention), [*tensors, *free_variables(attention.arguments)])


def _projected(
    context: Context, attention: Attention, kernel: Build, projection: OperandLayer, shape: tuple[int, ...]
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
