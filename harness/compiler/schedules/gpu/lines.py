"""Reduces lines of memory by neighbouring threads: partial results per thread, then a tree over threads.

A line is reduced by a power of two of threads of one block; several short lines share a block. A line that fits is read
once and stays in registers, a longer one is read again in each pass, from a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import ceil_div, where
from harness.compiler.schedules.gpu.threads import WARP, Merge, fp32, launch, local, merge_threads, power_of_two

CHUNK = 4096
"""Elements that one block reduces if a line is split among blocks; all of them stay in registers."""
LONGEST = 2 * CHUNK
"""Largest number of elements of a line that is not split."""
_MOST_HELD = 16
"""Largest number of elements of a line in a thread's registers."""
_LEAST_EACH = 8
"""Least number of elements of a line for a thread, if that leaves a warp."""
_THREADS = 256
"""Largest number of threads that reduce a line."""
_BLOCK = 128
"""Least number of threads of a block; short lines share a block."""


@dataclass(frozen=True)
class Fold:
    """A reduction of a line.

    Attributes:
        start: Neutral value.
        update: Takes partial result, element and its index, and returns the new partial result.
        merge: Merges two partial results.
    """

    start: float
    update: Callable[[T.Expr, T.Expr, T.Index], T.Expr]
    merge: Merge


def added(term: Callable[[T.Expr, T.Index], T.Expr]) -> Fold:
    """Returns the fold that adds a term of each element and its index."""
    return Fold(0.0, lambda partial, value, k: partial + term(value, k), lambda a, b: a + b)


class Line:
    """A line that threads of a block reduce together; each of them gets the results.

    Args:
        count: Largest number of elements.
        threads: Number of threads that reduce it, a power of two.
        thread: Index in the block.
        read: Takes the index of an element and returns its fp32 value.
        limit: Number of elements, if that depends on the block.
    """

    def __init__(
        self, count: int, threads: int, thread: T.Index, read: Callable[[T.Index], T.Expr], limit: T.Index | None = None
    ) -> None:
        self.threads, self.thread = threads, thread
        self._count, self._limit, self._read = count, limit, read
        self._lane = T.Bind(thread % threads)
        elements_per_thread = ceil_div(count, threads)
        self._held = registers = local(elements_per_thread) if elements_per_thread <= _MOST_HELD else None
        if registers is not None:
            self._walk(lambda n, k: T.buffer_store(registers, read(k), [n]))

    def fold(self, folds: Sequence[Fold]) -> list[T.Expr]:
        """Emits reductions over the line, which every thread of the block must reach."""
        partial = [local(1) for _ in folds]
        for cell, fold in zip(partial, folds, strict=True):
            T.buffer_store(cell, fp32(fold.start), [0])

        def update(value: T.Expr, k: T.Index) -> None:
            for cell, fold in zip(partial, folds, strict=True):
                T.buffer_store(cell, fold.update(cell[0], value, k), [0])

        self.for_each(update)
        merges = [fold.merge for fold in folds]
        return merge_threads([cell[0] for cell in partial], merges, self.threads, self.thread)

    def for_each(self, body: Callable[[T.Expr, T.Index], None]) -> None:
        """Emits `body(element, index)` for the thread's elements."""
        registers, read = self._held, self._read
        self._walk(lambda n, k: body(read(k) if registers is None else registers[n], k))

    def replace(self, value: Callable[[T.Expr], T.Expr]) -> None:
        """Emits the replacement of every element by a function of it: once in registers, or at each read."""
        registers, read = self._held, self._read
        if registers is None:
            self._read = lambda k: value(read(k))
        else:
            self._walk(lambda n, k: T.buffer_store(registers, value(registers[n]), [n]))

    def _walk(self, body: Callable[[T.Index, T.Index], None]) -> None:
        def step(n: T.Index, checked: bool) -> None:
            k = n * self.threads + self._lane
            limit = self._count if self._limit is None else self._limit
            with where(*([k < limit] if checked or self._limit is not None else [])):
                body(n, k)

        is_whole = self._count // self.threads
        if self._held is not None:
            for n in range(is_whole):
                step(n, False)
        elif is_whole:
            with T.serial(0, is_whole) as index:
                step(index, False)
        if self._count % self.threads:
            step(is_whole, True)


@contextmanager
def each_line(lines: int, count: int) -> Iterator[tuple[T.Expr, list[T.Operand], int, T.Expr]]:
    """Emits a kernel in which each of `lines` of `count` elements is reduced by some threads.

    Yields:
        The line; the condition that it exists if the last block has fewer lines, otherwise none, in a list; the number
            of threads that reduce it; the thread's index in the block.
    """
    threads = max(WARP, min(_THREADS, power_of_two(ceil_div(count, _LEAST_EACH))))
    block = max(threads, _BLOCK)
    lines_per_block = block // threads
    with launch(ceil_div(lines, lines_per_block), block) as (index, thread):
        line = T.Bind(index * lines_per_block + thread // threads) if lines_per_block > 1 else index
        if lines % lines_per_block:
            # Threads without a line come to the barriers all the same.
            yield T.Bind(T.min(line, lines - 1)), [line < lines], threads, thread
        else:
            yield line, [], threads, thread


@contextmanager
def each_chunk(
    lines: int, count: int, read: Callable[[T.Index, T.Index], T.Expr]
) -> Iterator[tuple[T.Expr, T.Expr, Line, T.Index, T.Expr]]:
    """Emits a kernel in which each chunk of each of `lines` of `count` elements is reduced by a block.

    Args:
        lines: Number of lines.
        count: Elements of each.
        read: Takes a line and the index of an element, and returns its fp32 value.

    Yields:
        The line's index; the chunk's index; the chunk; its length; the thread's index in the block.
    """
    chunks = ceil_div(count, CHUNK)
    with each_line(lines * chunks, CHUNK) as (task, _, threads, thread):
        i, c = T.Bind(task // chunks), T.Bind(task % chunks)
        first, length = chunk_of(count, c)
        limit = None if isinstance(length, int) else length
        yield i, c, Line(CHUNK, threads, thread, lambda k: read(i, first + k), limit), length, thread


def chunk_of(count: int, chunk: T.Index) -> tuple[T.Expr, T.Index]:
    """Returns start and length of a chunk of a line: `CHUNK`, except for the last."""
    first = T.Bind(chunk * CHUNK)
    return first, CHUNK if count % CHUNK == 0 else T.Bind(T.min(CHUNK, count - first))
