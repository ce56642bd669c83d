"""Scaled dot-product attention without the full score matrix, its softmax exact and its sums in two levels.

One task computes a block of queries of one head. Scores are kept transposed, as a strip [keys, queries], so that
everything that happens per query (maximum, exponentials, their sum, the final division) is vectorized over queries and
needs no reduction across lanes:

    strip[key, query] = scale · Σ_d k[key, d] · q[query, d]  (+ bias, -inf where masked)
    strip = exp(strip - maximum),  sum = Σ_key strip
    result[query, d] = (Σ_key v[key, d] · strip[key, query]) / sum

Keys and values are packed into panels once per head. A query whose keys are all masked gives zero, as in PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import ir, relax, tirx
from tvm.script.ir_builder import tirx as T

from harness.schedules.cpu import math as elementary
from harness.schedules.cpu.emit import (
    Argument,
    ceil_div,
    chunk_length,
    for_each_vector,
    fp32,
    multiply,
    multiply_panels,
    prim_func,
)
from harness.schedules.cpu.epilogue import Epilogue
from harness.schedules.cpu.lowering import Context, Lowering, call, is_call, permutation, static_shape
from harness.schedules.cpu.product import Read, pack_function
from harness.schedules.cpu.tile import Tile, VectorUnit

_IDENTITY = (0, 1, 2, 3)


@dataclass(frozen=True)
class Tensor4:
    """A tensor [batch, length, head, channel], stored with its dimensions in another order.

    Attributes:
        value: The Relax expression that is stored.
        shape: Its shape as stored.
        axes: For each of batch, length, head and channel, the dimension as stored.
    """

    value: relax.Expr
    shape: tuple[int, ...]
    axes: tuple[int, ...] = _IDENTITY

    def extent(self, dimension: int) -> int:
        """Extent of batch (0), length (1), head (2) or channel (3)."""
        return self.shape[self.axes[dimension]]

    def at(self, *index: Any) -> list[Any]:
        """The stored index of [batch, length, head, channel]."""
        stored: list[Any] = [None] * 4
        for dimension, value in zip(self.axes, index, strict=True):
            stored[dimension] = value
        return stored


@dataclass(frozen=True)
class Attention:
    """Everything that the kernel depends on.

    Attributes:
        query, key, value: The operands.
        bias: Broadcast to [batch, head, query, key]; added if fp32, and if bool false masks a key out.
        scale: Factor of the scores.
        diagonal: Query i sees keys up to i + diagonal; None if it sees all.
        result: Dimension order of the result, as in `Tensor4.axes`.
    """

    query: Tensor4
    key: Tensor4
    value: Tensor4
    bias: relax.Expr | None
    scale: float
    diagonal: int | None
    result: tuple[int, ...] = _IDENTITY


def lower_attention(context: Context, attention: ir.Call) -> Lowering | None:
    """`relax.nn.attention` and `relax.nn.attention_bias`, fp32 and of static shape."""
    attributes = attention.attrs
    operands = [_tensor4(context, argument) for argument in attention.args[:3]]
    if any(operand is None for operand in operands) or attributes.window_size is not None:
        return None
    query, key, value = (operand for operand in operands if operand is not None)
    bias = attention.args[3] if len(attention.args) > 3 else None
    if bias is not None and (static_shape(bias, None) is None or str(bias.ty.dtype) not in ("float32", "bool")):
        return None
    scale = 1.0 / math.sqrt(query.extent(3)) if attributes.scale is None else float(attributes.scale)
    offset = {None: None, "TopLeft": 0, "BottomRight": key.extent(1) - query.extent(1)}
    causal = None if attributes.causal_mask is None else str(attributes.causal_mask)
    return _lowering(context.unit, Attention(query, key, value, bias, scale, offset[causal]))


def _lowering(unit: VectorUnit, attention: Attention) -> Lowering:
    def permuted(axes: tuple[int, ...]) -> Lowering | None:
        # Dimension d of the permuted result is dimension axes[d] of ours.
        return _lowering(unit, replace(attention, result=tuple(axes.index(d) for d in attention.result)))

    def build(builder: relax.BlockBuilder, inputs: Sequence[relax.Expr], _epilogue: Epilogue) -> relax.Expr:
        return _build(unit, attention, builder, inputs)

    stored = [attention.query, attention.key, attention.value]
    bias = [] if attention.bias is None else [attention.bias]
    return Lowering((*(operand.value for operand in stored), *bias), None, build, permuted)


def _tensor4(context: Context, value: relax.Expr) -> Tensor4 | None:
    shape = static_shape(value)
    if shape is None or len(shape) != 4 or 0 in shape:
        return None
    definition = context.definition(value)
    if is_call(definition, "relax.permute_dims"):
        source = static_shape(definition.args[0])
        if source is not None:
            return Tensor4(definition.args[0], source, permutation(definition))
    return Tensor4(value, shape)


def _tiles(unit: VectorUnit, attention: Attention) -> tuple[Tile, Tile]:
    """Register tiles of scores (keys × queries) and of the result (channels × queries)."""
    vectors = 2 if attention.query.extent(1) > unit.lanes else 1
    most = 12 if unit.registers > 16 else 6
    channels = attention.value.extent(3)

    def work(rows: int) -> float:
        return ceil_div(channels, rows) * rows * (1.0 + 0.25 * (rows + vectors) / (rows * vectors))

    rows = min(range(1, most + 1), key=work)
    columns = vectors * unit.lanes
    return Tile(min(most, attention.key.extent(1)), columns, unit.lanes), Tile(rows, columns, unit.lanes)


def _build(
    unit: VectorUnit, attention: Attention, builder: relax.BlockBuilder, inputs: Sequence[relax.Expr]
) -> relax.Expr:
    query, key, value = attention.query, attention.key, attention.value
    heads = query.extent(2)
    matrices = query.extent(0) * heads
    scores, output = _tiles(unit, attention)

    def packed(
        tensor: Tensor4, source: relax.Expr, width: int, depth: int, tile: Tile, *, channels: bool
    ) -> relax.Expr:
        def reader(buffer: tirx.Buffer) -> Read:
            def read(m: Any, i: Any, k: Any) -> Any:
                length, channel = (k, i) if channels else (i, k)
                return buffer[tuple(tensor.at(m // heads, length, m % heads, channel))]

            return read

        function = pack_function("left", Argument("source", tensor.shape), matrices, width, depth, tile, reader)
        return builder.emit(call(builder, "pack", function, [source]))

    keys = packed(key, inputs[1], key.extent(1), key.extent(3), scores, channels=False)
    values = packed(value, inputs[2], value.extent(3), value.extent(1), output, channels=True)
    function = _kernel(attention, scores, output, _shape(keys), _shape(values))
    return call(builder, "attention", function, [inputs[0], keys, values, *inputs[3:]])


def _shape(value: relax.Expr) -> tuple[int, ...]:
    return tuple(int(extent) for extent in value.ty.shape)


def _kernel(
    attention: Attention, scores: Tile, output: Tile, keys_shape: tuple[int, ...], values_shape: tuple[int, ...]
) -> tirx.PrimFunc:
    query = attention.query
    batch, length, heads, channels = (query.extent(d) for d in range(4))
    count, width = attention.key.extent(1), attention.value.extent(3)
    columns, lanes = scores.columns, scores.lanes
    blocks = ceil_div(length, columns)
    extents = (batch, length, heads, width)
    result_shape = tuple(extents[attention.result.index(d)] for d in range(4))
    bias_shape = () if attention.bias is None else tuple(int(extent) for extent in attention.bias.ty.shape)
    bias_shape = (1,) * (4 - len(bias_shape)) + bias_shape

    def body(queries: tirx.Buffer, keys: tirx.Buffer, values: tirx.Buffer, *rest: tirx.Buffer) -> None:
        result = rest[-1]
        with T.parallel(0, batch * heads * blocks) as task:
            m = T.Bind(task // blocks)
            first = T.Bind(task % blocks * columns)
            b, h = m // heads, m % heads
            block = T.alloc_buffer((channels, columns), "float32")
            strip = T.alloc_buffer((count, columns), "float32")
            highest = T.alloc_buffer((columns,), "float32", scope="local")
            total = T.alloc_buffer((columns,), "float32", scope="local")

            with T.serial(0, columns) as j, T.serial(0, channels) as d:
                at = query.at(b, T.min(first + j, length - 1), h, d)
                T.buffer_store(block, queries[tuple(at)], [d, j])
            _fill(highest, columns, lanes, -math.inf)

            def finish(key: Any, j: Any, value: Any) -> Any:
                value = value * fp32(attention.scale)
                if attention.bias is not None:
                    row = T.min(first + j, length - 1) if length % columns else first + j
                    index = [0 if e == 1 else i for e, i in zip(bias_shape, (b, h, row, key), strict=True)]
                    stored = rest[0][tuple(index[4 - len(rest[0].shape) :])]
                    if str(attention.bias.ty.dtype) == "bool":
                        value = T.Select(stored, value, fp32(-math.inf))
                    else:
                        value = value + stored
                if attention.diagonal is not None:
                    value = T.Select(key <= first + j + attention.diagonal, value, fp32(-math.inf))
                return value

            panels = ceil_div(width, output.rows)
            totals = T.alloc_buffer((max(panels, 1), output.size), "float32")
            with T.serial(0, ceil_div(count, scores.rows)) as panel:
                tile = _scores(scores, channels, lambda k, i: keys[m, panel, k, i], lambda k, j: block[k, j])
                rows = scores.rows
                if count % rows:
                    rows = T.min(rows, count - panel * rows)
                with T.serial(0, rows) as i:
                    key = T.Bind(panel * scores.rows + i)

                    def score(j: Any, i: Any = i, key: Any = key, tile: Any = tile) -> None:
                        T.buffer_store(strip, finish(key, j, tile(i * columns + j)), [key, j])
                        T.buffer_store(highest, T.max(highest[j], strip[key, j]), [j])

                    for_each_vector(columns, lanes, score)

            # Without this exp(-inf - -inf) would be NaN where every key is masked.
            def unmask(j: Any) -> None:
                lowest = fp32(-math.inf)
                T.buffer_store(highest, T.Select(tirx.EQ(highest[j], lowest), fp32(0.0), highest[j]), [j])

            for_each_vector(columns, lanes, unmask)
            _fill(total, columns, lanes, 0.0)

            def exponentials(first_key: Any, keys_here: Any) -> None:
                """strip[key, j] = exp(strip[key, j] - highest[j]); total[j] += their sum over the keys of a chunk."""
                partial = T.alloc_buffer((columns,), "float32", scope="local")
                _fill(partial, columns, lanes, 0.0)
                with T.serial(0, keys_here) as k:
                    for start in range(0, columns, lanes):
                        with T.vectorized(0, lanes) as j:
                            at = [first_key + k, start + j]
                            T.buffer_store(strip, elementary.exp(strip[tuple(at)] - highest[start + j]), at)
                            T.buffer_store(partial, partial[start + j] + strip[tuple(at)], [start + j])
                for_each_vector(columns, lanes, lambda j: T.buffer_store(total, total[j] + partial[j], [j]))

            multiply_panels(
                output,
                count,
                panels,
                lambda p, k, i: values[m, p, k, i],
                lambda k, j: strip[k, j],
                totals,
                before=exponentials,
            )
            queries_left = columns if length % columns == 0 else T.min(columns, length - first)
            with T.serial(0, panels) as panel:

                def divide(i: Any) -> Callable[[Any], None]:
                    def at(j: Any) -> None:
                        here = i * columns + j
                        quotient = totals[panel, here] / total[j]
                        quotient = T.Select(tirx.EQ(total[j], fp32(0.0)), fp32(0.0), quotient)
                        T.buffer_store(totals, quotient, [panel, here])

                    return at

                with T.serial(0, output.rows) as i:
                    for_each_vector(columns, lanes, divide(i))
                rows = output.rows
                if width % rows:
                    rows = T.min(rows, width - panel * rows)
                with T.serial(0, queries_left) as j, T.serial(0, rows) as i:
                    index = (b, first + j, h, panel * output.rows + i)
                    stored = [index[attention.result.index(d)] for d in range(4)]
                    T.buffer_store(result, totals[panel, i * columns + j], stored)

    arguments = [Argument("query", query.shape), Argument("keys", keys_shape), Argument("values", values_shape)]
    if attention.bias is not None:
        shape = tuple(int(extent) for extent in attention.bias.ty.shape)
        arguments.append(Argument("bias", shape, str(attention.bias.ty.dtype)))
    return prim_func("attention", [*arguments, Argument("result", result_shape)], body)


def _fill(buffer: tirx.Buffer, count: int, lanes: int, value: float) -> None:
    for_each_vector(count, lanes, lambda j: T.buffer_store(buffer, fp32(value), [j]))


def _scores(
    tile: Tile, depth: int, left: Callable[[Any, int], Any], right: Callable[[Any, Any], Any]
) -> Callable[[Any], Any]:
    """Emits one register tile of scores; returns what reads an element of it."""
    if chunk_length(depth) >= depth:
        partial = multiply(tile, 0, depth, left, right)
        return lambda at: partial[at]
    totals = T.alloc_buffer((1, tile.size), "float32")
    multiply_panels(tile, depth, 1, lambda p, k, i: left(k, i), right, totals)
    return lambda at: totals[0, at]
