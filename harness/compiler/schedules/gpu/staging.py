"""Stages operands of sums of products to shared memory, and results to memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import tvm

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import ceil_div, where
from harness.compiler.schedules.gpu.capabilities import VECTORS_OF_FOUR, has
from harness.compiler.schedules.gpu.contraction import Contraction, Group, plain_load, stored, strides, substituted
from harness.compiler.schedules.gpu.threads import FLOATS, converted

_BYTES = 16
"""Largest number of bytes that a thread loads or stores at once."""


@dataclass(frozen=True)
class Operand:
    """One of the two operands of a sum of products.

    Attributes:
        load: Takes batch, row or column, term and lane, and returns the element; several lanes only if they are
            neighbours.
        extent: Its rows or columns.
        count: Its terms.
        dtype: Element type in memory.
        along_terms: Whether neighbours in memory are neighbouring terms.
        runs: Possible numbers of elements in a load, from the largest to 1.
    """

    load: Callable[[T.Index, T.Index, T.Index, T.Index], T.Expr]
    extent: int
    count: int
    dtype: str
    along_terms: bool
    runs: tuple[int, ...]


def operand(element: T.Expr, batch: Group, axis: Group, terms: Group) -> Operand:
    """Returns the operand of an element, given as an expression of loop variables.

    Args:
        element: The expression.
        batch: Loop variables of the batch.
        axis: Loop variables of rows or columns.
        terms: Loop variables of the terms.
    """
    element = stored(element)
    plain = plain_load(element)
    places = strides(plain, (batch, axis, terms)) if plain is not None else None
    if plain is None or places is None:

        def compute(b: T.Index, position: T.Index, term: T.Index, _lane: T.Index) -> T.Expr:
            return substituted(element, {**batch.values(b), **axis.values(position), **terms.values(term)})

        return Operand(compute, axis.size, terms.size, str(element.ty), False, (1,))
    dtype = str(plain.value.ty)
    flat = T.decl_buffer((_size(plain.tensor),), dtype, data=plain.tensor.data)

    def load(b: T.Index, position: T.Index, term: T.Index, lane: T.Index) -> T.Expr:
        return flat[places.offset((b, position, term)) + lane]

    most_lanes = 4 if has(tvm.target.Target.current(allow_none=True), VECTORS_OF_FOUR) else 8
    lanes = [
        n for n in (8, 4) if n <= most_lanes and n * (4 if dtype == "float32" else 2) <= _BYTES and dtype in FLOATS
    ]
    along_terms = places.runs_along(2)
    runs = tuple(n for n in lanes if places.runs_along(2 if along_terms else 1, n))
    return Operand(load, axis.size, terms.size, dtype, along_terms, (*runs, 1))


@dataclass(frozen=True)
class Stage:
    """A slab of an operand's tile: some terms of some rows or columns, in shared memory.

    Attributes:
        operand: The operand that is loaded.
        span: Rows or columns of the tile.
        slab: Terms.
        threads: Threads that load it.
        by_term: Whether its layout in shared memory is [term, row or column], not the other way around.
        pitch: Distance of neighbours of the first dimension in shared memory.
        dtype: Element type in shared memory.
    """

    operand: Operand
    span: int
    slab: int
    threads: int
    by_term: bool
    pitch: int
    dtype: str

    @property
    def lanes(self) -> int:
        """Returns the number of elements that a thread loads at once."""
        across = self.slab if self.operand.along_terms else self.span
        return next(n for n in self.operand.runs if across % n == 0)

    @property
    def size(self) -> int:
        """Returns the number of elements in shared memory."""
        return (self.slab if self.by_term else self.span) * self.pitch

    @property
    def registers(self) -> int:
        """Returns the number of elements that a thread loads."""
        return ceil_div(self.slab * self.span // self.lanes, self.threads) * self.lanes

    def place(self, position: T.Index, term: T.Index) -> T.Index:
        """Returns the offset of an element in shared memory.

        Args:
            position: Row or column in the tile.
            term: Term in the slab.
        """
        return term * self.pitch + position if self.by_term else position * self.pitch + term

    def fetch(self, b: T.Index, first: T.Index, start: T.Index, thread: T.Index, registers: T.Buffer) -> None:
        """Emits the load of a thread's part of the slab into registers, with zeros outside of the operand.

        Args:
            b: Index of the batch.
            first: First row or column of the tile.
            start: First term of the slab.
            thread: Index of the thread.
            registers: For `self.registers` elements.
        """

        def unit(register: T.Index, position: T.Index, term: T.Index) -> None:
            index, k = first + position, start + term
            with T.If(T.all(index < self.operand.extent, k < self.operand.count)):
                with T.Then():
                    each_lane(
                        self.lanes,
                        lambda lane: T.buffer_store(registers, self.operand.load(b, index, k, lane), [register + lane]),
                    )
                with T.Else():
                    zero = T.const(0.0, self.operand.dtype)
                    each_lane(self.lanes, lambda lane: T.buffer_store(registers, zero, [register + lane]))

        self._units(thread, unit)

    def put(self, thread: T.Index, registers: T.Buffer, shared: T.Buffer) -> None:
        """Emits the store of a thread's part of the slab to shared memory."""
        as_it_is = self.by_term != self.operand.along_terms and self.dtype == self.operand.dtype
        as_vectors = as_it_is and self.pitch % self.lanes == 0

        def unit(register: T.Index, position: T.Index, term: T.Index) -> None:
            def store_lane(lane: T.Index) -> None:
                i, k = (position, term + lane) if self.operand.along_terms else (position + lane, term)
                value = registers[register + lane]
                T.buffer_store(shared, converted(value, self.dtype), [self.place(i, k)])

            if as_vectors:
                each_lane(self.lanes, store_lane)
            else:
                with T.unroll(self.lanes) as lane:
                    store_lane(lane)

        self._units(thread, unit)

    def _units(self, thread: T.Index, body: Callable[[T.Index, T.Index, T.Index], None]) -> None:
        """Emits body(place in registers, index in the tile, term in the slab) for each load of a thread from a slab."""
        along_terms, lanes = self.operand.along_terms, self.lanes
        terms, span = (self.slab // lanes, self.span) if along_terms else (self.slab, self.span // lanes)
        count = terms * span
        with T.unroll(ceil_div(count, self.threads)) as turn:
            unit = turn * self.threads + thread
            # Neighbouring threads take neighbours in memory.
            if along_terms:
                position, term = unit // terms, unit % terms * lanes
            else:
                position, term = unit % span * lanes, unit // span
            with where(*([unit < count] if count % self.threads else [])):
                body(turn * lanes, position, term)


class Result:
    """The epilogue of a sum, and the place of the result."""

    def __init__(self, contraction: Contraction) -> None:
        self._contraction = contraction
        element = contraction.result
        self._places = strides(element, (contraction.batch, contraction.rows, contraction.columns))
        self._dtype = str(element.value.ty)
        self._flat = T.decl_buffer((_size(element.tensor),), self._dtype, data=element.tensor.data)

    def registers(self, lanes: int) -> T.Buffer:
        """Returns registers for `store`."""
        return T.alloc_buffer((lanes,), self._dtype, scope="local")

    def store(
        self, b: T.Index, i: T.Index, j: T.Index, lanes: int, total: Callable[[T.Index], T.Expr], registers: T.Buffer
    ) -> None:
        """Emits the epilogue of neighbouring columns, and stores those within the result.

        Args:
            b: Index of the batch.
            i: Row.
            j: First column.
            lanes: Number of columns.
            total: Takes a lane and returns its sum, fp32.
            registers: From `registers`.
        """
        rows, columns, places = self._contraction.rows, self._contraction.columns, self._places
        as_vectors = lanes > 1 and self._dtype in FLOATS and places is not None and places.runs_along(2, lanes)
        with T.If(T.all(i < rows.size, j < columns.size)), T.Then():
            if as_vectors and places is not None:
                with T.unroll(lanes) as lane:
                    T.buffer_store(registers, self._value(b, i, j + lane, total(lane)), [lane])
                with T.vectorized(lanes) as lane:
                    T.buffer_store(self._flat, registers[lane], [places.offset((b, i, j)) + lane])
            else:
                with T.unroll(lanes) as lane, T.If(j + lane < columns.size), T.Then():
                    self._put(b, i, j + lane, self._value(b, i, j + lane, total(lane)))

    def _value(self, b: T.Index, i: T.Index, j: T.Index, total: T.Expr) -> T.Expr:
        contraction = self._contraction
        kind = str(contraction.total.ty)
        values = {
            **contraction.batch.values(b),
            **contraction.rows.values(i),
            **contraction.columns.values(j),
            contraction.total: converted(total, kind),
        }
        return substituted(contraction.result.value, values)

    def _put(self, b: T.Index, i: T.Index, j: T.Index, value: T.Expr) -> None:
        contraction = self._contraction
        if self._places is not None:
            T.buffer_store(self._flat, value, [self._places.offset((b, i, j))])
        else:
            values = {**contraction.batch.values(b), **contraction.rows.values(i), **contraction.columns.values(j)}
            T.buffer_store(
                contraction.result.tensor, value, [substituted(offset, values) for offset in contraction.result.index]
            )


@contextmanager
def launch_tiles(
    contraction: Contraction, height: int, width: int, threads: int
) -> Iterator[tuple[T.Expr, tuple[T.Expr, T.Expr], T.Expr]]:
    """Emits a kernel whose blocks compute tiles of the result.

    Yields:
        The product of the batch; first row and first column of the block's tile; the thread's index in the block.
    """
    batch, rows, columns = contraction.batch.size, contraction.rows.size, contraction.columns.size
    with (
        T.launch_thread("blockIdx.z", batch) as b,
        T.launch_thread("blockIdx.y", ceil_div(rows, height)) as down,
        T.launch_thread("blockIdx.x", ceil_div(columns, width)) as across,
        T.launch_thread("threadIdx.x", threads) as thread,
        T.attr(T.const(0, "int32"), "pragma_unroll_explicit", 0),
    ):
        yield b, (down * height, across * width), thread


def each_lane(lanes: int, body: Callable[[T.Index], None]) -> None:
    """Emits body(lane) for all lanes as a vector."""
    if lanes == 1:
        body(T.const(0, "int32"))
    else:
        with T.vectorized(lanes) as lane:
            body(lane)


def _size(tensor: T.Buffer) -> int:
    return math.prod(int(extent) for extent in tensor.ty.shape)
