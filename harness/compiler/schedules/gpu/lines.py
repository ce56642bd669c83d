"""Reductions of lines of memory by neighbouring threads: partial results per thread, then a tree over threads.

A line is reduced by a power of two of threads of one block; several short lines share a block. A line that fits is read
once and stays in registers, a longer one is read again in each pass, from a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from harness.compiler.schedules.common.kernel import ceil_div
from harness.compiler.schedules.gpu.threads import WARP, Merge, fp32, launch, local, merge_threads, power_of_two

CHUNK = 4096
"""Elements that one block reduces where a line is cut among blocks: all of them stay in registers."""
LONGEST = 2 * CHUNK
"""Elements of a line beyond which it is cut."""
_HELD = 16
"""Elements of a line that a thread keeps in registers at most."""
_EACH = 8
"""Elements of a line that a thread has at least, if that leaves a warp."""
_THREADS = 256
"""Threads that reduce a line at most."""
_BLOCK = 128
"""Threads of a block at least; short lines share one."""


@dataclass(frozen=True)
class Fold:
    """A reduction of a line.

    Attributes:
        start: Neutral value.
        update: (partial result, element, its index) → partial result.
        merge: Two partial results → one.
    """

    start: float
    update: Callable[[Any, Any, Any], Any]
    merge: Merge


def added(term: Callable[[Any, Any], Any]) -> Fold:
    """Makes the fold that adds a term of each element and its index."""
    return Fold(0.0, lambda partial, value, k: partial + term(value, k), lambda a, b: a + b)


class Line:
    """A line that threads of a block reduce together; all of them get the results.

    Args:
        count: Elements at most.
        threads: Threads that reduce it, a power of two.
        thread: Index in the block.
        read: Index of an element → its fp32 value.
        limit: Elements, where that depends on the block.
    """

    def __init__(
        self, count: int, threads: int, thread: Any, read: Callable[[Any], Any], limit: Any | None = None
    ) -> None:
        self.threads, self.thread = threads, thread
        self._count, self._limit, self._read = count, limit, read
        self._lane = T.Bind(thread % threads)
        each = ceil_div(count, threads)
        self._held = held = local(each) if each <= _HELD else None
        if held is not None:
            self._walk(lambda n, k: T.buffer_store(held, read(k), [n]))

    def fold(self, folds: Sequence[Fold]) -> list[Any]:
        """Emits reductions over the line; every thread of the block must come here."""
        partial = [local(1) for _ in folds]
        for cell, fold in zip(partial, folds, strict=True):
            T.buffer_store(cell, fp32(fold.start), [0])

        def update(value: Any, k: Any) -> None:
            for cell, fold in zip(partial, folds, strict=True):
                T.buffer_store(cell, fold.update(cell[0], value, k), [0])

        self.for_each(update)
        merges = [fold.merge for fold in folds]
        return merge_threads([cell[0] for cell in partial], merges, self.threads, self.thread)

    def for_each(self, body: Callable[[Any, Any], None]) -> None:
        """Emits `body(element, index)` for the thread's elements."""
        held, read = self._held, self._read
        self._walk(lambda n, k: body(read(k) if held is None else held[n], k))

    def replace(self, value: Callable[[Any], Any]) -> None:
        """Emits that every element becomes a function of itself: where it is held, or whenever it is read."""
        held, read = self._held, self._read
        if held is None:
            self._read = lambda k: value(read(k))
        else:
            self._walk(lambda n, k: T.buffer_store(held, value(held[n]), [n]))

    def _walk(self, body: Callable[[Any, Any], None]) -> None:
        def step(n: Any, checked: bool) -> None:
            k = n * self.threads + self._lane
            limit = self._count if self._limit is None else self._limit
            if not checked and self._limit is None:
                body(n, k)
            else:
                with T.If(k < limit), T.Then():
                    body(n, k)

        whole = self._count // self.threads
        if self._held is not None:
            for n in range(whole):
                step(n, False)
        elif whole:
            with T.serial(0, whole) as n:
                step(n, False)
        if self._count % self.threads:
            step(whole, True)


@contextmanager
def each_line(lines: int, count: int) -> Iterator[tuple[Any, Any, int, Any]]:
    """Emits a kernel in which each of `lines` of `count` elements is reduced by some threads.

    Yields:
        The line; the condition that there is one, where the last block has too few, otherwise None; how many threads
        reduce it; the thread's index in the block.
    """
    threads = max(WARP, min(_THREADS, power_of_two(ceil_div(count, _EACH))))
    block = max(threads, _BLOCK)
    together = block // threads
    with launch(ceil_div(lines, together), block) as (index, thread):
        line = T.Bind(index * together + thread // threads) if together > 1 else index
        if lines % together:
            # Threads without a line come to the barriers all the same.
            yield T.Bind(T.min(line, lines - 1)), line < lines, threads, thread
        else:
            yield line, None, threads, thread


@contextmanager
def each_chunk(lines: int, count: int, read: Callable[[Any, Any], Any]) -> Iterator[tuple[Any, Any, Line, Any, Any]]:
    """Emits a kernel in which each chunk of each of `lines` of `count` elements is reduced by a block.

    Args:
        lines: Number of lines.
        count: Elements of each.
        read: (line, index of an element) → its fp32 value.

    Yields:
        The line's index; the chunk's; the chunk; how long it is; the thread's index in the block.
    """
    chunks = ceil_div(count, CHUNK)
    with each_line(lines * chunks, CHUNK) as (task, _, threads, thread):
        i, c = T.Bind(task // chunks), T.Bind(task % chunks)
        first, length = chunk_of(count, c)
        limit = None if isinstance(length, int) else length
        yield i, c, Line(CHUNK, threads, thread, lambda k: read(i, first + k), limit), length, thread


def store(condition: Any, buffer: tirx.Buffer, value: Any, index: Sequence[Any]) -> None:
    """Emits a store, under a condition if it is not None."""
    if condition is None:
        T.buffer_store(buffer, value, index)
        return
    with T.If(condition), T.Then():
        T.buffer_store(buffer, value, index)


def chunk_of(count: int, chunk: Any) -> tuple[Any, Any]:
    """Returns where a chunk of a line begins, and how long it is: `CHUNK`, but for the last."""
    first = T.Bind(chunk * CHUNK)
    return first, CHUNK if count % CHUNK == 0 else T.Bind(T.min(CHUNK, count - first))
