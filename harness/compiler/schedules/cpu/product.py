"""Builds the blocked matrix product that linear layers, batched products and convolutions consist of.

    result[b, i, j] = finish(Σ_k left[b, i, k] · right[b, k, j])

One operand is *resident*: packed once into panels [batch, panel, depth, width] by `pack_function` (for weights that
happens when the model is loaded). The other one *streams*: each task packs a block of it into its own workspace,
through an arbitrary index function, so that transposed operands and convolutions need no copy in memory. A panel is as
wide as the register tile on that side; `emit.multiply_panels` takes one right panel past many left ones.

In the terms of BLIS (Van Zee and van de Geijn, 2015), the left operand is A and the right one B, panels are
micro-panels, and both operands are packed: the resident one ahead of time, the streaming one block by block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import (
    HELPER,
    Argument,
    ThreadWorkspace,
    ceil_div,
    parallel_with_workspace,
    prim_func,
    registers,
    tail_extent,
    view,
)
from harness.compiler.schedules.common.kernel_info import PRODUCT, KernelInfo
from harness.compiler.schedules.cpu.division import LEAST_WORK
from harness.compiler.schedules.cpu.emit import (
    FP32,
    LINE,
    Arithmetic,
    TileSink,
    for_each_vector,
    multiply_panels,
    prefetch,
    spread,
)
from harness.compiler.schedules.cpu.tile import Tile

Side = Literal["left", "right"]

_BLOCK_BYTES = 6 * 1024 * 1024
"""Largest workspace of one task in bytes. It is read in order, chunk by chunk, and need not fit the second-level cache.
"""
_LEFT_PANELS = 64
"""Left panels that share one pass over the right operand; their sums, 1.5 KB each, stay in the second-level cache."""
_TASKS = 16
"""Tasks wanted at least, however small they are."""
_MOST_TASKS = 2048
"""Tasks that are enough: 64 threads get 32 each, so that one more or less is 3 %."""
_KEPT_BYTES = 16 * 1024
"""A packed block that is worth keeping has at least so much; a smaller one is sooner packed again by each task."""
_REUSE = 4
"""Left panels, if there are as many, that share a pass over the right operand: so it is read behind the arithmetic."""


@dataclass(frozen=True)
class Extents:
    """The extents of `batch` independent products of rows × depth by depth × columns: m, k and n of BLIS."""

    batch: int
    rows: int
    columns: int
    depth: int

    def width(self, side: Side) -> int:
        """Returns the rows of the left operand or the columns of the right one."""
        return self.rows if side == "left" else self.columns

    def packed(self, terms: int) -> Extents:
        """Returns the same product with a depth in elements of panels, of so many terms each."""
        return replace(self, depth=self.depth // terms)


Read = Callable[[Any, Any, Any], Any]
"""Takes batch, row or column, and k, and returns an element."""
Put = Callable[[Any, Any, Any], None]
"""(term counted from the first one, row or column within the panel, value): emits the store of a packed element."""
Fill = Callable[[Put, Any, Any], None]
"""(where to store, first term, number of terms): emits the packing of a part of one panel."""
Pack = Callable[[Any, Any], Fill]
"""Takes batch and first row or column, emits the common work of a panel's parts, and returns a function that packs a
part."""


def panel_width(side: Side, tile: Tile) -> int:
    """Returns the width of a packed panel on this side."""
    return tile.rows if side == "left" else tile.columns


def packed_shape(side: Side, batch: int, width: int, depth: int, tile: Tile) -> tuple[int, int, int, int]:
    """Returns the shape of a packed operand: [batch, panel, depth, width of a panel]."""
    panel = panel_width(side, tile)
    return batch, ceil_div(width, panel), depth, panel


def pack_function(
    side: Side,
    source: Argument,
    batch: int,
    width: int,
    depth: int,
    tile: Tile,
    read: Callable[[T.Buffer], Read],
    arithmetic: Arithmetic = FP32,
    chunk: int | None = None,
) -> T.PrimFunc:
    """Builds the function that packs a resident operand into panels, with zeros beyond its edge.

    Left panels that are multiplied as a whole lie row by row: [batch, panel, row, depth]. Elements that are scaled are
    followed by their scales, chunk by chunk, and are of a right operand.

    Args:
        side: The operand: `left` (packed A) or `right` (packed B).
        source: The operand.
        batch: Its matrices.
        width: Its rows, of a left one, or its columns.
        depth: Elements of the depth.
        tile: The register tile.
        read: Buffer of the operand → how an element of a panel is read.
        arithmetic: The arithmetic of the product.
        chunk: Elements of a chunk, if the arithmetic scales them.
    """
    scaled = arithmetic.scaled
    by_row, dtype = side == "left" and arithmetic.tiles is not None, arithmetic.dtype
    assert scaled is None or (chunk is not None and side == "right")
    split = next(n for n in (8, 4, 2, 1) if depth % n == 0) if scaled is None else depth // (chunk or depth)
    part = depth // split
    stored = arithmetic.stored(part, part)
    shape = packed_shape(side, batch, width, split * stored, tile)
    panels, panel = shape[1], shape[3]
    if by_row:
        shape = (*shape[:2], panel, depth)

    def body(data: T.Buffer, packed: T.Buffer) -> None:
        element = read(data)
        with T.parallel(0, batch * panels * split) as task:
            b = task // (panels * split)
            p = task // split % panels
            first, begin = task % split * part, task % split * stored
            with T.serial(0, part) as step, T.serial(0, panel) as i:
                index = p * panel + i
                value = element(b, index, first + step)
                if width % panel:
                    value = T.if_then_else(index < width, value, T.const(0, dtype))
                T.buffer_store(packed, value, [b, p, i, begin + step] if by_row else [b, p, begin + step, i])
            if scaled is not None:
                scaled.columns(packed, lambda k, j: [b, p, begin + k, j], part, panel, tile.lanes)

    return prim_func("pack", [source, Argument("packed", shape, dtype)], body, HELPER)


def read_left(panels: T.Buffer, arithmetic: Arithmetic) -> PanelRead:
    """Returns how a resident left operand is read that `pack_function` has packed."""
    if arithmetic.tiles is not None:
        return lambda b, p, k, i: panels[b, p, i, k]
    return lambda b, p, k, i: panels[b, p, k, i]


def read_right(panels: T.Buffer, arithmetic: Arithmetic, chunk: int) -> PanelRead:
    """Returns how a resident right operand is read that `pack_function` has packed, in chunks of so many elements."""
    if arithmetic.scaled is None:
        return lambda b, p, k, j: panels[b, p, k, j]
    return lambda b, p, k, j: panels[b, p, arithmetic.stored(k, chunk), j]


def stream(read: Read, width: int, panel: int, lanes: int) -> Pack:
    """Packs a panel element by element; the last one repeats the last row or column instead of leaving the operand."""

    def pack(b: Any, first: Any) -> Fill:
        def fill(put: Put, start: Any, count: Any) -> None:
            def copy(clamp: bool) -> None:
                with T.serial(0, count) as k:
                    if clamp:
                        with T.serial(0, panel) as i:
                            put(k, i, read(b, T.min(first + i, width - 1), start + k))
                    else:
                        for_each_vector(panel, lanes, lambda i: put(k, i, read(b, first + i, start + k)))

            if width % panel == 0:
                copy(clamp=False)
            else:
                with T.If(first + panel <= width):
                    with T.Then():
                        copy(clamp=False)
                    with T.Else():
                        copy(clamp=True)

        return fill

    return pack


def stream_rows(element: Callable[[Any], Any], starts: Callable[[Any, Any], Any], extents: Extents, tile: Tile) -> Pack:
    """Packs rows that are runs of memory, each as it lies; the last one is repeated beyond the edge.

    The innermost loop reads one element of a row at a time, from anywhere, so that nothing has to be transposed.

    Args:
        element: Place in the operand, one contiguous line → element of a panel.
        starts: (batch, row) → where it begins.
        extents: The extents.
        tile: The register tile.
    """

    def pack(b: Any, first: Any) -> Fill:
        begin = registers((tile.rows,), "int32")
        for i in range(tile.rows):
            row = first + i if extents.rows % tile.rows == 0 else T.min(first + i, extents.rows - 1)
            T.buffer_store(begin, starts(b, row), [i])

        def copy(put: Put, i: int, start: Any, count: Any) -> None:
            def move(k: Any) -> None:
                put(k, i, element(begin[i] + start + k))

            if isinstance(count, int):
                for_each_vector(count, tile.lanes, move)
            else:
                with T.serial(0, count) as k:
                    move(k)

        def fill(put: Put, start: Any, count: Any) -> None:
            for i in range(tile.rows):
                copy(put, i, start, count)

        return fill

    return pack


@dataclass(frozen=True)
class Partition:
    """The division of a product among tasks.

    Attributes:
        slots: Micro-panels of the streaming operand that a task packs; with their width, the MC or NC of BLIS.
        splits: Parts of the resident operand, each for tasks of its own.
    """

    slots: int
    splits: int


def panels(extents: Extents, streaming: Side, tile: Tile) -> tuple[int, int]:
    """Returns the number of panels of the streaming operand, and of the resident one."""
    resident: Side = "right" if streaming == "left" else "left"
    return (
        ceil_div(extents.width(streaming), panel_width(streaming, tile)),
        ceil_div(extents.width(resident), panel_width(resident, tile)),
    )


def choose_partition(extents: Extents, streaming: Side, tile: Tile, most_left: int | None = None) -> Partition:
    """Chooses blocks that fit the workspace and make enough tasks.

    Args:
        extents: The extents; the depth counts elements of panels.
        streaming: The operand that streams: `left` or `right`.
        tile: The register tile.
        most_left: Left panels of a block at most, where they stream; as many as the workspace holds if None.
    """
    panel = panel_width(streaming, tile)
    count, others = panels(extents, streaming, tile)
    most_slots = count
    if streaming == "left":
        most_slots = min(_LEFT_PANELS, most_left or max(1, _BLOCK_BYTES // (4 * panel * extents.depth)))
    slots = min(most_slots, count, max(ceil_div(count * extents.batch, _TASKS), _REUSE if streaming == "left" else 1))
    blocks = ceil_div(count, slots)
    splits = max(1, min(others, ceil_div(_TASKS, extents.batch * blocks)))
    if streaming == "left":
        # More parts cost nothing: a thread packs a block once for all parts that it takes one after the other.
        of_panel = slots * panel * tile.columns * extents.depth
        least_panels = max(ceil_div(LEAST_WORK, of_panel), ceil_div(extents.batch * blocks * others, _MOST_TASKS))
        splits = max(splits, others // least_panels)
    else:
        # Nor do smaller blocks: panels are packed one by one.
        of_panel = extents.rows * panel * extents.depth
        least_panels = max(ceil_div(LEAST_WORK, of_panel), ceil_div(extents.batch * count, _MOST_TASKS))
        blocks = max(blocks, count // least_panels)
        splits = max(splits, ceil_div(others, _LEFT_PANELS))
    return Partition(ceil_div(count, blocks), ceil_div(others, ceil_div(others, splits)))


@dataclass(frozen=True)
class Blocking:
    """The blocking of a product, with all of its decisions.

    Attributes:
        tile: The register tile, MR × NR of BLIS.
        partition: The division of the product among tasks.
        chunk: Terms of a sum that one register adds up, the KC of BLIS.
    """

    tile: Tile
    partition: Partition
    chunk: int


PanelRead = Callable[[Any, Any, Any, Any], Any]
"""Takes batch, panel, k, and row or column within the panel, and returns an element of the packed operand."""
Store = Callable[[Any, Any, Any, Any], None]
"""(batch, row, column, value): emits the store of one element; may be vectorized over columns."""
Touched = Callable[[Any, Any, Any], list[Any]]
"""Takes batch, row and column; returns the elements of memory that the store writes (the first) and reads, whose
neighbours belong to the neighbouring columns."""


@dataclass(frozen=True)
class Interleaved:
    """Rows whose columns alternate in the result.

    Attributes:
        rows: So many rows, of a tile whose rows are a multiple of them.
        run: Columns that lie in one run of the result: a divisor of those of a tile, and of all.
        store: (batch, first row, first column, number of the element from there on, value): emits the store of one
            element; may be vectorized over the number.
    """

    rows: int
    run: int
    store: Callable[[Any, Any, Any, Any, Any], None]


@dataclass(frozen=True)
class Access:
    """The access of a kernel to its operands and its result.

    Attributes:
        pack: Packs the streaming operand.
        packed: Reads the packed resident operand.
        store: Stores an element of the result.
        touched: Returns the elements that the store touches, if columns are neighbours in memory.
        rows: Reads the streaming operand in place, if it is the left one and packed along its rows.
        interleaved: Stores rows that alternate in the result; None if each is stored by itself.
    """

    pack: Pack
    packed: PanelRead
    store: Store
    touched: Touched = lambda b, i, j: []
    rows: Read | None = None
    interleaved: Interleaved | None = None


def product_function(
    name: str,
    extents: Extents,
    streaming: Side,
    blocking: Blocking,
    arguments: Sequence[Argument],
    body: Callable[..., Access],
    info: KernelInfo,
    by_row: bool = False,
    arithmetic: Arithmetic = FP32,
) -> T.PrimFunc:
    """Builds the kernel.

    Args:
        name: Name of the function.
        extents: The extents; the depth counts elements of panels.
        streaming: The operand that streams: `left` or `right`.
        blocking: Its register tile, partition and chunks.
        arguments: All tensors, the result last.
        body: Gets one buffer per argument.
        info: Facts of the operator and its epilogue.
        by_row: Whether the returned access has `rows`, because packing goes along the rows of the left operand
            (`stream_rows`) and not across them.
        arithmetic: The arithmetic of the product.
    """
    tile, partition = blocking.tile, blocking.partition
    count, others = panels(extents, streaming, tile)
    blocks = ceil_div(count, partition.slots)
    per_split = ceil_div(others, partition.splits)

    # A row that one panel reads is read once, so that packing it would be a pass of its own.
    in_place = by_row and others == 1 and arithmetic.terms == 1

    def emit(*buffers: T.Buffer) -> None:
        access = body(*buffers)
        tasks = extents.batch * blocks * partition.splits
        with arithmetic.imported():
            shape = left_shape(extents, blocking, access, arithmetic)
            if streaming == "right" or in_place or 4 * math.prod(shape) < _KEPT_BYTES:
                with T.parallel(0, tasks) as task:
                    do(access, task, None)
            else:
                with parallel_with_workspace(tasks, arithmetic.left_dtype, shape) as (task, workspace):
                    do(access, task, workspace)

    def do(access: Access, task: Any, workspace: ThreadWorkspace | None) -> None:
        b = T.Bind(task // (blocks * partition.splits))
        first_panel = T.Bind(task // partition.splits % blocks * partition.slots)
        first_other = T.Bind(task % partition.splits * per_split)
        slots = tail_extent(partition.slots, count, first_panel)
        parts = tail_extent(per_split, others, first_other)
        if streaming == "right":
            block = Block(b, first_other, parts, first_panel, slots)
            read = _pack_right(extents, blocking, access, block, arithmetic.dtype)
        else:
            block = Block(b, first_panel, slots, first_other, parts)
            if in_place:
                read = _read_left(extents, tile, access, block)
            else:
                shape = left_shape(extents, blocking, access, arithmetic)
                packed = T.alloc_buffer(shape, arithmetic.left_dtype) if workspace is None else workspace.buffers[0]
                # A task of the same thread may have packed this block for another part of the right operand.
                with nullcontext() if workspace is None else workspace.fill_once(task // partition.splits):
                    pack_left(extents, blocking, access, block, packed, arithmetic)
                read = read_left_panels(extents, blocking, access, block, packed, arithmetic)
        panel_count = partition.slots if streaming == "left" else per_split
        with arithmetic.tile_config():
            multiply_block(extents, blocking, access, block, panel_count, read, arithmetic)

    depth = extents.depth * arithmetic.terms
    sizes = {"batch": extents.batch, "rows": extents.rows, "depth": depth, "columns": extents.columns}
    info = replace(
        info,
        algorithm=PRODUCT,
        extents=sizes,
        tile={"rows": tile.rows, "columns": tile.columns},
        decisions={"streaming": streaming, "read": "in place" if in_place else "packed", **asdict(partition)},
        flop=2 * math.prod(sizes.values()),
    )
    return prim_func(name, arguments, emit, info)


def multiply_block(
    extents: Extents,
    blocking: Blocking,
    access: Access,
    block: Block,
    panel_count: int,
    read: Callable[[Any], Operands],
    arithmetic: Arithmetic = FP32,
) -> None:
    """Emits the work of a task, whose operands are ready.

    Args:
        extents: The extents.
        blocking: The blocking.
        access: Stores elements.
        block: The work.
        panel_count: Left panels of a task at most.
        read: Right panel, counted from the task's first → the operands.
        arithmetic: The arithmetic of the product.
    """
    tile = blocking.tile
    totals = T.alloc_buffer((panel_count, tile.size), "float32")
    with T.serial(0, block.right_panels) as r:
        column = T.Bind((block.right_first + r) * tile.columns)
        operands = read(r)
        multiply_panels(
            tile,
            extents.depth,
            block.left_panels,
            operands.left,
            operands.right,
            totals,
            before=operands.before,
            longest=blocking.chunk,
            ahead=operands.ahead,
            after=_write(extents, tile, access, totals, block, column),
            arithmetic=arithmetic,
            stride=operands.stride,
            fetch=operands.fetch,
        )


@dataclass(frozen=True)
class Block:
    """The work of a task: some left panels times some right ones, of matrix `batch`."""

    batch: Any
    left_first: Any
    left_panels: Any
    right_first: Any
    right_panels: Any


@dataclass(frozen=True)
class Operands:
    """The operands of `multiply_panels` for one right panel.

    Attributes:
        left, right, ahead, before, stride, fetch: The arguments of these names.
    """

    left: Callable[[Any, Any, Any, int], Any]
    right: Callable[[Any, Any, Any], Any]
    ahead: Callable[[Any, Any, Any], None] | None = None
    before: Callable[[Any, Any], None] | None = None
    stride: int | None = None
    fetch: Callable[[Any, Any], None] | None = None


def left_shape(extents: Extents, blocking: Blocking, access: Access, arithmetic: Arithmetic = FP32) -> tuple[int, ...]:
    """Returns the shape of a packed block of the left operand: [chunk, panel, k, row], or with rows before their terms.

    The order is chunk by chunk, the order of reading, so that the processor prefetches past all panels of a chunk. For
    split elements, the first terms of a chunk come before the second ones. Scales come after their elements.
    """
    rows, terms = blocking.tile.rows, _stored_left(blocking, arithmetic)
    panel = (terms, rows) if access.rows is None else (rows, terms)
    return (ceil_div(extents.depth, blocking.chunk), blocking.partition.slots, *panel)


def _stored_left(blocking: Blocking, arithmetic: Arithmetic) -> int:
    """Returns how many numbers are stored for a row of a left panel in a chunk of the depth."""
    return int(arithmetic.stored(blocking.chunk, blocking.chunk)) * arithmetic.left_numbers


def pack_left(
    extents: Extents,
    blocking: Blocking,
    access: Access,
    block: Block,
    workspace: T.Buffer,
    arithmetic: Arithmetic = FP32,
) -> None:
    """Emits the packing of a block of the left operand into memory of `left_shape`."""
    by_row, chunk = access.rows is not None, blocking.chunk
    with T.serial(0, block.left_panels) as slot:
        fill = access.pack(block.batch, (block.left_first + slot) * blocking.tile.rows)

        def pack_chunk(c: Any, count: Any, slot: Any = slot, fill: Fill = fill) -> None:
            def put(k: Any, i: Any, value: Any) -> None:
                for n, number in enumerate((value,) if arithmetic.split is None else arithmetic.split(value)):
                    index = k + n * chunk
                    T.buffer_store(workspace, number, [c, slot, i, index] if by_row else [c, slot, index, i])

            fill(put, c * chunk, count)
            if arithmetic.scaled is not None:
                with T.serial(0, blocking.tile.rows) as i:
                    arithmetic.scaled.row(workspace, lambda k: [c, slot, i, k], chunk, blocking.tile.lanes)

        if arithmetic.tiles is None:
            # Loops that end earlier in the last chunk were 4 % faster in fp32.
            with T.serial(0, ceil_div(extents.depth, chunk)) as c:
                pack_chunk(c, tail_extent(chunk, extents.depth, c * chunk))
            return
        whole, rest = divmod(extents.depth, chunk)
        with T.serial(0, whole) as c:
            pack_chunk(c, chunk)
        if rest:
            pack_chunk(whole, rest)


def read_left_panels(
    extents: Extents,
    blocking: Blocking,
    access: Access,
    block: Block,
    workspace: T.Buffer,
    arithmetic: Arithmetic = FP32,
) -> Callable[[Any], Operands]:
    """Returns how each right panel of a task meets a block of the left operand that `pack_left` has packed."""
    tile, slots = blocking.tile, blocking.partition.slots
    by_row = access.rows is not None
    chunks, numbers = ceil_div(extents.depth, blocking.chunk), arithmetic.left_numbers
    step = tile.rows * numbers
    size = _stored_left(blocking, arithmetic) * tile.rows

    def operands(r: Any) -> Operands:
        line = view(workspace, chunks * slots * size)
        share = ceil_div(tile.columns, slots)

        def number(p: Any, first: Any, k: Any, i: int) -> Any:
            return workspace[(first // blocking.chunk, p, *((i, k) if by_row else (k, i)))]

        def left(p: Any, first: Any, k: Any, i: int) -> Any:
            found = [number(p, first, k + n * blocking.chunk, i) for n in range(numbers)]
            return found if arithmetic.split else found[0]

        def ahead(p: Any, first: Any, k: Any) -> None:
            # A step fetches as much of the next left panel as it reads, and its share of the next right chunk.
            prefetch(line[(first // blocking.chunk * slots + p + 1) * size + k * step], level=1)
            index = (p * blocking.chunk + k) * share
            row = first + blocking.chunk + index // tile.columns
            prefetch(access.packed(block.batch, block.right_first + r, row, index % tile.columns), level=2)

        def fetch(p: Any, first: Any) -> None:
            # All of the next left panel, where that is wanted, and a share of the next right chunk.
            if arithmetic.tiles is not None and arithmetic.tiles.fetches_left:
                with T.serial(0, ceil_div(size, LINE)) as n:
                    prefetch(line[(first // blocking.chunk * slots + p + 1) * size + n * LINE], level=1)
            begin = access.packed(block.batch, block.right_first + r, first + blocking.chunk, 0)
            lines = arithmetic.stored(blocking.chunk, blocking.chunk) * ceil_div(tile.columns, LINE)
            with T.serial(0, ceil_div(lines, slots)) as n:
                index = (p * ceil_div(lines, slots) + n) * LINE
                row = begin.indices[-2] + index // tile.columns
                prefetch(begin.source[(*begin.indices[:-2], row, index % tile.columns)], level=2)

        return Operands(left, _read_packed(access, block, r), ahead, fetch=None if arithmetic.tiles is None else fetch)

    return operands


def _read_left(extents: Extents, tile: Tile, access: Access, block: Block) -> Callable[[Any], Operands]:
    """Returns how each right panel meets the left operand where it lies, without packing."""
    read = access.rows
    assert read is not None

    def element(p: Any, i: Any, k: Any) -> Any:
        row = (block.left_first + p) * tile.rows + i
        return read(block.batch, row if extents.rows % tile.rows == 0 else T.min(row, extents.rows - 1), k)

    return lambda r: Operands(lambda p, first, k, i: element(p, i, first + k), _read_packed(access, block, r))


def _pack_right(
    extents: Extents, blocking: Blocking, access: Access, block: Block, dtype: str
) -> Callable[[Any], Operands]:
    """Returns how the left panels of a task meet a right panel, a chunk of which is packed just before it is used."""
    tile = blocking.tile
    # It stays in the first-level cache.
    workspace = T.alloc_buffer((blocking.chunk, tile.columns), dtype)

    def operands(r: Any) -> Operands:
        fill = access.pack(block.batch, (block.right_first + r) * tile.columns)
        return Operands(
            lambda p, first, k, i: access.packed(block.batch, block.left_first + p, first + k, i),
            lambda first, k, j: workspace[k, j],
            lambda p, first, k: prefetch(access.packed(block.batch, block.left_first + p + 1, first + k, 0), level=1),
            lambda first, count: fill(lambda k, j, value: T.buffer_store(workspace, value, [k, j]), first, count),
            extents.depth,
        )

    return operands


def _read_packed(access: Access, block: Block, r: Any) -> Callable[[Any, Any, Any], Any]:
    return lambda first, k, j: access.packed(block.batch, block.right_first + r, first + k, j)


def _write(extents: Extents, tile: Tile, access: Access, totals: T.Buffer, block: Block, column: Any) -> TileSink:
    """Emits the store of one register tile, except beyond the edges."""
    lines = ceil_div(tile.columns, LINE)
    tail = extents.columns % tile.columns

    def fetch(p: Any, k: Any, count: int) -> None:
        def line(n: Any) -> None:
            row = (block.left_first + p) * tile.rows + n // lines
            for index, element in enumerate(access.touched(block.batch, row, column + n % lines * LINE)):
                prefetch(element, level=1, write=index == 0)

        spread(tile.rows * lines, count, k, line)

    def write(p: Any) -> None:
        row = T.Bind((block.left_first + p) * tile.rows)

        def line(i: Any, width: int) -> None:
            if access.interleaved is not None:
                _write_together(tile, access.interleaved, totals, p, i, width, (block.batch, row, column))
                return
            for_each_vector(
                width,
                tile.lanes,
                lambda j: access.store(block.batch, row + i, column + j, totals[p, i * tile.columns + j]),
            )

        step = 1 if access.interleaved is None else access.interleaved.rows
        with T.serial(0, tail_extent(tile.rows, extents.rows, row) // step) as n:
            i = n * step
            if tail == 0:
                line(i, tile.columns)
            elif extents.columns < tile.columns:
                line(i, tail)
            else:
                with T.If(column + tile.columns <= extents.columns):
                    with T.Then():
                        line(i, tile.columns)
                    with T.Else():
                        line(i, tail)

    return TileSink(fetch, write)


def _write_together(
    tile: Tile,
    interleaved: Interleaved,
    totals: T.Buffer,
    p: Any,
    i: Any,
    width: int,
    first: tuple[Any, Any, Any],
) -> None:
    """Emits the store of some rows of a register tile, element by element of the first, the second and so on.

    Args:
        tile: The tile.
        interleaved: Stores them.
        totals: [panel, rows · columns].
        p: The panel.
        i: The first row, counted in the panel.
        width: Columns that are stored.
        first: Batch, first row and first column of the panel.
    """
    rows, run = interleaved.rows, interleaved.run
    batch, row, column = first
    with T.serial(0, width // run) as v:
        lines = [totals[p, T.Ramp((i + n) * tile.columns + v * run, 1, run)] for n in range(rows)]
        mixed = registers((rows * run,))
        order = [index % rows * run + index // rows for index in range(rows * run)]
        T.buffer_store(mixed, T.Shuffle(lines, order), [T.Ramp(0, 1, rows * run)])
        with T.vectorized(0, rows * run) as index:
            interleaved.store(batch, row + i, column + v * run, index, mixed[index])
