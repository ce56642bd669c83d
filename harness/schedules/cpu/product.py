"""The blocked matrix product that linear layers, batched products and convolutions are built from.

    result[b, i, j] = finish(Σ_k left[b, i, k] · right[b, k, j])

One operand is *resident*: packed once into panels [batch, panel, depth, width] by `pack_function` (for weights that
happens when the model is loaded). The other one *streams*: each task packs a block of it into its own workspace,
through an arbitrary index function, so that transposed operands and convolutions need no copy in memory. A panel is as
wide as the register tile on that side; `emit.accumulate` multiplies one panel of each side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from harness.schedules.cpu.emit import Argument, ceil_div, for_each_vector, fp32, multiply_panels, prim_func
from harness.schedules.cpu.tile import Tile

Side = Literal["left", "right"]

_BLOCK_BYTES = 6 * 1024 * 1024
"""Workspace of one task at most. It is read in order, chunk by chunk, and need not fit the second-level cache."""
_LEFT_PANELS = 48
"""Left panels that share one pass over the right operand; their sums, 1.5 KB each, stay in the second-level cache."""
_TASKS = 16
"""Tasks wanted at least, so that static scheduling keeps a few threads busy."""


@dataclass(frozen=True)
class Problem:
    """Extents of a product: `batch` independent ones of rows × depth by depth × columns."""

    batch: int
    rows: int
    columns: int
    depth: int

    def width(self, side: Side) -> int:
        """Rows of the left operand or columns of the right one."""
        return self.rows if side == "left" else self.columns


Read = Callable[[Any, Any, Any], Any]
"""(batch, row or column, k) → element."""
Pack = Callable[[tirx.Buffer, Any, Any, Any], None]
"""(workspace [slots, depth, width], slot, batch, first row or column): emits the packing of one panel."""


def panel_width(side: Side, tile: Tile) -> int:
    """Width of a packed panel on this side."""
    return tile.rows if side == "left" else tile.columns


def packed_shape(side: Side, batch: int, width: int, depth: int, tile: Tile) -> tuple[int, int, int, int]:
    """Shape of a packed operand: [batch, panel, depth, width of a panel]."""
    panel = panel_width(side, tile)
    return batch, ceil_div(width, panel), depth, panel


def pack_function(
    side: Side, source: Argument, batch: int, width: int, depth: int, tile: Tile, read: Callable[[tirx.Buffer], Read]
) -> tirx.PrimFunc:
    """Packs a resident operand; what lies beyond its edge is zero."""
    shape = packed_shape(side, batch, width, depth, tile)
    panels, panel = shape[1], shape[3]
    split = next(n for n in (8, 4, 2, 1) if depth % n == 0)

    def body(data: tirx.Buffer, packed: tirx.Buffer) -> None:
        element = read(data)
        with T.parallel(0, batch * panels * split) as task, T.serial(0, depth // split) as step:
            b = task // (panels * split)
            p = task // split % panels
            k = task % split * (depth // split) + step
            with T.serial(0, panel) as i:
                at = p * panel + i
                value = element(b, at, k)
                if width % panel:
                    value = T.if_then_else(at < width, value, fp32(0.0))
                T.buffer_store(packed, value, [b, p, k, i])

    return prim_func("pack", [source, Argument("packed", shape)], body)


def stream(read: Read, width: int, panel: int, depth: int, lanes: int) -> Pack:
    """Packs a panel element by element; the last one repeats the last row or column instead of leaving the operand."""

    def pack(workspace: tirx.Buffer, slot: Any, b: Any, first: Any) -> None:
        def copy(clamp: bool) -> None:
            with T.serial(0, depth) as k:
                if clamp:
                    with T.serial(0, panel) as i:
                        T.buffer_store(workspace, read(b, T.min(first + i, width - 1), k), [slot, k, i])
                else:
                    for_each_vector(
                        panel, lanes, lambda i: T.buffer_store(workspace, read(b, first + i, k), [slot, k, i])
                    )

        if width % panel == 0:
            copy(clamp=False)
        else:
            with T.If(first + panel <= width):
                with T.Then():
                    copy(clamp=False)
                with T.Else():
                    copy(clamp=True)

    return pack


def stream_rows(data: tirx.Buffer, starts: Callable[[Any], Any], problem: Problem, tile: Tile) -> Pack:
    """Packs rows that are runs of memory but do not lie one after the other; the last one is repeated beyond the edge.

    Args:
        data: The operand as one contiguous line.
        starts: (row) → where it begins.
        problem: The extents.
        tile: The register tile.
    """

    def pack(workspace: tirx.Buffer, slot: Any, _b: Any, first: Any) -> None:
        begin = T.alloc_buffer((tile.rows,), "int32", scope="local")
        for i in range(tile.rows):
            T.buffer_store(begin, starts(T.min(first + i, problem.rows - 1)), [i])
        with T.serial(0, problem.depth) as k:
            for i in range(tile.rows):
                T.buffer_store(workspace, data[begin[i] + k], [slot, k, i])

    return pack


@dataclass(frozen=True)
class Blocking:
    """How a product is cut into tasks: `slots` streaming panels each, times `splits` parts of the resident operand."""

    slots: int
    splits: int


def choose_blocking(problem: Problem, streaming: Side, tile: Tile) -> Blocking:
    """Blocks that fit the workspace, and enough tasks."""
    panel = panel_width(streaming, tile)
    panels = ceil_div(problem.width(streaming), panel)
    fitting = max(1, _BLOCK_BYTES // (4 * panel * problem.depth))
    if streaming == "left":
        fitting = min(fitting, _LEFT_PANELS)
    slots = max(1, min(fitting, panels, ceil_div(panels * problem.batch, _TASKS)))
    blocks = ceil_div(panels, slots)
    tasks = problem.batch * blocks
    resident: Side = "right" if streaming == "left" else "left"
    others = ceil_div(problem.width(resident), panel_width(resident, tile))
    splits = max(1, min(others, ceil_div(_TASKS, tasks)))
    if streaming == "right":
        splits = max(splits, ceil_div(others, _LEFT_PANELS))
    return Blocking(ceil_div(panels, blocks), ceil_div(others, ceil_div(others, splits)))


PanelRead = Callable[[Any, Any, Any, Any], Any]
"""(batch, panel, k, row or column within the panel) → element of the packed operand."""
Store = Callable[[Any, Any, Any, Any], None]
"""(batch, row, column, value): emits the store of one element; may be vectorized over columns."""


def product_function(
    name: str,
    problem: Problem,
    streaming: Side,
    tile: Tile,
    arguments: Sequence[Argument],
    body: Callable[..., tuple[Pack, PanelRead, Store]],
) -> tirx.PrimFunc:
    """The kernel.

    Args:
        name: Name of the function.
        problem: The extents.
        streaming: Which operand streams.
        tile: The register tile.
        arguments: All tensors, the result last.
        body: Gets one buffer per argument; returns how the streaming operand is packed, how the resident one is read
            and how an element of the result is stored.
    """
    resident: Side = "right" if streaming == "left" else "left"
    panel = panel_width(streaming, tile)
    panels = ceil_div(problem.width(streaming), panel)
    others = ceil_div(problem.width(resident), panel_width(resident, tile))
    blocking = choose_blocking(problem, streaming, tile)
    blocks = ceil_div(panels, blocking.slots)
    per_split = ceil_div(others, blocking.splits)

    def emit(*buffers: tirx.Buffer) -> None:
        pack, packed, store = body(*buffers)
        with T.parallel(0, problem.batch * blocks * blocking.splits) as task:
            b = T.Bind(task // (blocks * blocking.splits))
            first_panel = T.Bind(task // blocking.splits % blocks * blocking.slots)
            first_other = T.Bind(task % blocking.splits * per_split)
            slots = _at_most(blocking.slots, panels, first_panel)
            parts = _at_most(per_split, others, first_other)
            workspace = T.alloc_buffer((blocking.slots, problem.depth, panel), "float32")
            with T.serial(0, slots) as slot:
                pack(workspace, slot, b, (first_panel + slot) * panel)
            left_panels, right_panels = (slots, parts) if streaming == "left" else (parts, slots)
            left_first, right_first = (first_panel, first_other) if streaming == "left" else (first_other, first_panel)
            most = blocking.slots if streaming == "left" else per_split
            totals = T.alloc_buffer((most, tile.size), "float32")
            with T.serial(0, right_panels) as r:

                def left(p: Any, k: Any, i: Any) -> Any:
                    return workspace[p, k, i] if streaming == "left" else packed(b, left_first + p, k, i)

                def right(k: Any, j: Any) -> Any:
                    return packed(b, right_first + r, k, j) if streaming == "left" else workspace[r, k, j]

                multiply_panels(tile, problem.depth, left_panels, left, right, totals)
                with T.serial(0, left_panels) as p:
                    row, column = (left_first + p) * tile.rows, (right_first + r) * tile.columns
                    _write(problem, tile, store, lambda at: totals[p, at], b, row, column)

    return prim_func(name, arguments, emit)


def _at_most(count: int, total: int, first: Any) -> Any:
    """min(count, total - first), constant where blocks come out even."""
    return count if total % count == 0 else T.min(count, total - first)


def _write(
    problem: Problem, tile: Tile, store: Store, total: Callable[[Any], Any], b: Any, row: Any, column: Any
) -> None:
    """Emits the store of one register tile, without what lies beyond the edges."""
    rows = _at_most(tile.rows, problem.rows, row)

    def line(i: Any, width: int) -> None:
        for_each_vector(width, tile.lanes, lambda j: store(b, row + i, column + j, total(i * tile.columns + j)))

    tail = problem.columns % tile.columns
    with T.serial(0, rows) as i:
        if tail == 0:
            line(i, tile.columns)
        elif problem.columns < tile.columns:
            line(i, tail)
        else:
            with T.If(column + tile.columns <= problem.columns):
                with T.Then():
                    line(i, tile.columns)
                with T.Else():
                    line(i, tail)
