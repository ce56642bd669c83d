"""Builds sums of products as kernels: tiles in shared memory, a register tile per thread, sums in two levels.

    result[place(b, i, j)] = finish(Σ_k left(b, i, k) · right(b, k, j))

A block of threads computes one tile of the result, slab by slab: a few terms k of the rows and columns of its tile are
loaded to shared memory, transposed if need be, and each thread multiplies all pairs of its rows and columns. Meanwhile
it loads its part of the next slab into registers. Beyond the edges, a tile reads zeros and is not stored.

An operand's element is any expression: a convolution gathers its columns here, and the column matrix never exists. Four
neighbouring elements are loaded at once.

A register adds up a chunk of about √k terms; then it is added to a second sum in shared memory, where each thread has
its own. If the terms are split over groups of threads (split-K), their sums are added up in a tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tvm
from tvm import s_tir

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import bytes_of_all, ceil_div, chunk_length, where
from harness.compiler.schedules.common.kernel_info import PRODUCT, KernelInfo, Kind
from harness.compiler.schedules.gpu import tensor_cores
from harness.compiler.schedules.gpu.contraction import Contraction, recognized
from harness.compiler.schedules.gpu.staging import Result, Stage, launch_tiles, operand
from harness.compiler.schedules.gpu.threads import barrier
from harness.compiler.schedules.gpu.tile import Tile, choose_tile

_LANES = 4
"""Number of fp32 numbers that a thread loads or stores at once: 16 bytes."""

_MOST_BLOCKS = 65535
"""Largest number of blocks along the second and third dimension of a grid (CUDA Programming Guide, specifications)."""


class Product:
    """The schedule rule for sums of products, except single sums, and few terms of single rows."""

    def apply(self, function: T.PrimFunc, target: tvm.target.Target, _tunable: bool) -> s_tir.Schedule | None:
        """Returns the kernel as a complete schedule; None if the function is no such sum."""
        contraction = recognized(function)
        if contraction is None or _is_thin(contraction):
            return None
        extents = (contraction.batch.size, contraction.rows.size, contraction.columns.size)
        limits = (int(target.attrs["max_shared_memory_per_block"]), int(target.attrs["max_threads_per_block"]))
        halves = tensor_cores.fits(contraction, target)
        tile = tensor_cores.choose_warp_tile(*extents) if halves else choose_tile(*extents, *limits)
        if max(extents[0], ceil_div(extents[1], tile.height)) > _MOST_BLOCKS:
            return None
        return s_tir.Schedule(kernel(contraction, tile))


def _is_thin(contraction: Contraction) -> bool:
    shorter, longer = sorted((contraction.rows.size, contraction.columns.size))
    return longer == 1 or (shorter == 1 and contraction.batch.size > 1 and contraction.terms.size < 64)


def kernel(contraction: Contraction, tile: Tile | tensor_cores.WarpTile) -> T.PrimFunc:
    """Builds the sum of products as a function with its threads.

    Args:
        contraction: The sum of products.
        tile: The tile of a block of threads.
    """
    with T.IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_name("main")
            T.func_attr({"tirx.noalias": True, **_info(contraction, tile).attributes})
            for parameter in contraction.parameters:
                T.arg(parameter.name, parameter)
            with T.sblock("root"):
                T.reads()
                T.writes()
                if isinstance(tile, tensor_cores.WarpTile):
                    tensor_cores.emit(contraction, tile)
                else:
                    _body(contraction, tile)
        return builder.get()


def _info(contraction: Contraction, tile: Tile | tensor_cores.WarpTile) -> KernelInfo:
    groups = {"batch": "batch", "rows": "rows", "depth": "terms", "columns": "columns"}
    extents = {name: getattr(contraction, group).size for name, group in groups.items()}
    halves = isinstance(tile, tensor_cores.WarpTile)
    shape = {"rows": tile.height, "columns": tile.width, "depth": tile.slab, "threads": tile.threads}
    return KernelInfo(
        Kind.KERNEL,
        algorithm=PRODUCT,
        extents=extents,
        dtype=str(contraction.result.tensor.ty.dtype),
        tile=shape,
        decisions={"multiplied on": "tensor cores" if halves else "cores"},
        flop=2 * math.prod(extents.values()),
        bytes_moved=bytes_of_all((p.ty.shape, p.ty.dtype) for p in contraction.parameters),
    )


def _body(contraction: Contraction, tile: Tile) -> None:
    batch, rows, columns, terms = contraction.batch, contraction.rows, contraction.columns, contraction.terms
    spans = zip((tile.height, tile.width), tile.pitches, strict=True)
    left, right = (
        Stage(side, span, tile.slab, tile.threads, by_term=True, pitch=pitch, dtype="float32")
        for side, (span, pitch) in zip(
            (operand(contraction.left, batch, rows, terms), operand(contraction.right, batch, columns, terms)),
            spans,
            strict=True,
        )
    )
    with launch_tiles(contraction, tile.height, tile.width, tile.threads) as (b, first, thread):
        across, down, group = _digits(thread, tile.across, tile.down, tile.split)
        sums = T.alloc_buffer((tile.rows * tile.columns * tile.threads,), "float32", scope="shared")
        total = _add_up(tile, terms.size, (left, right), (b, *first), (down, across, group), thread, sums)
        if tile.split > 1:
            _add_groups(tile, group, thread, total, sums)
        with where(*([group < 1] if tile.split > 1 else [])):
            _store(Result(contraction), tile, b, first, (down, across), thread, sums)


def _add_up(
    tile: Tile,
    count: int,
    stages: tuple[Stage, Stage],
    first: tuple[T.Index, T.Index, T.Index],
    place: tuple[T.Index, T.Index, T.Index],
    thread: T.Index,
    sums: T.Buffer,
) -> T.Buffer:
    """Emits each thread's sums to shared memory, [sum, thread], and returns the registers with the same sums."""
    counts = (tile.rows, tile.columns)
    tiles = [T.alloc_buffer((stage.size,), "float32", scope="shared") for stage in stages]
    loaded = [T.alloc_buffer((stage.registers,), stage.operand.dtype, scope="local") for stage in stages]
    factors = [T.alloc_buffer((n,), "float32", scope="local") for n in counts]
    partial = T.alloc_buffer((tile.rows * tile.columns,), "float32", scope="local")

    def fetch(start: T.Index) -> None:
        for stage, begin, registers in zip(stages, first[1:], loaded, strict=True):
            stage.fetch(first[0], begin, start, thread, registers)

    def emit_all(body: Callable[[T.Index], None]) -> None:
        with T.unroll(tile.rows * tile.columns) as n:
            body(n)

    def multiply() -> None:
        with T.unroll(tile.depth) as k:
            term = place[2] * tile.depth + k
            for values, shared, stage, position, n, threads in zip(
                factors, tiles, stages, place[:2], counts, (tile.down, tile.across), strict=True
            ):
                lanes = min(n, _LANES)
                with T.unroll(n // lanes) as part, T.vectorized(lanes) as lane:
                    T.buffer_store(
                        values,
                        shared[term * stage.pitch + (part * threads + position) * lanes + lane],
                        [part * lanes + lane],
                    )
            with T.unroll(tile.rows) as i, T.unroll(tile.columns) as j:
                index = i * tile.columns + j
                T.buffer_store(partial, partial[index] + factors[0][i] * factors[1][j], [index])

    slabs = ceil_div(count, tile.slab)
    chunks = ceil_div(slabs * tile.depth, chunk_length(slabs * tile.depth))
    slabs_of_chunk = ceil_div(slabs, chunks)
    zero = T.const(0.0, "float32")
    emit_all(lambda n: T.buffer_store(sums, zero, [n * tile.threads + thread]))
    fetch(T.const(0, "int32"))
    with T.serial(ceil_div(slabs, slabs_of_chunk)) as chunk:
        emit_all(lambda n: T.buffer_store(partial, zero, [n]))
        with T.serial(slabs_of_chunk) as slab:
            barrier()
            for stage, registers, shared in zip(stages, loaded, tiles, strict=True):
                stage.put(thread, registers, shared)
            barrier()
            fetch((chunk * slabs_of_chunk + slab + 1) * tile.slab)
            multiply()
        # Two loops: in one, TVM would not see that each thread has sums of its own, and put a barrier before each.
        emit_all(lambda n: T.buffer_store(partial, partial[n] + sums[n * tile.threads + thread], [n]))
        emit_all(lambda n: T.buffer_store(sums, partial[n], [n * tile.threads + thread]))
    return partial


def _add_groups(tile: Tile, group: T.Index, thread: T.Index, total: T.Buffer, sums: T.Buffer) -> None:
    """Adds the sums of the groups of threads to those of the first, in a tree."""
    half = tile.split // 2
    while half:
        neighbour = thread + half * tile.down * tile.across
        barrier()
        with T.If(group < half), T.Then(), T.unroll(tile.rows * tile.columns) as n:
            T.buffer_store(total, total[n] + sums[n * tile.threads + neighbour], [n])
        barrier()
        with T.If(group < half), T.Then(), T.unroll(tile.rows * tile.columns) as n:
            T.buffer_store(sums, total[n], [n * tile.threads + thread])
        half //= 2


def _store(
    result: Result,
    tile: Tile,
    b: T.Index,
    first: tuple[T.Index, T.Index],
    place: tuple[T.Index, T.Index],
    thread: T.Index,
    sums: T.Buffer,
) -> None:
    """Applies the epilogue to a thread's sums, and stores the results."""
    down, across = min(tile.rows, _LANES), min(tile.columns, _LANES)
    registers = result.registers(across)
    with T.serial(tile.rows) as row, T.serial(tile.columns // across) as part:
        first_sum = (row * tile.columns + part * across) * tile.threads + thread
        result.store(
            b,
            first[0] + (row // down * tile.down + place[0]) * down + row % down,
            first[1] + (part * tile.across + place[1]) * across,
            across,
            lambda lane: sums[first_sum + lane * tile.threads],
            registers,
        )


def _digits(thread: T.Index, across: int, down: int, split: int) -> tuple[T.Index, T.Index, T.Index]:
    """Returns a thread's place along columns, rows and groups."""
    zero = T.const(0, "int32")
    return (
        thread % across if across > 1 else zero,
        thread // across % down if down > 1 else zero,
        thread // (across * down) if split > 1 else zero,
    )
