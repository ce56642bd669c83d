"""Builds the packing and the kernel of a contraction, which every product with a resident and a streaming operand is.

    result[b, i, j] = finish(Σ_k left[b, i, k] · right[b, k, j])

Linear layers, batched products and convolutions only describe their contraction: how the terms of both operands are
read, and where elements lie in the result. The loops over tasks are here, those of a task in `product.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from tvm import relax

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import argument, call
from harness.compiler.schedules.common.kernel import (
    ThreadWorkspace,
    ceil_div,
    parallel_with_workspace,
    prim_func,
    tail_extent,
)
from harness.compiler.schedules.common.kernel_info import PRODUCT, KernelInfo, Kind
from harness.compiler.schedules.cpu.blocking import Blocking, Extents, Side, panel_width, panels
from harness.compiler.schedules.cpu.epilogue import Epilogue, ResultLayout
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel
from harness.compiler.schedules.cpu.packing import Pack, PanelRead, Read, pack_function, stream
from harness.compiler.schedules.cpu.product import Access, Block, BlockedProduct, Interleaved, Operands
from harness.compiler.schedules.cpu.tile import Tile

_WORTH_STORING = 16 * 1024
"""Bytes of a packed block that is worth being found again; a smaller one is sooner packed again by each task."""
Reader = Callable[[T.Buffer], Read]
"""Declares views of an operand, and returns (matrix, row or column, k) → term."""
Packer = Callable[[T.Buffer, Tile, MicroKernel], Pack]
"""Takes an operand, the register tile and the micro-kernel, and returns how a panel of the operand is packed."""


@dataclass(frozen=True)
class Streaming:
    """The operand that tasks pack block by block.

    Attributes:
        side: The side of the product.
        value: The Relax expression.
        pack: Packs a panel.
        rows: Reads terms in place, if packing goes along the rows of a left operand; None if it goes across them.
        in_order: Whether these rows lie one after the other.
    """

    side: Side
    value: relax.Expr
    pack: Packer
    rows: Reader | None = None
    in_order: bool = False


@dataclass(frozen=True)
class Resident:
    """The operand that is packed whole before the kernel runs; with weights that is when the model is loaded.

    Attributes:
        value: The Relax expression.
        matrices: Number of its matrices.
        read: Reads terms, of one of its matrices.
        matrix: Matrix of the result → matrix of the operand.
    """

    value: relax.Expr
    matrices: int
    read: Reader
    matrix: Callable[[T.Index], T.Index]


@dataclass(frozen=True)
class Contraction:
    """A product of two operands.

    Attributes:
        operator: The Relax operator, without `relax.`.
        extents: The extents; the depth counts terms.
        streaming: One operand.
        resident: The other one.
        layout: Layout of the result.
        micro_kernel: Micro-kernel.
        blocking: Blocking of the loops.
        interleaved: Rows of the product whose columns alternate in the result; None if each row is stored by itself.
            With it, the layout takes pairs for columns (`Access`).
    """

    operator: str
    extents: Extents
    streaming: Streaming
    resident: Resident
    layout: ResultLayout
    micro_kernel: MicroKernel
    blocking: Blocking
    interleaved: Interleaved | None = None

    @property
    def resident_side(self) -> Side:
        """Returns the side of the resident operand."""
        return "right" if self.streaming.side == "left" else "left"

    @property
    def packed_extents(self) -> Extents:
        """Returns the extents with a depth that counts elements of panels."""
        return self.extents.packed(self.micro_kernel.terms)

    def pack(self, builder: relax.BlockBuilder, value: relax.Expr) -> relax.Var:
        """Emits the packing of the resident operand, and returns its panels."""

        def read(buffer: T.Buffer) -> Read:
            return elements(self.resident.read(buffer), self.extents, self.micro_kernel)

        function = pack_function(
            self.resident_side,
            argument("source", value),
            self.resident.matrices,
            self.extents.width(self.resident_side),
            self.packed_extents.depth,
            self.blocking.tile,
            read,
            self.micro_kernel,
            self.blocking.chunk,
        )
        return builder.emit(call(builder, "pack", function, [value]))

    def build(self, builder: relax.BlockBuilder, inputs: Sequence[relax.Expr], epilogue: Epilogue) -> relax.Expr:
        """Emits the packing of the resident operand, and returns the call of the kernel.

        Args:
            builder: The builder of the function.
            inputs: The streaming operand, the resident one, and the operands of the epilogue.
            epilogue: The steps from an element of the product to the stored value.
        """
        packed = self.pack(builder, inputs[1])
        name = kernel_name(self.operator.rpartition(".")[2], self.micro_kernel, epilogue)
        arguments = [
            argument("streamed", inputs[0]),
            argument("packed", packed),
            *epilogue.arguments,
            epilogue.result(self.layout),
        ]
        function = prim_func(name, arguments, partial(self._emit, epilogue), self._info(epilogue))
        return call(builder, name, function, [inputs[0], packed, *inputs[2:]])

    @property
    def _panels(self) -> tuple[int, int]:
        """Returns the number of panels of the streaming operand, and of the resident one."""
        return panels(self.extents, self.streaming.side, self.blocking.tile)

    @property
    def _reads_in_place(self) -> bool:
        """Returns whether rows of A are not packed: one panel reads a row once, and packing would be another pass."""
        return self.streaming.rows is not None and self._panels[1] == 1 and self.micro_kernel.terms == 1

    def _info(self, epilogue: Epilogue) -> KernelInfo:
        extents, tile, blocking = self.extents, self.blocking.tile, self.blocking
        depth = self.packed_extents.depth * self.micro_kernel.terms
        sizes = {"batch": extents.batch, "rows": extents.rows, "depth": depth, "columns": extents.columns}
        return KernelInfo(
            Kind.KERNEL,
            self.operator,
            PRODUCT,
            sizes,
            tile={"rows": tile.rows, "columns": tile.columns},
            decisions={
                "streaming": self.streaming.side,
                "read": "in place" if self._reads_in_place else "packed",
                "slots": blocking.slots,
                "splits": blocking.splits,
            },
            writes=epilogue.operators,
            flop=2 * math.prod(sizes.values()),
        )

    def _emit(self, epilogue: Epilogue, *buffers: T.Buffer) -> None:
        """Emits the loops over tasks: blocks of the streaming operand, and parts of the resident one."""
        streamed, packed, *extras, result = buffers
        blocking, micro_kernel = self.blocking, self.micro_kernel
        store, touched = epilogue.write_back(self.layout, extras, result)
        pack = self.streaming.pack(streamed, blocking.tile, micro_kernel)
        access = Access(pack, self.read_panels(packed), store, touched, self.interleaved)
        rows = None if self.streaming.rows is None else self.streaming.rows(streamed)
        product = BlockedProduct(self.packed_extents, blocking, access, micro_kernel, by_row=rows is not None)
        count, others = self._panels
        blocks, per_split = ceil_div(count, blocking.slots), ceil_div(others, blocking.splits)

        def operands_of(block: Block, number: T.Index, workspace: ThreadWorkspace | None) -> Operands:
            if self.streaming.side == "right":
                return product.streaming_b(block)
            if self._reads_in_place and rows is not None:
                return product.rows_in_place(block, rows)
            shape, dtype = product.block_shape, micro_kernel.a.dtype
            memory = T.alloc_buffer(shape, dtype) if workspace is None else workspace.buffers[0]
            # A task of the same thread may have packed this block for another part of the right operand.
            with nullcontext() if workspace is None else workspace.fill_once(number):
                product.pack_block(block, memory)
            return product.packed_block(block, memory)

        def multiply(task: T.Index, workspace: ThreadWorkspace | None) -> None:
            b = T.Bind(task // (blocks * blocking.splits))
            first = T.Bind(task // blocking.splits % blocks * blocking.slots)
            first_other = T.Bind(task % blocking.splits * per_split)
            slots, parts = tail_extent(blocking.slots, count, first), tail_extent(per_split, others, first_other)
            if self.streaming.side == "left":
                block, most_panels = Block(b, first, slots, first_other, parts), blocking.slots
            else:
                block, most_panels = Block(b, first_other, parts, first, slots), per_split
            operands = operands_of(block, task // blocking.splits, workspace)
            with micro_kernel.setup():
                product.multiply(block, most_panels, operands)

        tasks, shape = self.extents.batch * blocks * blocking.splits, product.block_shape
        packs_blocks = self.streaming.side == "left" and not self._reads_in_place
        with micro_kernel.imported():
            if packs_blocks and 4 * math.prod(shape) >= _WORTH_STORING:
                with parallel_with_workspace(tasks, micro_kernel.a.dtype, shape) as (task, workspace):
                    multiply(task, workspace)
            else:
                with T.parallel(0, tasks) as task:
                    multiply(task, None)

    def read_panels(self, packed: T.Buffer) -> PanelRead:
        """Returns how the resident operand is read that `pack` has packed."""
        matrix, micro_kernel, chunk = self.resident.matrix, self.micro_kernel, self.blocking.chunk
        if self.resident_side == "right":
            return lambda b, p, k, j: packed[matrix(b), p, micro_kernel.b.stored(k, chunk), j]
        if micro_kernel.a.row_major:
            return lambda b, p, k, i: packed[matrix(b), p, i, k]
        return lambda b, p, k, i: packed[matrix(b), p, k, i]


def across(side: Side, extents: Extents, read: Reader, *, neighbours: bool) -> Packer:
    """Returns how panels of an operand are packed term by term, across its rows or columns.

    Args:
        side: The side of the operand.
        extents: The extents of the product, in terms.
        read: Reads terms, of one of the result's matrices.
        neighbours: Whether neighbours in a panel are neighbours in memory, so that vectors are copied.
    """

    def pack(buffer: T.Buffer, tile: Tile, micro_kernel: MicroKernel) -> Pack:
        element = elements(read(buffer), extents, micro_kernel)
        return stream(element, extents.width(side), panel_width(side, tile), tile.lanes if neighbours else 1)

    return pack


def elements(term: Read, extents: Extents, micro_kernel: MicroKernel) -> Read:
    """Returns (matrix, row or column, number of an element) → element of a panel, from a reader of terms."""
    depth = extents.packed(micro_kernel.terms).depth
    return lambda b, i, k: micro_kernel.pack(lambda index: term(b, i, index), k, depth)


def kernel_name(operator: str, micro_kernel: MicroKernel, epilogue: Epilogue) -> str:
    """Returns a kernel's name, from its operator, its micro-kernel and its epilogue."""
    return "_".join(filter(None, (operator, micro_kernel.name))) + epilogue.label
