"""Builds attention on NVIDIA's tensor cores: scores and results stay in registers, sums and softmax in fp32.

The operands are half-precision. A warp has sixteen queries of one head, whose fragments it keeps, and the warps of a
block walk over the keys together: keys and values of a step lie in shared memory, in the operands' type. Of the scores
of a step [16, keys] a lane holds parts of two rows, which it shares with three neighbours. The sums of one product have
the layout of the next one's left operand (`harness.compiler.schedules.gpu.fragments`), so that only softmax and
rounding are between the two products, as in FlashAttention-2 (arXiv:2307.08691).

Softmax is online as in `harness.compiler.schedules.gpu.attention`, to base 2: scores are multiplied by log₂e
beforehand, which changes a weight by |score| · 2⁻²⁴, far less than its rounding to half. The total is that of the
weights before they are rounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial, reduce

from harness.compiler import tir as T
from harness.compiler.schedules.common.attention import Attention
from harness.compiler.schedules.common.kernel import ceil_div, where
from harness.compiler.schedules.common.kernel_info import TENSOR_CORES
from harness.compiler.schedules.gpu import fragments
from harness.compiler.schedules.gpu.attention import LOWEST, Emitter, comes_out_even, fill, kernel_of
from harness.compiler.schedules.gpu.folding import Operands
from harness.compiler.schedules.gpu.loading import BoundOperand
from harness.compiler.schedules.gpu.threads import MULTIPROCESSORS, WARP, barrier, fp32, local, merge_lanes

_ROWS = 16
"""Number of queries of a warp, and of terms of one product."""
_PADDING = 8
"""Elements between two rows in shared memory, which put eight rows that are read at once into different banks."""
_WIDEST = 64
"""Largest number of channels with which a warp's queries, scores and results fit its registers."""


@dataclass(frozen=True)
class AttentionWarpTile:
    """The tile of attention that a block of warps computes.

    Attributes:
        warps: Warps of a block, each with sixteen queries.
        keys: Keys of a step.
    """

    warps: int
    keys: int = 64

    @property
    def queries(self) -> int:
        """Returns the number of queries of a block."""
        return _ROWS * self.warps

    @property
    def threads(self) -> int:
        """Returns the number of threads of a block."""
        return WARP * self.warps


def choose_attention_warp_tile(attention: Attention) -> AttentionWarpTile | None:
    """Chooses the tile; None for few queries, keys or channels and for wide heads, which the other kernel takes."""
    widths = (attention.channels, attention.width)
    key_count = attention.keys if isinstance(attention.keys, int) else math.inf
    if (
        attention.dtype not in fragments.SHORT
        or min(attention.queries, key_count, *widths) < _ROWS
        or max(widths) > _WIDEST
    ):
        return None
    blocks = attention.batch * attention.heads * ceil_div(attention.queries, 4 * _ROWS)
    return AttentionWarpTile(4 if blocks >= MULTIPROCESSORS else 2, 64 if key_count > 32 else 32)


def warp_attention_kernel(attention: Attention, tile: AttentionWarpTile, operands: Operands) -> T.PrimFunc:
    """Builds the kernel (`harness.compiler.schedules.gpu.attention.kernel_of`) for tensor cores."""
    sizes = {"queries": tile.queries, "keys": tile.keys, "threads": tile.threads}
    return kernel_of(attention, operands, TENSOR_CORES, sizes, partial(_Emitter, tile=tile))


