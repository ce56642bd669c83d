"""Builds attention that takes keys and values a block at a time, for many keys or a symbolic number of them.

A block of keys and values is packed once, by all threads, and then meets every query before the next block is packed,
so that it stays in the second-level cache of each core. In memory lie two blocks of this length (keys, and values), the
queries as they are multiplied, and the softmax of each query so far: no more than queries and result once again,
however many keys there are. The last block may be shorter; its loops end earlier. What its last chunk of keys lacks is
padded: scores of keys that do not exist are never stored, their weights are zero and so are their values.

Keys are packed chunk by chunk of their channels, values panel by panel of theirs, so that each product reads memory
strictly forward. A chunk of a block of queries stays in the first-level cache and passes all keys of the block. What is
packed are elements of the attention's micro-kernel, whose terms are channels of a key, and keys of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import ceil_div, parts_of, prim_func
from harness.compiler.schedules.cpu.attention.block import KeyBlock, Passage, Plan, QueryBlock, Strip, Work
from harness.compiler.schedules.cpu.attention.linear_key import LinearKey
from harness.compiler.schedules.cpu.attention.operands import Attention
from harness.compiler.schedules.cpu.attention.packing import copy_rows, joined_rows, pack_channels
from harness.compiler.schedules.cpu.attention.score_mod import Buffers, Head
from harness.compiler.schedules.cpu.emit import for_each_vector
from harness.compiler.schedules.cpu.tile import Tile

_BLOCK_BYTES = 512 * 1024
"""Largest size of the keys and values of a block in bytes."""
_MOST_KEYS = 576
"""Largest number of keys of a block, whose scores are a strip of as many lines."""
_CHUNK = 64
"""Largest number of keys whose exponentials, and whose values, one register adds up."""
_TILES = 4
"""Largest number of tiles of keys that a task computes and packs together, if the kernel computes their layer."""
_TASKS = 64
"""Blocks of queries wanted at least in a parallel loop; as many heads are taken together as that needs."""


_HeadOf = Callable[[T.Expr], Head]
"""Takes the number of a head among those that are computed at a time; emits its batch and number."""


def streaming_kernel(attention: Attention, scores: Tile, output: Tile) -> T.PrimFunc:
    """Builds the kernel; the number of keys may be symbolic.

    Args:
        attention: The operands.
        scores: Register tile of the scores, keys × queries; its keys are whole elements of the micro-kernel.
        output: Register tile of the result, queries × channels.
    """
    plan = _Plan(attention, scores, output)

    def body(*buffers: T.Buffer) -> None:
        *inputs, result = buffers
        sources, count = attention.by_role(inputs), attention.problem.keys
        if not isinstance(count, int):
            count = T.Bind(T.Cast("int32", count))
        panels, work = _Panels.allocated(plan), Work.allocated(plan, sources, plan.tasks)
        with attention.micro_kernel.imported(), T.serial(0, plan.heads // plan.heads_at_a_time) as g:

            def head_of(m: T.Expr, g: T.Expr = g) -> Head:
                return plan.head(T.Bind(g * plan.heads_at_a_time + m))

            with T.parallel(0, plan.tasks) as task:
                first, rows = plan.queries_from(task % plan.blocks)
                line = T.alloc_buffer((plan.columns, attention.depth), attention.micro_kernel.dtype)
                work.prepare(line, QueryBlock(task, head_of(task // plan.blocks), first), rows)
            with T.serial(0, ceil_div(count, plan.keys)) as block:
                first = T.Bind(block * plan.keys)
                key_count = plan.keys if plan.even else T.Bind(T.min(plan.keys, count - first))
                _pack_keys(plan, head_of, sources, panels, (first, key_count))
                _attend(plan, head_of, work, panels, (first, key_count))
            with T.parallel(0, plan.tasks) as task:
                head = head_of(task // plan.blocks)
                first, rows = plan.queries_from(task % plan.blocks)
                work.write(QueryBlock(task, head, first), rows, result)

    info = plan.info({"keys at a time": plan.keys, "packed": "by block"})
    return prim_func(attention.name, attention.arguments, body, info)


@dataclass(frozen=True)
class _Plan(Plan):
    """The sizes of the kernel."""

    @property
    def heads_at_a_time(self) -> int:
        """Returns the number of heads that are computed at a time, a divisor of the number of heads."""
        fitting = (n for n in range(1, self.heads) if self.heads % n == 0 and n * self.blocks >= _TASKS)
        return next(fitting, self.heads)

    @property
    def tasks(self) -> int:
        """Returns the number of blocks of queries that are computed at a time."""
        return self.heads_at_a_time * self.blocks

    @property
    def chunks(self) -> int:
        """Returns the number of chunks of the depth of a score."""
        return ceil_div(self.attention.depth, self.chunk)

    @property
    def part(self) -> int:
        """Returns the number of keys of a chunk: whole tiles of scores, as many as one register of a result adds up."""
        rows = self.scores.rows
        return max(1, _CHUNK // rows) * rows

    @property
    def keys(self) -> int:
        """Returns the number of keys of a block: whole chunks, in blocks that are as equal as these allow."""
        count, part = self.attention.problem.keys, self.part
        channels = self.chunks * self.chunk * self.attention.micro_kernel.terms
        fitting = min(_MOST_KEYS, _BLOCK_BYTES // (4 * (channels + self.padded)))
        most_keys = max(1, fitting // part) * part
        length = ceil_div(count, ceil_div(count, most_keys)) if isinstance(count, int) else most_keys
        return ceil_div(length, part) * part

    @property
    def packed(self) -> int:
        """Returns the number of keys that a task packs: whole tiles of scores, a divisor of a chunk."""
        rows = self.scores.rows
        tiles = self.part // rows
        if not isinstance(self.attention.key, LinearKey):
            return rows
        return rows * next(count for count in range(min(_TILES, tiles), 0, -1) if tiles % count == 0)

    @property
    def even(self) -> bool:
        """Returns whether every block of keys is full."""
        count = self.attention.problem.keys
        return isinstance(count, int) and count % self.keys == 0


@dataclass(frozen=True)
class _Panels:
    """The packed keys and values of a block of keys.

    Attributes:
        keys: [head, chunk, key, element of the chunk].
        values: [head, panel, element of the keys, channel of the panel].
    """

    keys: T.Buffer
    values: T.Buffer

    @classmethod
    def allocated(cls, plan: _Plan) -> _Panels:
        """Emits its allocation."""
        micro_kernel, heads = plan.attention.micro_kernel, plan.heads_at_a_time
        keys = (heads, plan.chunks, plan.keys, plan.chunk)
        values = (heads, plan.panels, plan.keys // micro_kernel.terms, plan.output.columns)
        return cls(T.alloc_buffer(keys, micro_kernel.dtype), T.alloc_buffer(values, micro_kernel.dtype))


def _pack_keys(plan: _Plan, head_of: _HeadOf, sources: Buffers, panels: _Panels, block: tuple[T.Var, T.Index]) -> None:
    """Emits the packing of a block of keys and values, with zeros beyond the last key."""
    attention, (first, key_count) = plan.attention, block
    micro_kernel, lanes, rows = attention.micro_kernel, plan.lanes, plan.packed
    tasks = plan.keys // rows
    with T.parallel(0, plan.heads_at_a_time * tasks) as task:
        m, start = T.Bind(task // tasks), T.Bind(task % tasks * rows)
        head = head_of(m)
        count = rows if plan.even else T.Bind(T.max(0, T.min(rows, key_count - start)))
        key = T.alloc_buffer((rows, plan.chunks * plan.chunk), micro_kernel.dtype)
        value = T.alloc_buffer((rows, plan.padded), "float32")
        begin = first + start
        key_rows = attention.key_rows(sources, head, begin, count, rows)
        pack_channels(key_rows, key, lanes, begin, count, micro_kernel)
        copy_rows(attention.value_rows(sources, head), value, lanes, begin, count)
        with T.serial(0, rows // micro_kernel.terms) as i:
            _store_element(plan, panels, key, value, (m, T.Bind(start // micro_kernel.terms + i)), i)


def _store_element(
    plan: _Plan, panels: _Panels, key: T.Buffer, value: T.Buffer, place: tuple[T.Var, T.Var], i: T.Var
) -> None:
    """Emits the store of element i of packed rows of keys and values, at its place (head, element of the block)."""
    (m, element), micro_kernel, columns = place, plan.attention.micro_kernel, plan.output.columns
    terms = micro_kernel.terms
    for n, c in product(range(terms), range(plan.chunks)):

        def pack_key(k: T.Index, n: int = n, c: int = c) -> None:
            T.buffer_store(panels.keys, key[i * terms + n, c * plan.chunk + k], [m, c, element * terms + n, k])

        for_each_vector(min(plan.chunk, plan.attention.depth - c * plan.chunk), plan.lanes, pack_key)
    with T.serial(0, plan.panels) as p:

        def pack_value(j: T.Index) -> None:
            T.buffer_store(panels.values, joined_rows(micro_kernel, value, i, p * columns + j), [m, p, element, j])

        for_each_vector(columns, plan.lanes, pack_value)


def _attend(plan: _Plan, head_of: _HeadOf, work: Work, panels: _Panels, block: tuple[T.Var, T.Index]) -> None:
    """Emits the passage of all blocks of queries past a block of keys."""
    (first, key_count), terms = block, plan.attention.micro_kernel.terms
    chunks = parts_of(key_count, plan.part)
    elements = plan.keys // terms if plan.even else key_count if terms == 1 else chunks * (plan.part // terms)
    with T.parallel(0, plan.tasks) as task:
        m = T.Bind(task // plan.blocks)
        queries = QueryBlock(task, head_of(m), T.Bind(task % plan.blocks * plan.columns))

        def key(p: T.Index, start: T.Index, k: T.Index, i: int) -> T.Expr:
            return panels.keys[m, start // plan.chunk, p * plan.scores.rows + i, k]

        def value(panel: T.Index, _: T.Index, start: T.Index, k: T.Index, j: T.Index) -> T.TensorLoad:
            return panels.values[m, panel, start + k, j]

        keys = KeyBlock(
            first,
            key_count,
            elements,
            plan.part // terms,
            chunks,
            padded=terms > 1 and not plan.even,
            by_chunk=True,
            key=key,
            value=value,
        )
        Passage(work, Strip.allocated(plan, plan.keys), queries, keys).emit()
