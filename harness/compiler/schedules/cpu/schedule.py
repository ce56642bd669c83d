"""Defines the decisions about kernels: workloads and their keys, schedules, and all schedules of a workload.

A *workload* is everything about an operator's call that its kernel depends on, epilogue and folded moves aside. Its
*key* identifies it in a database, and contains the type of the factors unless it is float32. Operands and results are
always float32: kernels round the factors. A *schedule* names decisions; a complete one names all decisions of its
workload:

    product, conv2d, conv2d_transpose   rows, vectors (the register tile), blocks (parts of the streaming operand, each
                                        packed by its task), splits (parts of the resident one), chunk (terms of a sum
                                        that stay in registers)
    conv2d by minimal filtering         filtering = 1, rows, vectors, lines (of tiles, in a task), splits and groups of
                                        filters
    attention                           rows, vectors (tile of scores), result_rows, result_vectors, parts (of queries)
    attention with streaming keys       the same without parts
    attention of few queries            parts (of keys)

Sums are cut into chunks of half the usual length at least and of that length at most, because longer ones are less
accurate.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import tvm_ffi

from harness.compiler.schedules import Schedule
from harness.compiler.schedules.common.kernel import ceil_div, chunk_length
from harness.compiler.schedules.cpu import blocking, winograd_plan
from harness.compiler.schedules.cpu.bf16 import BF16, PAIR
from harness.compiler.schedules.cpu.blocking import Blocking, Extents, Side
from harness.compiler.schedules.cpu.microkernels.fp32 import FP32
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel
from harness.compiler.schedules.cpu.tile import Tile, VectorUnit, choose_tile, loads
from harness.compiler.schedules.cpu.window import Window
from harness.core.errors import HarnessError

# A lowering runs inside a pass, and TVM would make a RuntimeError of an error that it does not know.
tvm_ffi.register_error("HarnessError", HarnessError)

_MOST_ROWS, _MOST_VECTORS = 14, 6
"""Largest tiles that are tried."""
_LEAST_ACCUMULATORS = {32: 16, 16: 8}
"""Vectors of sums in a tile, by number of registers: fewer neither hide latency nor share loads."""
_MOST_TASKS = 1024
"""Tasks at most; each costs some microseconds."""
_WORKSPACE_BYTES = 64 << 20
"""Largest workspace of one task in bytes."""
_TASKS = 16
"""Tasks of an attention wanted at least, however small they are."""
_LEAST_KEYS = 128
"""Fewer keys are not worth an attention of few queries."""
_KEYS_OF_A_PART = 512
"""Keys of one task of such an attention at least."""
_MOST_KEYS = 576
"""Largest number of keys of a block of attention: with values of 64 channels and 48 queries 400 KB, for a cache of 1
MB."""
_AS_GOOD = 1.02
"""Tolerance for the division into parts, of which the fewest are taken: a task costs some microseconds."""
_GROUP_BYTES = 256 * 1024
"""Queries and results of the blocks of queries that share a pass over the keys; they stay in the second-level cache."""
_COPIED_BYTES = 4 << 20
"""Bytes of a head's keys and values up to which each thread copies all of them."""
TILE = ("rows", "vectors")
"""Decisions that make one choice together: the register tile."""
RESULT_TILE = ("result_rows", "result_vectors")
"""Decisions that make one choice of the tile of attention's second product."""


def key_blocks(keys: int) -> int:
    """Returns into how many equal blocks of at most `_MOST_KEYS` keys are cut; 1 where no fitting length divides."""
    least_blocks = ceil_div(keys, _MOST_KEYS)
    return next((n for n in range(least_blocks, 2 * least_blocks) if keys % n == 0), 1)


