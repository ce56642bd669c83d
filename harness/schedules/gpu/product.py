"""Sums of products as a kernel: tiles in shared memory, a tile of registers per thread, sums in two levels.

    result[place(b, i, j)] = finish(Σ_k left(b, i, k) · right(b, k, j))

A block of threads computes one tile of the result, slab by slab: a few terms k of the rows and columns of its tile are
loaded to shared memory, transposed if need be, and each thread multiplies all pairs of its rows and columns. While it
does, it already loads its part of the next slab into registers. What no tile divides reads as zero and is not stored.

An operand's element is any expression: a convolution gathers its columns here, and the column matrix never exists.
Where elements lie side by side, four are loaded at once.

A register adds up a chunk of about √k terms; then it is added to a second sum in shared memory, where each thread has
its own. Where the terms are split over groups of threads, their sums are added up in a tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import s_tir, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from harness.schedules.cpu.emit import ceil_div, chunk_length
from harness.schedules.gpu.contraction import Contraction, Group, plain_load, recognised, strides, substituted
from harness.schedules.gpu.tile import Tile, choose_tile

_LANES = 4
"""Elements that are loaded or stored at once: 16 bytes of fp32, the most that a thread can."""

_MOST_BLOCKS = 65535
"""Along the second and third dimension of a grid (CUDA Programming Guide, technical specifications)."""


class Product:
    """The rule for sums of products; it leaves to others a single sum, and few terms of single rows.

    Args:
        tensor_cores: Whether it takes products too that DLight's rule computes with tensor cores.
    """

    def __init__(self, tensor_cores: bool = False) -> None:
        self._tensor_cores = tensor_cores

    def apply(self, function: tirx.PrimFunc, target: Any, _tunable: bool) -> s_tir.Schedule | None:
        """The kernel as a schedule that is done; None if the function is no such sum."""
        contraction = recognised(function)
        if contraction is None or _is_thin(contraction):
            return None
        if not self._tensor_cores and _fits_tensor_cores(contraction, target):
            return None
        tile = choose_tile(
            contraction.batch.size,
            contraction.rows.size,
            contraction.columns.size,
            int(target.attrs["max_shared_memory_per_block"]),
            int(target.attrs["max_threads_per_block"]),
        )
        if max(contraction.batch.size, ceil_div(contraction.rows.size, tile.height)) > _MOST_BLOCKS:
            return None
        return s_tir.Schedule(kernel(contraction, tile))


def _is_thin(contraction: Contraction) -> bool:
    shorter, longer = sorted((contraction.rows.size, contraction.columns.size))
    return longer == 1 or (shorter == 1 and contraction.batch.size > 1 and contraction.terms.size < 64)


def _fits_tensor_cores(contraction: Contraction, target: Any) -> bool:
    """Whether DLight's Matmul uses tensor cores: float16 on CUDA, more than 64 rows, columns and terms."""
    loads = [plain_load(operand) for operand in (contraction.left, contraction.right)]
    halves = all(load is not None and str(load.value.ty) == "float16" for load in loads)
    extents = (contraction.rows.size, contraction.columns.size, contraction.terms.size)
    return halves and str(target.kind.name) == "cuda" and min(extents) > 64


@dataclass(frozen=True)
class Side:
    """An operand's tile on its way to shared memory.

    Attributes:
        load: (batch, index along the tile, term, lane) → element; several lanes only if they are neighbours.
        along_terms: Whether neighbours in memory are neighbouring terms.
        lanes: Elements that are loaded at once.
        extent: Of the operand along the tile.
        span: Rows or columns of the tile.
        pitch: Distance of two terms in shared memory.
        dtype: Of an element.
    """

    load: Callable[[Any, Any, Any, Any], Any]
    along_terms: bool
    lanes: int
    extent: int
    span: int
    pitch: int
    dtype: str


def kernel(contraction: Contraction, tile: Tile) -> tirx.PrimFunc:
    """The sum of products as a function with its threads.

    Args:
        contraction: What is computed.
        tile: How it is shared among threads.
    """
    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_name("main")
            T.func_attr({"tirx.noalias": True})
            for parameter in contraction.parameters:
                T.arg(parameter.name, parameter)
            with T.sblock("root"):
                T.reads()
                T.writes()
                _body(contraction, tile)
        return builder.get()


