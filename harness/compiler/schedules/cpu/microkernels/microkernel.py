"""Defines a micro-kernel: the formats of its packed operands, its sizes, and the code that it emits.

A micro-kernel multiplies one panel of A and one of B over a chunk of the depth, and adds the product to sums in memory
(BLIS: MR, NR and KC). The loops around it are the same for all (`multiply_panels`, `product.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import overload

import tvm

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import ceil_div, chunk_length, fp32
from harness.compiler.schedules.cpu.emit import each_vector
from harness.compiler.schedules.cpu.tile import Tile, VectorUnit

Scale = Callable[[T.Buffer, Callable[[T.Index, T.Index], Sequence[T.Index]], int, int, int], None]
"""(panels, (element of the chunk, row or column) → index, elements of the chunk, rows or columns, fp32 lanes): emits
that elements become numbers with a common scale, which is stored at the index after them."""
Step = Callable[[Tile, Sequence[T.Buffer], Callable[[int], Sequence[T.Expr]], Callable[[T.Index], T.TensorLoad]], None]
"""(tile, its rows of sums, row → numbers of an element of A, columns → elements of B): emits the product of one element
of the depth."""


@dataclass(frozen=True)
class PanelFormat:
    """The form in which the panels of an operand hold the terms of sums.

    Attributes:
        dtype: Type of a stored number.
        terms: Terms of a sum in an element.
        encode: (its terms) → the element.
        row_major: Whether a panel lies row by row, [row, element], and not [element, row or column].
        numbers: Stored numbers of an element of a packed block; the first ones of a chunk come before the second ones.
        split: (element) → its numbers.
        scale: Scales the elements of a chunk; None if they stay as they are.
    """

    dtype: str
    terms: int
    encode: Callable[[Sequence[T.Expr]], T.Expr]
    row_major: bool = False
    numbers: int = 1
    split: Callable[[T.Expr], Sequence[T.Expr]] = lambda element: (element,)
    scale: Scale | None = None

    @property
    def number_bytes(self) -> int:
        """Returns the size of a stored number in bytes."""
        return int(tvm.DataType(self.dtype).itemsize)

    @overload
    def stored(self, elements: int, chunk: int) -> int: ...

    @overload
    def stored(self, elements: T.Index, chunk: int) -> T.Index: ...

    def stored(self, elements: T.Index, chunk: int) -> T.Index:
        """Returns the numbers of a row or column for elements in whole chunks, each followed by its scale.

        Args:
            elements: Elements of the depth.
            chunk: Elements of a chunk.
        """
        numbers = elements if self.numbers == 1 else elements * self.numbers
        return numbers if self.scale is None else numbers + elements // chunk


Fetch = Callable[[T.Index, T.Index, T.Index | None], None]
"""(panel of A, first element of the chunk, element counted from it): emits the prefetches of a step, or those of all
steps before the first one if no element is given."""


@dataclass(frozen=True)
class PanelsOfA:
    """Panels of A that are multiplied with one panel of B.

    Attributes:
        count: Number of panels.
        number: (panel, first element of the chunk, number of the chunk, row of the tile) → number of a panel.
        stride: Numbers from one row of a panel to the next, where it lies row by row; those that are stored for a chunk
            if None.
        fetch: Emits the prefetches of the next panel.
    """

    count: T.Index
    number: Callable[[T.Index, T.Index, T.Index, int], T.Expr]
    stride: int | None = None
    fetch: Fetch = lambda p, first, k: None


@dataclass(frozen=True)
class PanelOfB:
    """The panel of B.

    Attributes:
        element: (first element of the chunk, element counted from it, column of the tile) → element; contiguous in the
            column.
        prepare: (first element, number of elements): emits the preparation of a chunk.
        fetch: Emits the prefetches of a share of the next chunk.
    """

    element: Callable[[T.Index, T.Index, T.Index], T.TensorLoad]
    prepare: Callable[[T.Index, T.Index], None] = lambda first, count: None
    fetch: Fetch = lambda p, first, k: None


@dataclass(frozen=True)
class Sums:
    """The memory that gets the products, and the steps after the last chunk of a panel's sums.

    Attributes:
        buffer: [at least panels, rows · columns], or of another shape.
        place: (panel, row, column of the tile) → index into another shape; contiguous in the column, and in rows, too,
            where whole panels are multiplied.
        finish: Takes a panel and emits the use of its sums; None if they are used later.
        fetch: (panel, element of the last chunk, its elements): emits prefetches of the memory that `finish` touches.
    """

    buffer: T.Buffer
    place: Callable[[T.Index, T.Index, T.Index], Sequence[T.Index]] | None = None
    finish: Callable[[T.Index], None] | None = None
    fetch: Callable[[T.Index, T.Index, int], None] = lambda p, k, count: None

    def index(self, p: T.Index, i: T.Index, j: T.Index, position: T.Index) -> Sequence[T.Index]:
        """Returns the index of a sum of panel p: of row i and column j, which have that position in the tile."""
        return (p, position) if self.place is None else self.place(p, i, j)

    def vector(self, p: T.Index, i: int, j: int, tile: Tile, lanes: int) -> Sequence[T.Index]:
        """Returns the index of a vector of sums of panel p: of row i, from column j on."""
        *outer, first = self.index(p, i, j, i * tile.columns + j)
        return (*outer, T.Ramp(first, 1, lanes))


@dataclass(frozen=True)
class PanelProduct:
    """The product of a panel of A and one of B over a chunk of the depth, which is added to sums.

    Attributes:
        tile: Rows and columns of the panels.
        a, b, sums: The operands and the memory of the result.
        p: The panel of A.
        first: First element of the chunk.
        chunk: Elements of a whole chunk.
        count: Elements of this one.
        added: Whether there are sums yet.
        last: Whether it is the last chunk, and `sums.finish` follows.
    """

    tile: Tile
    a: PanelsOfA
    b: PanelOfB
    sums: Sums
    p: T.Index
    first: T.Index
    chunk: int
    count: T.Index
    added: T.Expr
    last: bool


@dataclass(frozen=True, kw_only=True)
class MicroKernel:
    """A way to multiply panels.

    Attributes:
        name: Its part of kernels' names; empty for fp32.
        multiplies: Type of the terms, a part of a workload's key.
        a: Format of A.
        b: Format of B, and of A where that is packed when the model is loaded, as far as elements go.
        emit: (the micro-kernel, a product of panels): emits the product.
        step: Emits one element of the depth with sums in registers; None if panels are multiplied as a whole.
        source: LLVM IR of the functions that are called.
        layers_only: Whether only linear layers with bfloat16 weights gain by it.
        widens: Whether it widens terms to fp32 and multiplies them no faster than that.
        choose_tile: (vector registers, rows, columns) → tile; None if tuning chooses it, with its chunk.
        least_rows: Fewest rows of a product.
        multiple: Elements of which the depth is a multiple.
        longest: Elements of a chunk at most; None for the usual length of a sum in one register.
        block_bytes: Largest size of a block of A in bytes. It is read in order, chunk by chunk, and need not fit the
            second cache where the memory behind that is fast enough.
        setup: Emits the configuration of the instructions around the code in the context.
    """

    name: str
    multiplies: str
    a: PanelFormat
    b: PanelFormat
    emit: Callable[[MicroKernel, PanelProduct], None]
    step: Step | None = None
    source: str = ""
    layers_only: bool = False
    widens: bool = False
    choose_tile: Callable[[VectorUnit, int, int], Tile] | None = None
    least_rows: int = 0
    multiple: int = 1
    longest: int | None = None
    block_bytes: int = 6 * 1024 * 1024
    setup: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def terms(self) -> int:
        """Returns the terms of a sum in an element."""
        return self.b.terms

    @property
    def dtype(self) -> str:
        """Returns the type of an element."""
        return self.b.dtype

    @property
    def term_bytes(self) -> int:
        """Returns the size of a term in a panel in bytes."""
        return self.b.number_bytes // self.b.terms

    def pack(self, term: Callable[[T.Index], T.Expr], k: T.Index, depth: int) -> T.Expr:
        """Returns element k of a depth of so many elements, whose terms are as far apart."""
        return self.b.encode([term(k + n * depth) for n in range(self.terms)])

    def takes(self, rows: int, terms: int, repeats: int = 1) -> bool:
        """Returns whether a product is worth the micro-kernel and its sums are whole elements.

        Args:
            rows: Rows of the product.
            terms: Terms among which the terms of an element are chosen.
            repeats: Number of times that a sum has these terms: pixels of a convolution's kernel.
        """
        whole = terms % self.terms == 0 and terms * repeats // self.terms % self.multiple == 0
        return whole and rows >= self.least_rows

    def chunk(self, depth: int, *, even: bool = False) -> int:
        """Returns the elements of a chunk of the depth; the last may be shorter, unless each has a scale.

        Args:
            depth: Elements of the depth.
            even: Whether all chunks must be equal in any case.
        """
        if self.longest is None:
            return chunk_length(depth)
        steps = depth // self.multiple
        most_steps = max(1, self.longest // self.multiple)
        if even or self.b.scale is not None:
            return self.multiple * max(length for length in range(1, most_steps + 1) if steps % length == 0)
        return self.multiple * ceil_div(steps, ceil_div(steps, most_steps))

    def imported(self) -> AbstractContextManager[None]:
        """Emits the import of the functions for the code in the context."""
        return T.attr(T.const(0, "int32"), "pragma_import_llvm", self.source) if self.source else nullcontext()

    def multiply_panels(
        self, tile: Tile, depth: T.Index, a: PanelsOfA, b: PanelOfB, sums: Sums, chunk: int | None = None
    ) -> None:
        """Emits sums[p] = panel p of A · panel of B for all panels of A.

        The sums are cut into chunks, and a chunk is done for all panels of A before the next: the part of B's panel
        stays in the first-level cache meanwhile, and LLVM cannot promote the sums to registers that it would have to
        spill.

        Args:
            tile: Rows and columns of the panels.
            depth: Elements of the depth; where the number is not constant, a multiple of `chunk`.
            a: The panels of A.
            b: The panel of B.
            sums: Get the products.
            chunk: Elements of a chunk, if not those that the micro-kernel chooses.
        """
        if chunk is None:
            assert isinstance(depth, int)
            chunk = self.chunk(depth)

        def multiply_chunk(c: T.Index, count: T.Index, *, last: bool = False) -> None:
            added = T.const(c > 0, "bool") if isinstance(c, int) else c > 0
            b.prepare(c * chunk, count)
            with T.serial(0, a.count) as p:
                self.emit(self, PanelProduct(tile, a, b, sums, p, c * chunk, chunk, count, added, last))
                if last and sums.finish is not None:
                    sums.finish(p)

        if self.step is not None:  # a function for whole panels makes sums instead
            with T.serial(0, a.count) as p:
                each_vector(tile, lambda i, j, n: T.buffer_store(sums.buffer, fp32(0.0), sums.index(p, i, j, n)))
        chunks = ceil_div(depth, chunk)
        if sums.finish is None:
            whole = not isinstance(depth, int) or depth % chunk == 0
            with T.serial(0, chunks) as c:
                multiply_chunk(c, chunk if whole else T.min(chunk, depth - c * chunk))
            return
        assert isinstance(depth, int)
        others = ceil_div(depth, chunk) - 1
        if others:
            with T.serial(0, others) as c:
                multiply_chunk(c, chunk)
        multiply_chunk(others, depth - others * chunk, last=True)
