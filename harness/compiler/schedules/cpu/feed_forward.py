"""Joins two linear layers with a wide hidden layer in one kernel, which never stores the whole hidden layer.

    Y = activation(X·W₁ + b₁)·W₂ + b₂

A task takes a block of rows through both products. Its part of the hidden layer lies in a workspace that stays in the
caches, and all sums are cut as those of the two products by themselves, so that every bit of the result is the same.
Every task reads both weights, so this is for weights that the last-level cache holds. Weights are fp32: layers with
bfloat16 weights stay two products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tvm import relax

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import argument, call
from harness.compiler.schedules.common.kernel import Argument, ceil_div, prim_func, tail_extent
from harness.compiler.schedules.common.kernel_info import FEED_FORWARD, KernelInfo, Kind
from harness.compiler.schedules.common.scope import Scope
from harness.compiler.schedules.cpu.contraction import Contraction
from harness.compiler.schedules.cpu.emit import LINE, prefetch
from harness.compiler.schedules.cpu.epilogue import Epilogue
from harness.compiler.schedules.cpu.lowering import Lowering
from harness.compiler.schedules.cpu.microkernels.fp32 import FP32
from harness.compiler.schedules.cpu.microkernels.microkernel import PanelOfB, PanelsOfA
from harness.compiler.schedules.cpu.product import Access, Block, BlockedProduct

_HIDDEN_BYTES = 32 * 1024 * 1024
"""A hidden layer that is worth a kernel of its own has at least so much."""
_WEIGHT_BYTES = 4 * 1024 * 1024
"""Largest size of the weights of both layers in bytes."""
_BLOCK_BYTES = 1024 * 1024
"""Largest size of a task's hidden layer in bytes."""
_THIN = 32
"""Largest sum of input and output channels with which memory takes longer than arithmetic."""
_THIN_HIDDEN_BYTES = 4 * 1024 * 1024
"""Then a hidden layer of so much is worth a kernel of its own: it does not fit into the second-level caches."""
_THIN_BLOCK_BYTES = 256 * 1024
"""And tasks are smaller, so that there are enough of them."""


def feed_forward(scope: Scope, first: Lowering, activation: Epilogue, second: Lowering, count: int) -> Lowering | None:
    """Returns the lowering of two linear layers to one kernel; None if they stay two.

    Args:
        scope: The function around them.
        first: The layer that makes the hidden one.
        activation: The epilogue of the first layer.
        second: The layer that reads the hidden one. It has to read a row where the first layer has made it.
        count: Operands of `activation`, which come before those of the second layer's epilogue.
    """
    one, other = _linear_layer(scope, first), _linear_layer(scope, second)
    if one is None or other is None or not _are_joined(one, activation, other):
        return None

    def build(builder: relax.BlockBuilder, inputs: Sequence[relax.Expr], epilogue: Epilogue) -> relax.Expr:
        source, *weights = inputs[:3]
        packed = [layer.pack(builder, weight) for layer, weight in zip((one, other), weights, strict=True)]
        extras = [*activation.arguments, *epilogue.arguments]
        arguments = [
            argument("streamed", source),
            *(argument(name, panels) for name, panels in zip(("packed1", "packed2"), packed, strict=True)),
            *(Argument(f"extra{n}", extra.shape) for n, extra in enumerate(extras)),
            epilogue.result(other.layout),
        ]

        def body(*buffers: T.Buffer) -> None:
            streamed, panels1, panels2, *operands, result = buffers
            _emit(one, other, activation, epilogue, (streamed, panels1, panels2, result), operands)

        name = f"feed_forward{activation.label}{epilogue.label}"
        function = prim_func(name, arguments, body, _info(one, other, activation, epilogue))
        return call(builder, name, function, [source, *packed, *inputs[3:]])

    return Lowering((*first.inputs, second.inputs[1]), second.layout, build)


def _linear_layer(scope: Scope, lowering: Lowering) -> Contraction | None:
    """Returns the product of rows and weights in fp32 that a lowering is; None if it is another kernel."""
    product = lowering.contraction
    if product is None or product.streaming.rows is None or not scope.is_parameter(product.resident.value):
        return None
    return product if product.extents.batch == 1 and product.micro_kernel is FP32 else None