def _body(contraction: Contraction, tile: Tile) -> None:
    batch, rows, columns, terms = contraction.batch, contraction.rows, contraction.columns, contraction.terms
    left = _side(contraction.left, batch, rows, terms, tile.height, tile.pitches[0])
    right = _side(contraction.right, batch, columns, terms, tile.width, tile.pitches[1])
    with (
        T.launch_thread("blockIdx.z", batch.size) as b,
        T.launch_thread("blockIdx.y", ceil_div(rows.size, tile.height)) as block_down,
        T.launch_thread("blockIdx.x", ceil_div(columns.size, tile.width)) as block_across,
        T.launch_thread("threadIdx.x", tile.threads) as thread,
        T.attr(tirx.const(0, "int32"), "pragma_unroll_explicit", 0),
    ):
        across, down, group = _digits(thread, tile.across, tile.down, tile.split)
        sums = T.alloc_buffer((tile.rows * tile.columns * tile.threads,), "float32", scope="shared")
        first = (block_down * tile.height, block_across * tile.width)
        total = _add_up(tile, terms.size, (left, right), (b, *first), (down, across, group), thread, sums)
        if tile.split > 1:
            _add_groups(tile, group, thread, total, sums)

        def store() -> None:
            _store(contraction, tile, b, first, (down, across), thread, sums)

        if tile.split == 1:
            store()
        else:
            with T.If(group < 1), T.Then():
                store()