@dataclass
class _Emitter(Emitter):
    """Emits the body of the kernel with tensor cores."""

    tile: AttentionWarpTile

    def __post_init__(self) -> None:
        attention, tile, thread = self.attention, self.tile, self.thread
        self.dtype = attention.dtype
        self.depth, self.width = (_ROWS * ceil_div(n, _ROWS) for n in (attention.channels, attention.width))
        lane = T.Bind(thread % WARP)
        self.first = T.Bind(thread // WARP * _ROWS)
        self.row, self.pair = T.Bind(lane // 4), T.Bind(lane % 4 * 2)
        # Rows of the four matrices of a load: the second is below the first, the third and fourth beside them.
        self.below, self.beside = T.Bind(lane % 16), T.Bind(lane // 16 * 8)
        # The other way round for keys, whose matrices lie along the terms first.
        self.key_below, self.key_beside = T.Bind(lane // 16 * 8 + lane % 8), T.Bind(lane // 8 % 2 * 8)
        rows = max(tile.keys, tile.queries)  # queries come to lie where keys will
        self.keys = T.alloc_buffer((rows * (self.depth + _PADDING),), self.dtype, scope="shared")
        self.values = T.alloc_buffer((tile.keys * (self.width + _PADDING),), self.dtype, scope="shared")
        self.queries = local(self.depth // 4, "uint32")
        self.scores = local(tile.keys // 2)
        self.results = local(self.width // 2)
        self.highest, self.totals = local(2), local(2)
        self.right, self.weights = local(4, "uint32"), local(4, "uint32")

    def emit(self, query: BoundOperand, key: BoundOperand, value: BoundOperand) -> None:
        attention, tile = self.attention, self.tile
        for i in range(2):
            T.buffer_store(self.highest, fp32(LOWEST), [i])
            T.buffer_store(self.totals, fp32(0.0), [i])
        fill(self.results)
        self._load(query, self.block.first, tile.queries, attention.queries, self.keys, self.depth)
        barrier()
        for k in range(0, self.depth, _ROWS):
            row = (self.first + self.below) * (self.depth + _PADDING) + k + self.beside
            fragments.load(self.dtype, self.queries, k // 4, self._pointer(self.keys, row))
        with T.serial(0, self.steps()) as step:
            first = T.Bind(step * tile.keys)
            barrier()
            self._load(key, first, tile.keys, attention.keys, self.keys, self.depth)
            self._load(value, first, tile.keys, attention.keys, self.values, self.width)
            barrier()
            self._multiply_keys()
            self._weigh(first)
            self._multiply_values()
        totals = merge_lanes([self.totals[i] for i in range(2)], [lambda a, b: a + b] * 2, 4, self.thread)
        self._store(totals)

    def _pointer(self, buffer: T.Buffer, place: T.Index) -> T.Expr:
        return buffer.access_ptr("r", offset=place)

    def _load(
        self, source: BoundOperand, first: T.Index, rows: int, length: T.Index, target: T.Buffer, width: int
    ) -> None:
        """Emits the copy of rows of an operand to shared memory, from position `first` on; zero beyond its edges."""
        channels = source.folded.shape[3]
        lanes = 8 if channels % 8 == 0 else 4
        vectors_per_row, threads = width // lanes, self.tile.threads
        count = rows * vectors_per_row

        def copy(index: T.Index) -> None:
            row, vector = T.Bind(index // vectors_per_row), T.Bind(index % vectors_per_row)
            position = T.Bind(first + row)
            limit = None if comes_out_even(length, rows) else length
            values = source.load(self.block, position, vector, limit=limit, padded=width > channels, lanes=lanes)
            vector_registers = local(lanes, self.dtype)
            for n, value in enumerate(values):
                T.buffer_store(vector_registers, value, [n])
            with T.vectorized(0, lanes) as v:
                T.buffer_store(target, vector_registers[v], [row * (width + _PADDING) + lanes * vector + v])

        # Computing an operand takes registers: one after the other, so that none are spilled.
        annotations = {"disable_unroll": True} if source.folded.operations else None
        with T.serial(0, ceil_div(count, threads), annotations=annotations) as n:
            index = T.Bind(n * threads + self.thread)
            with where(*([] if count % threads == 0 else [index < count])):
                copy(index)

    def _multiply_keys(self) -> None:
        """Emits the scores of the warp's queries with the keys of a step."""
        fill(self.scores)
        for j in range(0, self.tile.keys, _ROWS):
            for k in range(0, self.depth, _ROWS):
                row = (j + self.key_below) * (self.depth + _PADDING) + k + self.key_beside
                fragments.load(self.dtype, self.right, 0, self._pointer(self.keys, row))
                for n in range(2):
                    index = (j // 8 + n) * 4
                    fragments.multiply(self.dtype, self.scores, index, self.queries, k // 4, self.right, 2 * n)

    def _weigh(self, first: T.Index) -> None:
        """Replaces scores by weights, and rescales the sums of smaller weights."""
        attention, count = self.attention, self.tile.keys // 2
        plain = attention.bias is None
        factor = attention.scale * math.log2(math.e) if plain else attention.scale
        for index in range(count):
            query = self.block.first + self.first + self.row + index // 2 % 2 * 8
            key = first + (index // 4 * 8 + self.pair + index % 2)
            score = self.masked(self.scores[index] * fp32(factor), query, key)
            T.buffer_store(self.scores, score if plain else score * fp32(math.log2(math.e)), [index])
        rows: list[list[T.Expr]] = [[self.scores[n] for n in range(count) if n // 2 % 2 == i] for i in range(2)]
        tops = merge_lanes([reduce(T.max, row) for row in rows], [T.max] * 2, 4, self.thread)
        previous = local(1)
        for i, top in enumerate(tops):
            T.buffer_store(previous, self.highest[i], [0])
            T.buffer_store(self.highest, T.max(previous[0], top), [i])
            T.buffer_store(previous, T.exp2(previous[0] - self.highest[i]), [0])
            for index in range(self.width // 2):
                if index // 2 % 2 == i:
                    T.buffer_store(self.results, self.results[index] * previous[0], [index])
            T.buffer_store(self.totals, self.totals[i] * previous[0], [i])
            for index in range(count):
                if index // 2 % 2 == i:
                    T.buffer_store(self.scores, T.exp2(self.scores[index] - self.highest[i]), [index])
                    T.buffer_store(self.totals, self.totals[i] + self.scores[index], [i])

    def _multiply_values(self) -> None:
        """Emits the addition of a step's weighted values to the results."""
        for k in range(0, self.tile.keys, _ROWS):
            for n in range(4):
                index = k // 2 + 2 * n
                pair = fragments.packed(self.dtype, self.scores[index], self.scores[index + 1])
                T.buffer_store(self.weights, pair, [n])
            for j in range(0, self.width, _ROWS):
                row = (k + self.below) * (self.width + _PADDING) + j + self.beside
                fragments.load(self.dtype, self.right, 0, self._pointer(self.values, row), transposed=True)
                for n in range(2):
                    index = (j // 8 + n) * 4
                    fragments.multiply(self.dtype, self.results, index, self.weights, 0, self.right, 2 * n)

    def _store(self, totals: list[T.Expr]) -> None:
        attention, width = self.attention, self.attention.width
        staged = local(2, self.dtype)
        for index in range(0, self.width // 2, 2):
            i = index // 2 % 2
            query = T.Bind(self.block.first + self.first + self.row + 8 * i)
            channel = T.Bind(index // 4 * 8 + self.pair)
            for n in range(2):
                value = self.results[index + n] / totals[i]
                value = T.Select(T.EQ(totals[i], fp32(0.0)), fp32(0.0), value)
                T.buffer_store(staged, T.Cast(self.dtype, value), [n])
            inside = [] if attention.queries % self.tile.queries == 0 else [query < attention.queries]
            if width % 2 == 0:
                inside += [channel < width] if width < self.width else []
                with where(*inside), T.vectorized(0, 2) as v:
                    self._put(query, channel + v, staged[v])
            else:
                for n in range(2):
                    with where(*inside, channel + n < width):
                        self._put(query, channel + n, staged[n])

    def _put(self, query: T.Index, channel: T.Index, value: T.Expr) -> None:
        T.buffer_store(self.result, value, [self.block.batch, query, self.block.head, channel])
