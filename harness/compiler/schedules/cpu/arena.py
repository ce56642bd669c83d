"""Where values lie in memory, known when code is generated: values that are never alive together share it.

Every result of a function gets an allocation of its own, exactly as large as it is, because it outlives the function.
Until it is written, other values may lie there. All values without such a place lie in the arena, one more allocation.
Finding the smallest arena is NP-hard; taking the largest values first comes within a few percent of what is alive at
the worst moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Alignment in bytes, TVM's `kAllocAlignment`, which its compiled functions rely on."""


@dataclass(frozen=True)
class Value:
    """An intermediate value: its bytes, and the first and last step that needs it."""

    size: int
    first: int
    last: int

    def meets(self, other: Value) -> bool:
        """Returns whether both are alive at some step."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Result:
    """A value that outlives the function: its bytes, and the first step that needs it."""

    size: int
    first: int


@dataclass(frozen=True)
class Position:
    """Where a value lies: the number of the result in whose memory, or None for the arena, and how many bytes in."""

    result: int | None
    offset: int


@dataclass(frozen=True)
class Layout:
    """Bytes of the arena, and the position of each value."""

    arena: int
    positions: tuple[Position, ...]


def lay_out(values: Sequence[Value], results: Sequence[Result]) -> Layout:
    """Positions values so that no two share memory while both are alive, in the smallest arena of a few orders.

    Args:
        values: In any order.
        results: Results, whose memory values may use before the result is written.
    """
    orders: tuple[Callable[[Value], tuple[int, ...]], ...] = (
        lambda value: (-value.size, value.first),
        lambda value: (-value.size * (value.last - value.first + 1), value.first),
        lambda value: (value.first, -value.size),
    )
    return min((_greedy(values, results, order) for order in orders), key=lambda layout: layout.arena)


def _greedy(values: Sequence[Value], results: Sequence[Result], order: Callable[[Value], tuple[int, ...]]) -> Layout:
    """Takes one value after the other, each to the smallest gap in the first memory that has one."""
    places: list[tuple[int | None, int | None, int | None]] = [
        (n, results[n].size, results[n].first) for n in sorted(range(len(results)), key=lambda n: results[n].size)
    ]
    places.append((None, None, None))
    residents: dict[int | None, list[tuple[Value, int]]] = {place: [] for place, _, _ in places}
    positions: dict[int, Position] = {}
    arena = 0
    for number in sorted(range(len(values)), key=lambda n: order(values[n])):
        value = values[number]
        for place, capacity, until in places:
            if until is not None and value.last >= until:
                continue
            taken = [(at, at + other.size) for other, at in residents[place] if other.meets(value)]
            offset = _gap(taken, value.size, capacity)
            if offset is not None:
                break
        else:  # pragma: no cover - the arena has no end
            raise AssertionError
        residents[place].append((value, offset))
        positions[number] = Position(place, offset)
        if place is None:
            arena = max(arena, offset + value.size)
    return Layout(arena, tuple(positions[n] for n in range(len(values))))


def _gap(taken: list[tuple[int, int]], size: int, capacity: int | None) -> int | None:
    """Returns where the smallest gap of at least `size` bytes begins; None if there is none."""
    best: tuple[int, int] | None = None
    begin = 0
    for start, end in sorted(taken):
        if start - begin >= size and (best is None or start - begin < best[0]):
            best = start - begin, begin
        begin = max(begin, _aligned(end))
    if best is not None:
        return best[1]
    return begin if capacity is None or begin + size <= capacity else None


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