def _add_up(
    tile: Tile,
    count: int,
    sides: tuple[Side, Side],
    first: tuple[Any, Any, Any],
    place: tuple[Any, Any, Any],
    thread: Any,
    sums: tirx.Buffer,
) -> tirx.Buffer:
    """Leaves each thread's sums in shared memory, [sum, thread], and returns the registers that hold them too."""
    counts = (tile.rows, tile.columns)
    tiles = [T.alloc_buffer((tile.slab * side.pitch,), "float32", scope="shared") for side in sides]
    loaded = [
        T.alloc_buffer(
            (ceil_div(tile.slab * side.span // side.lanes, tile.threads) * side.lanes,), side.dtype, scope="local"
        )
        for side in sides
    ]
    factors = [T.alloc_buffer((n,), "float32", scope="local") for n in counts]
    partial = T.alloc_buffer((tile.rows * tile.columns,), "float32", scope="local")

    def fetch(start: Any) -> None:
        for side, at, registers in zip(sides, first[1:], loaded, strict=True):
            _fetch(side, tile, first[0], at, start, count, thread, registers)

    def each(body: Callable[[Any], None]) -> None:
        with T.unroll(tile.rows * tile.columns) as n:
            body(n)

    def multiply() -> None:
        with T.unroll(tile.depth) as k:
            term = place[2] * tile.depth + k
            for values, shared, side, own, n, threads in zip(
                factors, tiles, sides, place[:2], counts, (tile.down, tile.across), strict=True
            ):
                lanes = min(n, _LANES)
                with T.unroll(n // lanes) as part, T.vectorized(lanes) as lane:
                    T.buffer_store(
                        values,
                        shared[term * side.pitch + (part * threads + own) * lanes + lane],
                        [part * lanes + lane],
                    )
            with T.unroll(tile.rows) as i, T.unroll(tile.columns) as j:
                at = i * tile.columns + j
                T.buffer_store(partial, partial[at] + factors[0][i] * factors[1][j], [at])

    slabs = ceil_div(count, tile.slab)
    chunks = ceil_div(slabs * tile.depth, chunk_length(slabs * tile.depth))
    slabs_of_chunk = ceil_div(slabs, chunks)
    zero = tirx.const(0.0, "float32")
    each(lambda n: T.buffer_store(sums, zero, [n * tile.threads + thread]))
    fetch(tirx.const(0, "int32"))
    with T.serial(ceil_div(slabs, slabs_of_chunk)) as chunk:
        each(lambda n: T.buffer_store(partial, zero, [n]))
        with T.serial(slabs_of_chunk) as slab:
            _barrier()
            for side, registers, shared in zip(sides, loaded, tiles, strict=True):
                _put(side, tile, thread, registers, shared)
            _barrier()
            fetch((chunk * slabs_of_chunk + slab + 1) * tile.slab)
            multiply()
        # Two loops: in one, TVM would not see that each thread has sums of its own, and put a barrier before each.
        each(lambda n: T.buffer_store(partial, partial[n] + sums[n * tile.threads + thread], [n]))
        each(lambda n: T.buffer_store(sums, partial[n], [n * tile.threads + thread]))
    return partial


def _side(operand: Any, batch: Group, along: Group, terms: Group, span: int, pitch: int) -> Side:
    plain = plain_load(operand)
    places = strides(plain, (batch, along, terms)) if plain is not None else None
    if plain is None or places is None:

        def compute(b: Any, at: Any, term: Any, _lane: Any) -> Any:
            return substituted(operand, {**batch.values(b), **along.values(at), **terms.values(term)})

        return Side(compute, False, 1, along.size, span, pitch, str(operand.ty))
    flat = T.decl_buffer((_size(plain.tensor),), str(plain.value.ty), data=plain.tensor.data)

    def load(b: Any, at: Any, term: Any, lane: Any) -> Any:
        return flat[places.offset((b, at, term)) + lane]

    lanes, along_terms = 1, places.runs_along(2)
    if places.runs_along(2, _LANES):
        lanes = _LANES
    elif places.runs_along(1, _LANES) and span % _LANES == 0:
        lanes, along_terms = _LANES, False
    return Side(load, along_terms, lanes, along.size, span, pitch, str(plain.value.ty))


def _size(tensor: Any) -> int:
    size = 1
    for extent in tensor.ty.shape:
        size *= int(extent)
    return size


def _units(side: Side, tile: Tile, thread: Any, body: Callable[[Any, Any, Any], None]) -> None:
    """Emits body(place in registers, index in the tile, term in the slab) for what a thread loads of a slab."""
    terms = tile.slab // (side.lanes if side.along_terms else 1)
    span = side.span // (1 if side.along_terms else side.lanes)
    count = terms * span
    with T.unroll(ceil_div(count, tile.threads)) as turn:
        unit = turn * tile.threads + thread
        # Neighbouring threads take neighbours in memory.
        term, at = (unit % terms, unit // terms) if side.along_terms else (unit // span, unit % span)
        if side.along_terms:
            term = term * side.lanes
        else:
            at = at * side.lanes
        if count % tile.threads == 0:
            body(turn * side.lanes, at, term)
        else:
            with T.If(unit < count), T.Then():
                body(turn * side.lanes, at, term)


def _fetch(side: Side, tile: Tile, b: Any, first: Any, start: Any, count: int, thread: Any, registers: Any) -> None:
    """Loads a thread's part of a slab into registers, zeros for what lies outside of the operand."""

    def unit(register: Any, at: Any, term: Any) -> None:
        index, k = first + at, start + term
        with T.If(tirx.all(index < side.extent, k < count)):
            with T.Then():
                _vector(
                    side.lanes,
                    lambda lane: T.buffer_store(registers, side.load(b, index, k, lane), [register + lane]),
                )
            with T.Else():
                zero = tirx.const(0.0, side.dtype)
                _vector(side.lanes, lambda lane: T.buffer_store(registers, zero, [register + lane]))

    _units(side, tile, thread, unit)


def _put(side: Side, tile: Tile, thread: Any, registers: Any, shared: Any) -> None:
    """Stores a thread's part of a slab to shared memory, [term, index in the tile]."""

    def unit(register: Any, at: Any, term: Any) -> None:
        if side.along_terms:
            with T.unroll(side.lanes) as lane:
                T.buffer_store(shared, _fp32(registers[register + lane]), [(term + lane) * side.pitch + at])
        elif side.dtype == "float32" and side.pitch % side.lanes == 0:
            _vector(
                side.lanes,
                lambda lane: T.buffer_store(shared, registers[register + lane], [term * side.pitch + at + lane]),
            )
        else:
            with T.unroll(side.lanes) as lane:
                T.buffer_store(shared, _fp32(registers[register + lane]), [term * side.pitch + at + lane])

    _units(side, tile, thread, unit)


def _add_groups(tile: Tile, group: Any, thread: Any, total: tirx.Buffer, sums: tirx.Buffer) -> None:
    """Adds the sums of the groups of threads to those of the first, in a tree."""
    half = tile.split // 2
    while half:
        other = thread + half * tile.down * tile.across
        _barrier()
        with T.If(group < half), T.Then(), T.unroll(tile.rows * tile.columns) as n:
            T.buffer_store(total, total[n] + sums[n * tile.threads + other], [n])
        _barrier()
        with T.If(group < half), T.Then(), T.unroll(tile.rows * tile.columns) as n:
            T.buffer_store(sums, total[n], [n * tile.threads + thread])
        half //= 2


def _store(
    contraction: Contraction,
    tile: Tile,
    b: Any,
    first: tuple[Any, Any],
    place: tuple[Any, Any],
    thread: Any,
    sums: tirx.Buffer,
) -> None:
    """Computes what follows a thread's sums, and stores it."""
    result, batch, rows, columns = contraction.result, contraction.batch, contraction.rows, contraction.columns
    lanes = (min(tile.rows, _LANES), min(tile.columns, _LANES))
    dtype = str(result.value.ty)
    places = strides(result, (batch, rows, columns))
    flat = T.decl_buffer((_size(result.tensor),), dtype, data=result.tensor.data)
    together = lanes[1] == _LANES and dtype == "float32" and places is not None and places.runs_along(2, _LANES)
    finished = T.alloc_buffer((lanes[1],), dtype, scope="local")

    def value(i: Any, j: Any, total: Any) -> Any:
        values = {**batch.values(b), **rows.values(i), **columns.values(j)}
        kind = str(contraction.total.ty)
        return substituted(
            result.value, {**values, contraction.total: total if kind == "float32" else tirx.Cast(kind, total)}
        )

    def put(i: Any, j: Any, stored: Any) -> None:
        if places is not None:
            T.buffer_store(flat, stored, [places.offset((b, i, j))])
        else:
            values = {**batch.values(b), **rows.values(i), **columns.values(j)}
            T.buffer_store(result.tensor, stored, [substituted(at, values) for at in result.index])

    with T.serial(tile.rows) as row, T.serial(tile.columns // lanes[1]) as part:
        i = first[0] + (row // lanes[0] * tile.down + place[0]) * lanes[0] + row % lanes[0]
        j = first[1] + (part * tile.across + place[1]) * lanes[1]
        own = (row * tile.columns + part * lanes[1]) * tile.threads + thread
        with T.If(tirx.all(i < rows.size, j < columns.size)), T.Then():
            if together and places is not None:
                with T.unroll(_LANES) as lane:
                    T.buffer_store(finished, value(i, j + lane, sums[own + lane * tile.threads]), [lane])
                with T.vectorized(_LANES) as lane:
                    T.buffer_store(flat, finished[lane], [places.offset((b, i, j)) + lane])
            else:
                with T.unroll(lanes[1]) as lane, T.If(j + lane < columns.size), T.Then():
                    put(i, j + lane, value(i, j + lane, sums[own + lane * tile.threads]))


def _digits(thread: Any, across: int, down: int, split: int) -> tuple[Any, Any, Any]:
    """A thread's place along columns, rows and groups."""
    zero = tirx.const(0, "int32")
    return (
        thread % across if across > 1 else zero,
        thread // across % down if down > 1 else zero,
        thread // (across * down) if split > 1 else zero,
    )


def _vector(lanes: int, body: Callable[[Any], None]) -> None:
    if lanes == 1:
        body(tirx.const(0, "int32"))
    else:
        with T.vectorized(lanes) as lane:
            body(lane)


def _fp32(value: Any) -> Any:
    return value if str(value.ty) == "float32" else tirx.Cast("float32", value)


def _barrier() -> None:
    T.evaluate(T.tvm_storage_sync("shared"))
