"""Loads neighbouring channels of a folded operand in a thread, 16 bytes at once if they are neighbours in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import ir, sym

from harness.compiler import tir as T
from harness.compiler.schedules.common.folding import Folded, Index, Recorder, ravel
from harness.compiler.schedules.common.kernel import ceil_div, view
from harness.compiler.schedules.gpu.threads import local

LANES = 4
"""Number of channels that are loaded together."""
_VECTOR_BYTES = 16
"""Bytes of the longest load of a thread."""


@dataclass(frozen=True)
class QueryBlock:
    """The queries that a block of threads works on: batch, head, first query."""

    batch: T.Index
    head: T.Index
    first: T.Index


@dataclass(frozen=True)
class BoundOperand:
    """A folded operand with the buffers that it reads.

    Attributes:
        folded: The operand, [batch, position, head, channel].
        buffers: The buffers that it reads.
    """

    folded: Folded
    buffers: Sequence[T.Buffer]

    def load(
        self,
        block: QueryBlock,
        position: T.Index,
        vector: T.Index,
        *,
        limit: T.Index | None,
        padded: bool,
        lanes: int = LANES,
    ) -> list[T.Expr]:
        """Emits the loads of a few channels of a position; returns them, in the operand's type, zero beyond the edges.

        Args:
            block: The block's batch and head, variables.
            position: Position of the query, key or value, a variable.
            vector: Number of the vector, a variable; the channels begin at lanes · vector.
            limit: End of the positions, a number or a variable; None if no position is beyond it.
            padded: Whether there are vectors beyond the last channel.
            lanes: Number of channels, a power of two.
        """
        batch, length, heads, channels = self.folded.shape
        analyzer = sym.Analyzer()
        for variable, extent in (
            (block.batch, batch),
            (block.head, heads),
            (position, length),
            (vector, ceil_div(channels, lanes)),
        ):
            if isinstance(extent, int):
                analyzer.bind(variable, ir.Range(0, extent))  # where anything is read
        conditions: list[T.Operand] = [] if limit is None else [position < limit]
        places = [[block.batch, position, block.head, lanes * vector + v] for v in range(lanes)]
        if channels % lanes:
            return [self._alone(index, analyzer, [*conditions, index[3] < channels]) for index in places]
        if padded:
            conditions.append(vector < channels // lanes)
        read: list[list[T.Expr]] = [[] for _ in self.buffers]

        def recorder(buffer: T.Buffer, of_buffer: list[T.Expr]) -> Recorder:
            def note(index: tuple[T.Index, ...]) -> None:
                of_buffer.append(analyzer.simplify(T.convert(ravel(index, _extents(buffer)))))

            return Recorder(note, str(buffer.dtype))

        recorders = [recorder(*pair) for pair in zip(self.buffers, read, strict=True)]
        for index in places:
            self.folded.element(self.folded.reader(recorders, analyzer), index)
        loaded = [
            _Loaded(iter(_registers(buffer, of_buffer, analyzer, conditions)))
            for buffer, of_buffer in zip(self.buffers, read, strict=True)
        ]
        return [self.folded.element(self.folded.reader(loaded, analyzer), index) for index in places]

    def _alone(self, index: Index, analyzer: sym.Analyzer, conditions: Sequence[T.Operand]) -> T.Expr:
        value = self.folded.element(self.folded.reader(self.buffers, analyzer), index)
        return T.if_then_else(T.all(*conditions), value, T.const(0.0, str(value.ty)))


def _registers(
    buffer: T.Buffer, places: Sequence[T.Expr], analyzer: sym.Analyzer, conditions: Sequence[T.Operand]
) -> list[T.Expr]:
    """Emits the load of each element of a buffer, neighbours as one vector; returns the registers in order."""
    loads: dict[int, T.Expr] = {}
    numbers = list(range(len(places)))
    longest = _VECTOR_BYTES * 8 // tvm.DataType(buffer.dtype).bits
    while numbers:
        distances = {i: _number(analyzer.simplify(places[i] - places[numbers[0]])) for i in numbers}
        known = {i: d for i, d in distances.items() if d is not None}
        shortest = min(known.values())
        near = {i: d for i, d in known.items() if d < shortest + longest}
        count = max(near.values()) - shortest + 1
        if count & (count - 1) or len(set(near.values())) != count:
            near, count = {i: d for i, d in near.items() if d == shortest}, 1
        first = analyzer.simplify(places[numbers[0]] + shortest)
        registers = _load(view(buffer, math.prod(_extents(buffer))), first, count, conditions)
        for i, distance in near.items():
            loads[i] = registers[distance - shortest]
        numbers = [i for i in numbers if i not in near]
    return [loads[i] for i in range(len(places))]


@dataclass(frozen=True)
class _Loaded:
    """Stands in for a buffer: returns loaded values, in the order of the recorded reads."""

    values: Iterator[T.Expr]

    def __getitem__(self, _index: tuple[T.Index, ...]) -> T.Expr:
        return next(self.values)


def _extents(buffer: T.Buffer) -> tuple[Any, ...]:
    return tuple(int(extent) if isinstance(extent, T.IntImm) else extent for extent in buffer.shape)


def _number(value: T.Expr) -> int | None:
    return int(value) if isinstance(value, T.IntImm) else None


def _load(line: T.Buffer, first: T.Index, count: int, conditions: Sequence[T.Operand]) -> T.Buffer:
    dtype = str(line.dtype)
    registers = local(count, dtype)

    def element(place: T.Index) -> T.Expr:
        zero = T.const(0.0, dtype)
        return T.if_then_else(T.all(*conditions), line[place], zero) if conditions else line[place]

    if count == 1:
        T.buffer_store(registers, element(first), [0])
    else:
        with T.vectorized(0, count) as v:
            T.buffer_store(registers, element(first + v), [v])
    return registers