def _are_joined(first: Contraction, activation: Epilogue, second: Contraction) -> bool:
    narrow, wide, last = first.extents.depth, first.extents.columns, second.extents.columns
    return (
        second.streaming.in_order
        and all(step.axes is None for step in activation.steps)
        and (first.extents.rows, wide) == (second.extents.rows, second.extents.depth)
        and 4 * first.extents.rows * wide >= (_THIN_HIDDEN_BYTES if _is_thin(first, second) else _HIDDEN_BYTES)
        and 4 * wide * (narrow + last) <= _WEIGHT_BYTES
    )


def _is_thin(first: Contraction, second: Contraction) -> bool:
    return first.extents.depth + second.extents.columns <= _THIN


def _rows(first: Contraction, second: Contraction) -> int:
    """Returns the rows of a task: whole tiles of both products, in blocks that are as equal as these allow."""
    step = math.lcm(first.blocking.tile.rows, second.blocking.tile.rows)
    count = ceil_div(first.extents.rows, step)
    block = _THIN_BLOCK_BYTES if _is_thin(first, second) else _BLOCK_BYTES
    most_steps = max(1, block // (4 * step * first.extents.columns))
    return step * ceil_div(count, ceil_div(count, most_steps))


def _emit(
    first: Contraction,
    second: Contraction,
    activation: Epilogue,
    epilogue: Epilogue,
    tensors: tuple[T.Buffer, T.Buffer, T.Buffer, T.Buffer],
    operands: Sequence[T.Buffer],
) -> None:
    """Emits the loops; `tensors` are the inputs, the panels of both weights, and the result."""
    streamed, panels1, panels2, result = tensors
    rows, wide = _rows(first, second), first.extents.columns
    operand_count = len(activation.arguments)
    finished = activation.finished(first.layout, operands[:operand_count])
    store, touched = epilogue.write_back(second.layout, operands[operand_count:], result)
    with T.parallel(0, ceil_div(first.extents.rows, rows)) as task:
        # A line more than a row has, so that the rows of a tile do not meet in the same lines of a cache.
        hidden = T.alloc_buffer((rows, wide + LINE), "float32")

        def keep(b: T.Index, i: T.Index, j: T.Index, value: T.Expr) -> None:
            T.buffer_store(hidden, finished(b, i, j, value), [i - task * rows, j])

        def read_hidden(r: T.Index) -> tuple[PanelsOfA, PanelOfB]:
            height = second.blocking.tile.rows

            def ahead(p: T.Index, start: T.Index, k: T.Index | None) -> None:
                assert k is not None
                prefetch(hidden[(p + 1) * height + k % height, start + k // height * LINE], level=1)

            left = PanelsOfA(count, lambda p, start, k, i: hidden[p * height + i, start + k], fetch=ahead)
            return left, PanelOfB(lambda start, k, j: panels2[0, r, start + k, j])

        pack = first.streaming.pack(streamed, first.blocking.tile, FP32)
        access = Access(pack, first.read_panels(panels1), keep)
        block, slots = _block(first, task, rows, panels1)
        product = BlockedProduct(first.extents, replace(first.blocking, slots=slots), access, by_row=True)
        workspace = T.alloc_buffer(product.block_shape, FP32.dtype)
        product.pack_block(block, workspace)
        product.multiply(block, slots, product.packed_block(block, workspace))

        block, slots = _block(second, task, rows, panels2)
        access = Access(pack, second.read_panels(panels2), store, touched)
        count = block.count_a
        BlockedProduct(second.extents, second.blocking, access).multiply(block, slots, read_hidden)


def _block(layer: Contraction, task: T.Index, rows: int, panels: T.Buffer) -> tuple[Block, int]:
    """Emits the work that a task of so many rows has in a layer; returns also its left panels at most."""
    height = layer.blocking.tile.rows
    slots = rows // height
    first = T.Bind(task * slots)
    return Block(0, first, tail_extent(slots, ceil_div(layer.extents.rows, height), first), 0, panels.shape[1]), slots


def _info(first: Contraction, second: Contraction, activation: Epilogue, epilogue: Epilogue) -> KernelInfo:
    extents = {
        "rows": first.extents.rows,
        "depth": first.extents.depth,
        "hidden": first.extents.columns,
        "columns": second.extents.columns,
    }
    tile = second.blocking.tile
    return KernelInfo(
        Kind.KERNEL,
        "matmul",
        FEED_FORWARD,
        extents,
        tile={"rows": tile.rows, "columns": tile.columns},
        decisions={"rows at a time": _rows(first, second)},
        writes=(*activation.operators, "matmul", *epilogue.operators),
        flop=sum(2 * layer.extents.rows * layer.extents.depth * layer.extents.columns for layer in (first, second)),
    )
