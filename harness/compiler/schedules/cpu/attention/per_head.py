"""Builds attention whose threads each copy the keys and values of a head, for heads that are small enough.

One task computes blocks of queries of one head. The first task of a head in a thread copies the head's keys and values
into the thread's workspace, one row each, with folded moves and rotations. Then it takes a block of keys past some
blocks of queries, so that repeated reads stay in the second-level cache.

Where an element of the micro-kernel has several terms, those of scores are channels and those of results are keys that
follow each other: rows of the strip, so that joining them moves no lane. Copies are of elements.

Where the micro-kernel multiplies whole panels, whose left one lies row by row, keys are left panels as they are copied.
The strip of exponentials is a right panel as it is, so that results are transposed, too: values are copied channel by
channel, and are the left panels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import ceil_div, parallel_with_workspace, prim_func, tail_extent
from harness.compiler.schedules.cpu.attention.block import KeyBlock, Passage, Plan, QueryBlock, Strip, Work
from harness.compiler.schedules.cpu.attention.operands import Attention
from harness.compiler.schedules.cpu.attention.packing import pack_channels, pack_keys
from harness.compiler.schedules.cpu.attention.score_mod import Buffers, Head
from harness.compiler.schedules.cpu.emit import columns_after
from harness.compiler.schedules.cpu.schedule import key_blocks, query_group
from harness.compiler.schedules.cpu.tile import Tile


def per_head_kernel(attention: Attention, scores: Tile, output: Tile, parts: int) -> T.PrimFunc:
    """Builds the kernel; keys are divided into blocks of equal length (`key_blocks`).

    Args:
        attention: The operands.
        scores: Register tile of the scores, keys × queries.
        output: Register tile of the result, queries × channels; channels × queries for whole panels.
        parts: Parts of the queries of a head, none of which is empty.
    """
    plan = _Plan(attention, scores, output, parts)
    micro_kernel = attention.micro_kernel

    def body(*buffers: T.Buffer) -> None:
        *inputs, result = buffers
        sources = attention.by_role(inputs)
        tasks = parallel_with_workspace(plan.heads * parts, micro_kernel.dtype, *plan.copies)
        with micro_kernel.imported(), tasks as (task, workspace), micro_kernel.setup():
            m = T.Bind(task // parts)
            head = plan.head(m)
            keys, values = workspace.buffers
            # A task of the same thread may have copied them for other queries of the head.
            with workspace.fill_once(m):
                key_rows = attention.key_rows(sources, head, 0, plan.count, plan.count)
                pack_channels(key_rows, keys, plan.lanes, 0, plan.count, micro_kernel)
                pack_keys(attention.value_rows(sources, head), values, plan.lanes, plan.keys, micro_kernel)
            _compute(plan, sources, head, (keys, values), task % parts, result)

    info = plan.info({"parts": parts, "keys at a time": plan.keys})
    return prim_func(attention.name, attention.arguments, body, info)


@dataclass(frozen=True)
class _Plan(Plan):
    """The sizes of the kernel.

    Attributes:
        parts: Parts of the queries of a head, none of which is empty.
    """

    parts: int

    @property
    def per_part(self) -> int:
        """Returns the number of blocks of queries of a part."""
        return ceil_div(self.blocks, self.parts)

    @property
    def group(self) -> int:
        """Returns the number of blocks of queries that share a pass over the keys."""
        channels = self.attention.problem.channels
        return min(self.per_part, query_group(self.count, self.columns, channels, self.padded))

    @property
    def count(self) -> int:
        """Returns the number of keys."""
        return self.attention.problem.static_keys

    @property
    def keys(self) -> int:
        """Returns the number of keys of a block."""
        return self.count // key_blocks(self.count)

    @property
    def elements(self) -> int:
        """Returns the elements of a block of keys, in whole steps of the micro-kernel."""
        micro_kernel = self.attention.micro_kernel
        step = micro_kernel.multiple
        return ceil_div(self.keys, micro_kernel.terms * step) * step

    @property
    def lines(self) -> int:
        """Returns the number of keys of a block with those that fill up its elements."""
        return self.elements * self.attention.micro_kernel.terms

    @property
    def copies(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns the shapes of the keys, with a tile more that may be read, and of the values."""
        keys = self.count + self.scores.rows, self.attention.depth
        elements = key_blocks(self.count) * self.elements
        return keys, (self.padded, elements) if self.by_channel else (elements, self.padded)

    def key_block(self, keys: T.Buffer, values: T.Buffer, block: T.Expr) -> KeyBlock:
        """Emits the numbers of a block's first key and first element; returns the block."""
        micro_kernel, elements = self.attention.micro_kernel, self.elements
        first = T.Bind(block * self.keys)
        first_element = first if micro_kernel.terms == 1 else T.Bind(block * elements)
        chunk = micro_kernel.chunk(elements, even=True)

        def key(p: T.Index, start: T.Index, k: T.Index, i: int) -> T.Expr:
            return keys[first + p * self.scores.rows + i, start + k]

        def value(_: T.Index, channel: T.Index, start: T.Index, k: T.Index, j: T.Index) -> T.TensorLoad:
            row, column = first_element + start + k, columns_after(channel, j)
            return values[column, row] if self.by_channel else values[row, column]

        return KeyBlock(
            first,
            self.keys,
            elements,
            chunk,
            ceil_div(elements, chunk),
            padded=self.lines > self.keys,
            by_chunk=False,
            key=key,
            value=value,
            stride=int(values.shape[1]),
        )


def _compute(
    plan: _Plan, sources: Buffers, head: Head, copies: tuple[T.Buffer, T.Buffer], part: T.Expr, result: T.Buffer
) -> None:
    """Emits a task: some blocks of queries share each pass over the keys."""
    line = T.alloc_buffer((plan.columns, plan.attention.depth), plan.attention.micro_kernel.dtype)
    work, strip = Work.allocated(plan, sources, plan.group), Strip.allocated(plan, plan.lines)
    if plan.lines > plan.keys:
        # Keys that do not exist weigh nothing.
        strip.pad(plan.keys, plan.lines, plan.lanes, -math.inf)
    first_block = T.Bind(part * plan.per_part)
    blocks = T.Bind(tail_extent(plan.per_part, plan.blocks, first_block))
    with T.serial(0, ceil_div(plan.per_part, plan.group)) as g:
        first_of_group = T.Bind(first_block + g * plan.group)
        count = T.Bind(T.max(0, T.min(plan.group, blocks - g * plan.group)))
        with T.serial(0, count) as q:
            first, rows = plan.queries_from(first_of_group + q)
            work.prepare(line, QueryBlock(q, head, first), rows)
        with T.serial(0, key_blocks(plan.count)) as n, T.serial(0, count) as q:
            keys = plan.key_block(*copies, n)
            block = QueryBlock(q, head, T.Bind((first_of_group + q) * plan.columns))
            Passage(work, strip, block, keys).emit()
        with T.serial(0, count) as q:
            first, rows = plan.queries_from(first_of_group + q)
            work.write(QueryBlock(q, head, first), rows, result)
