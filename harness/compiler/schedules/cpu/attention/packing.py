"""Packs the queries, keys and values of attention kernels, with all that moves or rotates them on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import ir, sym

from harness.compiler import tir as T
from harness.compiler.schedules.common.folding import Folded, Readable
from harness.compiler.schedules.common.kernel import fp32
from harness.compiler.schedules.cpu.attention.score_mod import Head
from harness.compiler.schedules.cpu.emit import for_each_vector
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel


@dataclass(frozen=True)
class Rows:
    """The rows of an operand [batch, length, head, channel] that are of one head.

    Attributes:
        operand: The operand.
        buffers: Its buffers.
        head: Batch and head.
        scale: Factor of its elements.
    """

    operand: Folded
    buffers: Sequence[Readable]
    head: Head
    scale: float = 1.0

    @property
    def length(self) -> T.Index:
        """Returns the number of rows."""
        length: T.Index = self.operand.shape[1]
        return length

    @property
    def channels(self) -> int:
        """Returns the number of channels."""
        return int(self.operand.shape[3])

    def reader(self) -> tuple[sym.Analyzer, Callable[[T.Index, T.Index], T.Expr]]:
        """Returns an analyzer that knows batch and head, and a function from (row, channel) to an element."""
        batch, _, heads, _ = self.operand.shape
        b, h = self.head
        analyzer = sym.Analyzer()
        for number, extent in ((b, batch), (h, heads)):
            if isinstance(number, T.Var):
                analyzer.bind(number, ir.Range(0, extent))

        def element(row: T.Index, channel: T.Index) -> T.Expr:
            value: T.Expr = self.operand.element(self.operand.reader(self.buffers, analyzer), [b, row, h, channel])
            return value if self.scale == 1.0 else value * fp32(self.scale)

        return analyzer, element


def copy_rows(source: Rows, target: T.Buffer, lanes: int, first: T.Index, count: T.Index) -> None:
    """Emits target[row, channel] = source[first + row, channel] for `count` rows; zero beyond their edges."""
    analyzer, element = source.reader()
    with T.serial(0, count) as row:
        # A variable of known range: the index of an element is simplified by it.
        index = T.Bind(first + row)
        analyzer.bind(index, ir.Range(0, source.length))

        def copy(channel: T.Index) -> None:
            T.buffer_store(target, element(index, channel), [row, channel])

        if source.operand.period == 1:
            for_each_vector(source.channels, lanes, copy)
        else:
            period = source.operand.period
            with T.serial(0, source.channels // period) as group:
                analyzer.bind(group, ir.Range(0, source.channels // period))
                for n in range(period):
                    copy(group * period + n)
        _clear(target, row, source.channels)
    _clear_after(target, count)


def pack_channels(
    source: Rows, target: T.Buffer, lanes: int, first: T.Index, count: T.Index, micro_kernel: MicroKernel
) -> None:
    """Copies rows as `copy_rows` does, into elements of a micro-kernel whose terms are channels of a row."""
    if micro_kernel.terms == 1:
        copy_rows(source, target, lanes, first, count)
        return
    depth = source.channels // micro_kernel.terms
    line = T.alloc_buffer((1, source.channels), "float32")
    with T.serial(0, count) as row:
        copy_rows(source, line, lanes, first + row, 1)

        def pack(k: T.Index) -> None:
            T.buffer_store(target, micro_kernel.pack(lambda c: line[0, c], k, depth), [row, k])

        for_each_vector(depth, lanes, pack)
        _clear(target, row, depth)
    _clear_after(target, count)


def pack_keys(source: Rows, target: T.Buffer, lanes: int, block: int, micro_kernel: MicroKernel) -> None:
    """Copies rows as `copy_rows` does, into elements of a micro-kernel whose terms are consecutive keys.

    Args:
        source: The rows.
        target: [block, element of the block] as one row after the other, channel; where the micro-kernel multiplies
            whole panels the other way round, channel by channel.
        lanes: fp32 numbers in a vector.
        block: Keys of a block, padded with zeros to its elements.
        micro_kernel: The micro-kernel.
    """
    terms, by_channel = micro_kernel.terms, micro_kernel.a.row_major
    if terms == 1:
        copy_rows(source, target, lanes, 0, source.length)
        return
    rows, padded = (int(extent) for extent in (reversed(target.shape) if by_channel else target.shape))
    blocks = source.operand.shape[1] // block
    elements = rows // blocks
    lines = T.alloc_buffer((terms, padded), "float32")
    with T.serial(0, blocks) as b, T.serial(0, elements) as k:
        key_count = terms if block == elements * terms else T.Bind(T.max(0, T.min(terms, block - k * terms)))
        copy_rows(source, lines, lanes, b * block + k * terms, key_count)

        def store(c: T.Index) -> None:
            row = b * elements + k
            T.buffer_store(target, joined_rows(micro_kernel, lines, 0, c), [c, row] if by_channel else [row, c])

        for_each_vector(padded, lanes, store)


def joined_rows(micro_kernel: MicroKernel, buffer: T.Buffer, element: T.Index, column: T.Index) -> T.Expr:
    """Returns an element whose terms are rows of a buffer that follow each other."""
    terms = micro_kernel.terms
    return micro_kernel.b.encode([buffer[element * terms + n, column] for n in range(terms)])


def _clear(target: T.Buffer, row: T.Index, first: int) -> None:
    """Emits zeros from one column of a row to its end."""
    end = int(target.shape[1])
    if first < end:
        with T.serial(first, end) as k:
            T.buffer_store(target, T.const(0, target.dtype), [row, k])


def _clear_after(target: T.Buffer, rows: T.Index) -> None:
    """Emits zeros in all but the first rows."""
    total = int(target.shape[0])
    if not (isinstance(rows, int) and rows == total):
        with T.serial(rows, total) as row:
            _clear(target, row, 0)
