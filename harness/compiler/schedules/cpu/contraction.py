"""Builds the packing and the kernel of a contraction, which every product with a resident and a streaming operand is.

    result[b, i, j] = finish(Σ_k left[b, i, k] · right[b, k, j])

Linear layers, batched products and convolutions only describe their contraction: how the terms of both operands are
read, and where elements lie in the result. `product.py` has the loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import relax

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import call
from harness.compiler.schedules.common.kernel import Argument
from harness.compiler.schedules.common.kernel_info import KernelInfo, Kind
from harness.compiler.schedules.cpu.blocking import Blocking, Extents, Side, panel_width
from harness.compiler.schedules.cpu.epilogue import Epilogue, ResultLayout
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel
from harness.compiler.schedules.cpu.packing import Pack, PanelRead, Read, pack_function, read_left, read_right, stream
from harness.compiler.schedules.cpu.product import Access, Interleaved, product_function
from harness.compiler.schedules.cpu.tile import Tile

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
        shape: Its shape.
        pack: Packs a panel.
        rows: Reads terms in place, if packing goes along the rows of a left operand; None if it goes across them.
        in_order: Whether these rows lie one after the other.
    """

    side: Side
    value: relax.Expr
    shape: tuple[int, ...]
    pack: Packer
    rows: Reader | None = None
    in_order: bool = False


@dataclass(frozen=True)
class Resident:
    """The operand that is packed whole before the kernel runs; with weights that is when the model is loaded.

    Attributes:
        value: The Relax expression.
        shape: Its shape.
        matrices: Number of its matrices.
        read: Reads terms, of one of its matrices.
        matrix: Matrix of the result → matrix of the operand.
    """

    value: relax.Expr
    shape: tuple[int, ...]
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
        interleaved: Rows of the product whose columns alternate in the result, and columns of one run of them; None if
            each row is stored by itself. With it, the layout takes a pair for a column: the first column, and the
            number of the element counted from there.
    """

    operator: str
    extents: Extents
    streaming: Streaming
    resident: Resident
    layout: ResultLayout
    micro_kernel: MicroKernel
    blocking: Blocking
    interleaved: tuple[int, int] | None = None

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
            Argument("source", self.resident.shape, str(value.ty.dtype)),
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
        packed_shape = tuple(int(extent) for extent in packed.ty.shape)
        name = kernel_name(self.operator.rpartition(".")[2], self.micro_kernel, epilogue)
        function = product_function(
            name,
            self.packed_extents,
            self.streaming.side,
            self.blocking,
            [
                Argument("streamed", self.streaming.shape, str(inputs[0].ty.dtype)),
                Argument("packed", packed_shape, self.micro_kernel.dtype),
                *epilogue.arguments,
                epilogue.result(self.layout),
            ],
            lambda *buffers: self._access(epilogue, *buffers),
            KernelInfo(Kind.KERNEL, self.operator, writes=epilogue.operators),
            self.streaming.rows is not None,
            self.micro_kernel,
        )
        return call(builder, name, function, [inputs[0], packed, *inputs[2:]])

    def _access(self, epilogue: Epilogue, *buffers: T.Buffer) -> Access:
        streamed, panels, *extras, result = buffers
        store, touched = epilogue.write_back(self.layout, extras, result)

        def store_line(b: T.Index, i: T.Index, j: T.Index, n: T.Index, value: T.Expr) -> None:
            store(b, i, (j, n), value)  # type: ignore[arg-type]

        return Access(
            self.streaming.pack(streamed, self.blocking.tile, self.micro_kernel),
            self._panels(panels),
            store,
            touched,
            None if self.streaming.rows is None else self.streaming.rows(streamed),
            self.interleaved and Interleaved(*self.interleaved, store_line),
        )

    def _panels(self, panels: T.Buffer) -> PanelRead:
        if self.resident_side == "left":
            read = read_left(panels, self.micro_kernel)
        else:
            read = read_right(panels, self.micro_kernel, self.blocking.chunk)
        return lambda b, p, k, i: read(self.resident.matrix(b), p, k, i)


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