def query_group(keys: int, columns: int, channels: int, width: int) -> int:
    """Returns how many blocks of queries share a pass over keys at most: 1 where all keys are one block.

    Args:
        keys: Keys of a head.
        columns: Queries of a block.
        channels: Channels of a query.
        width: Channels of a result, padded.
    """
    return 1 if key_blocks(keys) == 1 else max(1, _GROUP_BYTES // (4 * columns * (channels + width)))


@dataclass(frozen=True)
class Workload(ABC):
    """An operator's call that can be scheduled.

    Attributes:
        dtype: Type of the factors.
    """

    dtype: str = field(default="float32", kw_only=True)

    @property
    def key(self) -> str:
        """Returns the key in a database, which is the same for the same work; databases know float32 without a word."""
        return " ".join([*self._words(), *([] if self.dtype == "float32" else [self.dtype])])

    @abstractmethod
    def _words(self) -> list[str]:
        """Returns the words of the key without the type of the factors."""

    @property
    @abstractmethod
    def multiplications(self) -> int:
        """Returns the number of multiply-adds of a direct computation."""

    @abstractmethod
    def completed(self, unit: VectorUnit, schedule: Schedule) -> dict[str, int]:
        """Adds to the schedule the decisions that it does not name, as they are best without tuning.

        Raises:
            ValueError: The schedule cannot be used; the message says why.
        """

    @abstractmethod
    def candidates(self, unit: VectorUnit) -> Iterator[Schedule]:
        """Yields schedules worth trying, repetitions among them; some may be refused."""


@dataclass(frozen=True)
class ProductWorkload(Workload):
    """An operator's call that can be computed as a product.

    Attributes:
        at_load: Whether the resident operand is packed when the model is loaded.
    """

    at_load: bool = field(default=True, kw_only=True)

    @property
    @abstractmethod
    def direct(self) -> tuple[Extents, Side]:
        """Returns the product of a direct computation: its extents, with a depth in terms, and what tasks pack."""

    @property
    def multiplications(self) -> int:
        """Returns the number of multiply-adds of that product."""
        extents, _ = self.direct
        return extents.batch * extents.rows * extents.columns * extents.depth

    def completed(self, unit: VectorUnit, schedule: Schedule) -> dict[str, int]:
        """Returns the complete schedule of that product."""
        return _blocked(*self._packed, unit, schedule)

    def candidates(self, unit: VectorUnit) -> Iterator[Schedule]:
        """Yields the schedules of that product."""
        yield from _blocked_candidates(*self._packed, unit)

    @property
    def _packed(self) -> tuple[Extents, Side]:
        """Returns the same with a depth that counts elements of panels: terms, or pairs of them."""
        extents, streaming = self.direct
        return extents.packed(PAIR if self.dtype == BF16 else 1), streaming

    def _words(self) -> list[str]:
        return [*self._problem(), *([] if self.at_load else ["activations"])]

    @abstractmethod
    def _problem(self) -> list[str]:
        """Returns the words of the key for the operator and its operands."""


def decided(workload: Workload, unit: VectorUnit, schedule: Schedule) -> dict[str, int]:
    """Returns the complete schedule of a workload.

    Raises:
        HarnessError: The schedule cannot be used.
    """
    try:
        if wrong := [name for name, value in schedule.items() if type(value) is not int or value < 0]:
            raise ValueError(f"{wrong[0]} = {schedule[wrong[0]]!r} is not a number of anything")
        return workload.completed(unit, schedule)
    except ValueError as error:
        raise HarnessError(f"the schedule of {workload.key} cannot be used: {error}") from error


@lru_cache(maxsize=64)
def space(workload: Workload, unit: VectorUnit) -> tuple[Mapping[str, int], ...]:
    """Returns every complete schedule of a workload, the default first, none twice."""
    schedules: dict[tuple[tuple[str, int], ...], dict[str, int]] = {}
    for candidate in ({}, *workload.candidates(unit)):
        try:
            schedule = workload.completed(unit, candidate)
        except ValueError:
            continue
        schedules.setdefault(tuple(sorted(schedule.items())), schedule)
    return tuple(schedules.values())


def distance(a: Schedule, b: Schedule) -> int:
    """Returns the number of choices in which two complete schedules differ; a tile is one choice."""
    names = {name for name in {*a, *b} if a.get(name) != b.get(name)}
    of_tiles = sum(not names.isdisjoint(common) for common in (TILE, RESULT_TILE))
    return of_tiles + len(names.difference(TILE, RESULT_TILE))


def fits(unit: VectorUnit, rows: int, vectors: int) -> bool:
    """Returns whether sums, a row of the right operand and a broadcast fit the registers, one of 32 left free."""
    # A single row reads each vector once: that is an operand in memory.
    needed = rows * vectors + (0 if rows == 1 else vectors) + 1
    return rows > 0 and vectors > 0 and needed <= (31 if unit.registers == 32 else unit.registers)


def _tiles(unit: VectorUnit, rows: int, columns: int) -> Iterator[Tile]:
    """Yields the tiles that are worth trying for a result of this many rows and columns."""
    for height in range(1, min(_MOST_ROWS, rows) + 1):
        for vectors in range(1, min(_MOST_VECTORS, ceil_div(columns, unit.lanes)) + 1):
            least_accumulators = min(
                _LEAST_ACCUMULATORS[unit.registers], rows * ceil_div(columns, unit.lanes), _MOST_VECTORS * rows
            )
            if fits(unit, height, vectors) and height * vectors >= least_accumulators:
                yield Tile(height, vectors * unit.lanes, unit.lanes)


def _only(schedule: Schedule, names: Iterable[str]) -> None:
    for name in schedule:
        if name not in names:
            raise ValueError(f"there is no decision {name!r} about it, only {', '.join(names)}")


def _tile(unit: VectorUnit, schedule: Schedule, default: Tile, names: tuple[str, str] = TILE) -> Tile:
    rows, vectors = schedule.get(names[0], default.rows), schedule.get(names[1], default.vectors)
    if (rows, vectors) != (default.rows, default.vectors) and not fits(unit, rows, vectors):
        raise ValueError(f"a tile of {rows} rows and {vectors} vectors does not fit {unit.registers} registers")
    return Tile(rows, vectors * unit.lanes, unit.lanes)


def _decisions(tile: Tile, names: tuple[str, str] = TILE) -> dict[str, int]:
    """Returns the decisions that stand for a tile."""
    return dict(zip(names, (tile.rows, tile.vectors), strict=True))


def _in_range(schedule: Schedule, name: str, default: int, limit: int) -> int:
    value = schedule.get(name, default)
    if not 1 <= value <= limit:
        raise ValueError(f"{name} = {value} is not in 1 … {limit}")
    return value


def _parts(count: int) -> Iterator[int]:
    """Yields the numbers of parts that `count` things can be cut into: 1, 2, 3, 4, 6, 8 and so on."""
    n = 1
    while n <= count:
        yield n
        if n > 1 and n * 3 // 2 <= count:
            yield n * 3 // 2
        n *= 2


def _blocked(extents: Extents, streaming: Side, unit: VectorUnit, schedule: Schedule) -> dict[str, int]:
    _only(schedule, (*TILE, "blocks", "splits", "chunk"))
    tile = _tile(unit, schedule, choose_tile(unit, extents.rows, extents.columns))
    slots, splits = blocking.choose_partition(extents, streaming, tile, FP32.block_bytes)
    panels, others = blocking.panels(extents, streaming, tile)
    blocks = _in_range(schedule, "blocks", ceil_div(panels, slots), panels)
    splits = _in_range(schedule, "splits", splits, others)
    usual = chunk_length(extents.depth)
    chunk = schedule.get("chunk", usual)
    if not usual <= 2 * chunk <= 2 * usual:
        raise ValueError(f"chunk = {chunk} is not between half of {usual} and that")
    # The same work in equal parts.
    slots = ceil_div(panels, blocks)
    per_split = ceil_div(others, splits)
    depth = extents.depth if streaming == "left" else chunk
    workspace_numbers = blocking.panel_width(streaming, tile) * depth * (slots if streaming == "left" else 1)
    workspace_numbers += tile.size * (slots if streaming == "left" else per_split)
    if 4 * workspace_numbers > _WORKSPACE_BYTES:
        raise ValueError(f"a task would need {4 * workspace_numbers >> 20} MiB, over {_WORKSPACE_BYTES >> 20}")
    return {
        **_decisions(tile),
        "blocks": ceil_div(panels, slots),
        "splits": ceil_div(others, per_split),
        "chunk": ceil_div(extents.depth, ceil_div(extents.depth, chunk)),
    }


def _blocked_candidates(extents: Extents, streaming: Side, unit: VectorUnit) -> Iterator[Schedule]:
    usual = chunk_length(extents.depth)
    chunks = {usual} | {c for c in (usual // 2, usual * 3 // 4) if c >= 32}
    default = choose_tile(unit, extents.rows, extents.columns)
    for tile in (default, *_tiles(unit, extents.rows, extents.columns)):
        panels, others = blocking.panels(extents, streaming, tile)
        usual_blocks = ceil_div(panels, blocking.choose_partition(extents, streaming, tile, FP32.block_bytes)[0])
        for blocks in {usual_blocks, *_parts(panels)}:
            for splits in _parts(min(others, max(1, _MOST_TASKS // (extents.batch * blocks)))):
                for chunk in sorted(chunks):
                    yield {**_decisions(tile), "blocks": blocks, "splits": splits, "chunk": chunk}


def tile_of(unit: VectorUnit, schedule: Schedule, names: tuple[str, str] = TILE) -> Tile:
    """Returns a register tile of a complete schedule."""
    return Tile(schedule[names[0]], schedule[names[1]] * unit.lanes, unit.lanes)


def blocking_of(
    micro_kernel: MicroKernel, unit: VectorUnit, extents: Extents, streaming: Side, schedule: Schedule
) -> Blocking:
    """Returns the blocking of a product.

    Args:
        micro_kernel: The micro-kernel.
        unit: The target's vector registers.
        extents: The extents; the depth counts elements of panels.
        streaming: The operand that streams: `left` or `right`.
        schedule: A complete schedule, if tuning chooses the tile of the micro-kernel.
    """
    if micro_kernel.choose_tile is None:
        tile = tile_of(unit, schedule)
        count, _ = blocking.panels(extents, streaming, tile)
        return Blocking(tile, ceil_div(count, schedule["blocks"]), schedule["splits"], schedule["chunk"])
    tile = micro_kernel.choose_tile(unit, extents.rows, extents.columns)
    slots, splits = blocking.choose_partition(extents, streaming, tile, micro_kernel.block_bytes)
    return Blocking(tile, slots, splits, micro_kernel.chunk(extents.depth))


def plan_of(unit: VectorUnit, window: Window, schedule: Schedule) -> winograd_plan.Plan:
    """Returns the plan of a convolution by minimal filtering that a complete schedule stands for."""
    names = ("lines", "splits", "groups")
    return winograd_plan.Plan(
        window, winograd_plan.Blocking(tile_of(unit, schedule), *(schedule[name] for name in names))
    )


@dataclass(frozen=True)
class Product(ProductWorkload):
    """A matrix product.

    Attributes:
        extents: Its extents.
        streaming: The operand that is packed by the tasks.
        matrices: Number of stored matrices of the resident operand.
        transposed: Whether the streaming operand is stored the other way round.
    """

    extents: Extents
    streaming: Side
    matrices: int = 1
    transposed: bool = field(default=False, kw_only=True)

    @property
    def direct(self) -> tuple[Extents, Side]:
        """Returns the extents, and the operand that is packed by the tasks."""
        return self.extents, self.streaming

    def _problem(self) -> list[str]:
        extents = self.extents
        words = ["product", f"{extents.batch}x{extents.rows}x{extents.depth}x{extents.columns}", self.streaming]
        words += [f"of {self.matrices}"] if self.matrices != extents.batch else []
        return [*words, *(["transposed"] if self.transposed else [])]


@dataclass(frozen=True)
class Convolution(ProductWorkload):
    """A convolution that is computed as a product with gathered columns, or by minimal filtering.

    Attributes:
        window: Its geometry.
    """

    window: Window

    @property
    def direct(self) -> tuple[Extents, Side]:
        """Returns the product of filters and gathered columns, which stream."""
        return self.window.extents, "right"

    @property
    def filterable(self) -> bool:
        """Returns whether minimal filtering applies, in fp32; it is the default, unless pairs can be multiplied."""
        return self.at_load and winograd_plan.filterable(self.window)

    def completed(self, unit: VectorUnit, schedule: Schedule) -> dict[str, int]:
        """Returns the complete schedule."""
        filtering = schedule.get("filtering", int(self.filterable and self.dtype != BF16))
        if filtering not in (0, 1) or filtering > self.filterable:
            raise ValueError(f"filtering = {filtering} is not possible")
        rest = {name: value for name, value in schedule.items() if name != "filtering"}
        if filtering:
            return {"filtering": 1, **_filtered(self.window, unit, rest)}
        direct = super().completed(unit, rest)
        return {"filtering": 0, **direct} if self.filterable else direct

    def candidates(self, unit: VectorUnit) -> Iterator[Schedule]:
        """Yields all schedules."""
        direct = super().candidates(unit)
        if self.filterable:
            yield from ({"filtering": 1, **schedule} for schedule in _filtered_candidates(self.window, unit))
            yield from ({"filtering": 0, **schedule} for schedule in direct)
        else:
            yield from direct

    def _problem(self) -> list[str]:
        window = self.window
        words = ["conv2d", _size(window.image), _size(window.weight)]
        words += [f"stride {_size(window.strides)}"] if window.strides != (1, 1) else []
        words += [f"padding {_size(window.padding)}"] if window.padding != (0, 0) else []
        words += [f"dilation {_size(window.dilation)}"] if window.dilation != (1, 1) else []
        return [*words, f"to {_size(window.result[2:])}"]


def _filtered(window: Window, unit: VectorUnit, schedule: Schedule) -> dict[str, int]:
    _only(schedule, ("filtering", *TILE, "lines", "splits", "groups"))
    default = winograd_plan.choose_blocking(unit, window)
    lines, _ = winograd_plan.grid(window)
    tile = _tile(unit, schedule, default.tile)
    panels = ceil_div(window.filters, tile.rows)
    height = _in_range(schedule, "lines", default.lines, lines)
    splits = _in_range(schedule, "splits", min(default.splits, panels), panels)
    usual = winograd_plan.choose_groups(window, tile, height, splits)
    groups = _in_range(schedule, "groups", usual, ceil_div(panels, splits))
    workspace_bytes = winograd_plan.Plan(window, winograd_plan.Blocking(tile, height, splits, groups)).workspace
    if workspace_bytes > _WORKSPACE_BYTES:
        raise ValueError(f"a task would need {workspace_bytes >> 20} MiB, over {_WORKSPACE_BYTES >> 20}")
    return {**_decisions(tile), "lines": height, "splits": splits, "groups": groups}


def _filtered_candidates(window: Window, unit: VectorUnit) -> Iterator[Schedule]:
    default = winograd_plan.choose_blocking(unit, window)
    lines, across = winograd_plan.grid(window)
    for tile in _tiles(unit, window.filters, lines * across):
        for height in sorted({default.lines, *_parts(lines)}):
            for splits in (1, 2, 4, 8):
                usual = winograd_plan.choose_groups(window, tile, height, splits)
                for groups in sorted({max(1, usual // 2), usual, usual * 2}):
                    yield {**_decisions(tile), "lines": height, "splits": splits, "groups": groups}


@dataclass(frozen=True)
class TransposedConvolution(ProductWorkload):
    """A transposed convolution whose kernel tiles the result.

    Attributes:
        image: Input shape.
        weight: Weight shape, [input channels, filters, height, width].
    """

    image: tuple[int, ...]
    weight: tuple[int, ...]

    @property
    def extents(self) -> Extents:
        """Returns the product that it is computed as."""
        batch, depth, height, width = self.image
        return Extents(batch, math.prod(self.weight[1:]), height * width, depth)

    @property
    def direct(self) -> tuple[Extents, Side]:
        """Returns the product of weights and pixels, which stream."""
        return self.extents, "right"

    def _problem(self) -> list[str]:
        return ["conv2d_transpose", _size(self.image), _size(self.weight)]


@dataclass(frozen=True)
class Attention(Workload):
    """Scaled dot-product attention.

    Attributes:
        batch, heads: Independent ones.
        queries, keys: Lengths; 0 for a number of keys that is not known.
        channels: Channels of queries and keys.
        width: Channels of values.
        bias: Dtype of the bias (fp32) or mask (bool), None if there is none.
        causal: Whether keys beyond a diagonal are masked.
        bias_shape: The bias as it is stored, [batch, head, query, key] with 1 where it is broadcast.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    channels: int
    width: int
    bias: str | None = None
    causal: bool = False
    bias_shape: tuple[int, ...] = field(default=(), compare=False)

    def _words(self) -> list[str]:
        words = ["attention", f"{self.batch}x{self.heads}", f"{self.queries}x{self.keys}x{self.channels}"]
        words += [f"to {self.width}"] if self.width != self.channels else []
        words += [f"bias {self.bias}"] if self.bias else []
        return [*words, *(["causal"] if self.causal else [])]

    @property
    def multiplications(self) -> int:
        """Returns the number of multiply-adds of both products."""
        return self.batch * self.heads * self.queries * self.keys * (self.channels + self.width)

    def few(self, unit: VectorUnit) -> bool:
        """Returns whether queries are so few that keys and values are better read as they lie than packed for them."""
        whole = self.channels % unit.lanes == 0 and self.width % unit.lanes == 0
        return whole and 2 * self.queries <= unit.lanes and self.keys >= _LEAST_KEYS

    @property
    def streams(self) -> bool:
        """Returns whether keys and values are packed a block at a time, and not copied whole by each task."""
        uneven = self.keys > _MOST_KEYS and key_blocks(self.keys) == 1
        return self.keys == 0 or uneven or 4 * self.keys * (self.channels + self.width) > _COPIED_BYTES

    def completed(self, unit: VectorUnit, schedule: Schedule) -> dict[str, int]:
        """Returns the complete schedule."""
        if self.few(unit):
            _only(schedule, ("parts",))
            most_parts = ceil_div(self.keys, _KEYS_OF_A_PART)
            return {
                "parts": _in_range(
                    schedule, "parts", min(most_parts, ceil_div(_TASKS, self.batch * self.heads)), most_parts
                )
            }
        parts_of_queries = () if self.streams else ("parts",)
        _only(schedule, (*TILE, *RESULT_TILE, *parts_of_queries))
        scores = _tile(unit, schedule, self._scores(unit, schedule.get("vectors")))
        output = _tile(unit, schedule, self._output(unit, scores.columns), RESULT_TILE)
        if scores.columns % output.rows:
            raise ValueError(f"{scores.columns} queries are no whole number of tiles of {output.rows}")
        tiles = _decisions(scores) | _decisions(output, RESULT_TILE)
        if self.streams:
            if self.dtype == BF16 and scores.rows % PAIR:
                raise ValueError(f"{scores.rows} keys are no whole number of pairs")
            return tiles
        blocks = ceil_div(self.queries, scores.columns)
        parts = _in_range(schedule, "parts", self._parts(blocks, scores, output), blocks)
        return {**tiles, "parts": ceil_div(blocks, ceil_div(blocks, parts))}

    def candidates(self, unit: VectorUnit) -> Iterator[Schedule]:
        """Yields all schedules."""
        if self.few(unit):
            yield from ({"parts": parts} for parts in _parts(ceil_div(self.keys, _KEYS_OF_A_PART)))
            return
        for scores in (self._scores(unit, None), *_tiles(unit, self.keys, self.queries)):
            columns = scores.columns
            for output in (self._output(unit, columns), *_tiles(unit, columns, self.width)):
                if columns % output.rows:
                    continue
                tiles = _decisions(scores) | _decisions(output, RESULT_TILE)
                if self.streams:
                    yield tiles
                    continue
                yield from ({**tiles, "parts": parts} for parts in _parts(ceil_div(self.queries, columns)))

    def parts_in_tiles(self, tile: Tile) -> int:
        """Returns the parts of the queries where whole panels are multiplied: keys, or channels, by queries."""
        blocks = ceil_div(self.queries, tile.columns)
        parts = self._parts(blocks, tile, Tile(tile.columns, tile.rows, tile.lanes))
        return ceil_div(blocks, ceil_div(blocks, parts))

    def _parts(self, blocks: int, scores: Tile, output: Tile) -> int:
        """Chooses the parts that the queries of a head are cut into, so that tasks divide well on many threads.

        A thread copies keys and values of a head once for all parts that it takes, so that a part only costs a pass
        over the keys, which its blocks of queries do not share. With more blocks than can share one pass, a part has at
        least half as many.
        """
        heads = self.batch * self.heads
        least_parts = min(blocks, ceil_div(_TASKS, heads))
        padded = ceil_div(self.width, output.columns) * output.columns
        group = query_group(self.keys, scores.columns, self.channels, padded)
        of_block = scores.columns * self.keys * (self.channels + self.width)

        smallest = max(ceil_div(blocking.LEAST_WORK, of_block), group // 2 if blocks > group else 1)

        def cost(parts: int) -> float:
            return sum(1 / blocking.efficiency(blocks, ceil_div(blocks, parts), heads, n) for n in blocking.THREADS)

        costs = {parts: cost(parts) for parts in range(least_parts, blocks + 1) if ceil_div(blocks, parts) >= smallest}
        return next((parts for parts in costs if costs[parts] <= _AS_GOOD * min(costs.values())), least_parts)

    def _scores(self, unit: VectorUnit, chosen: int | None) -> Tile:
        """Chooses the tile of scores, keys × queries: the least work for this many queries, padding included."""
        accumulators = _accumulators(unit)

        def work(vectors: int) -> float:
            columns = vectors * unit.lanes
            return ceil_div(self.queries, columns) * columns * loads(accumulators // vectors, vectors)

        vectors = min((3, 2, 1), key=work) if chosen is None else max(1, chosen)
        return Tile(max(1, min(12, accumulators // vectors)), vectors * unit.lanes, unit.lanes)

    def _output(self, unit: VectorUnit, columns: int) -> Tile:
        """Chooses the tile of the result, queries × channels, so that a block of queries has whole tiles."""
        accumulators = _accumulators(unit)

        def cost(shape: tuple[int, int]) -> float:
            rows, vectors = shape
            padded = ceil_div(self.width, vectors * unit.lanes) * vectors * unit.lanes
            return padded * loads(rows, vectors)

        heights = [rows for rows in range(1, 13) if columns % rows == 0]
        shapes = [(rows, vectors) for rows in heights for vectors in range(1, 9) if rows * vectors <= accumulators]
        if self.streams:
            # Sums, a row of values and a broadcast; with 32 registers LLVM needs one to spare.
            register_count = 31 if unit.registers == 32 else unit.registers
            shapes = [(rows, vectors) for rows, vectors in shapes if (rows + 1) * vectors + 1 <= register_count]
        rows, vectors = min(shapes, key=cost)
        return Tile(rows, vectors * unit.lanes, unit.lanes)


def _size(extents: Iterable[int]) -> str:
    """Returns a key's word for a shape."""
    return "x".join(str(extent) for extent in extents)


def _accumulators(unit: VectorUnit) -> int:
    return 24 if unit.registers > 16 else 12
