"""Provides keys that are a linear layer, which a kernel computes while it packs a block of keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.compiler import tir as T
from harness.compiler.schedules.common.folding import Folded, Index, Reader, stored
from harness.compiler.schedules.common.graph import argument
from harness.compiler.schedules.common.kernel import Argument, ceil_div
from harness.compiler.schedules.cpu.attention.packing import Rows, copy_rows
from harness.compiler.schedules.cpu.attention.score_mod import Buffers, Head
from harness.compiler.schedules.cpu.blocking import packed_shape
from harness.compiler.schedules.cpu.microkernels.fp32 import FP32
from harness.compiler.schedules.cpu.microkernels.microkernel import PanelOfB, PanelsOfA, Sums
from harness.compiler.schedules.cpu.operand_layer import OperandLayer
from harness.compiler.schedules.cpu.packing import Read, pack_function
from harness.compiler.schedules.cpu.tile import Tile

WEIGHT = "weight"
"""Role of the layer's weight among a kernel's inputs."""


@dataclass(frozen=True)
class LinearKey:
    """A key that is a function of a linear layer's result.

    Attributes:
        key: The key [batch, length, head, channel], one of whose inputs is the result; an element needs the result's
            row of its key alone.
        layer: The layer; its weight is [wide, narrow] if it is `transposed`.
        source: The layer's input, one row for each key: [batch, key, head, narrow].
        transposed: Whether the weight is transposed. The kernel gets it packed for the tile.
        tile: The register tile, keys × wide channels.
    """

    key: Folded
    layer: OperandLayer
    source: Folded
    transposed: bool
    tile: Tile

    @property
    def operations(self) -> int:
        """Returns the arithmetic operations per element of the key, beside the layer."""
        return self.key.operations

    @property
    def wide(self) -> int:
        """Returns the number of the result's channels."""
        return int(self.layer.weight.ty.shape[0 if self.transposed else 1])

    @property
    def parts(self) -> dict[str, Folded]:
        """Returns the tensors that are read from memory, by role."""
        others = tuple(value for value in self.key.inputs if not value.same_as(self.layer.result))
        bias = {} if self.layer.bias is None else {"layer_bias": stored(self.layer.bias)}
        weight = {WEIGHT: stored(self.layer.weight)}
        return {"key": replace(self.key, inputs=others), "source": self.source, **weight, **bias}

    @property
    def packed(self) -> Argument:
        """Returns the kernel's parameter for the weight, which is packed."""
        return Argument(WEIGHT, packed_shape("right", 1, self.wide, self.layer.narrow, self.tile))

    @property
    def packing(self) -> T.PrimFunc:
        """Returns the function that packs the weight."""

        def read(buffer: T.Buffer) -> Read:
            return lambda _, column, k: buffer[column, k] if self.transposed else buffer[k, column]

        weight = argument(WEIGHT, self.layer.weight)
        return pack_function("right", weight, 1, self.wide, self.layer.narrow, self.tile, read)

    def rows(self, buffers: Buffers, head: Head, first: T.Index, count: T.Index, most: int) -> Rows:
        """Emits the layer for `count` keys from a first one on, of at most `most`; returns these rows of the key."""
        tile, (weight,) = self.tile, buffers[WEIGHT]
        panels = ceil_div(self.wide, tile.columns)
        line = T.alloc_buffer((most, self.layer.narrow), "float32")
        copy_rows(Rows(self.source, buffers["source"], head), line, tile.lanes, first, count)
        result = T.alloc_buffer((most, panels * tile.columns), "float32")
        with T.serial(0, panels) as panel:
            FP32.multiply_panels(
                tile,
                self.layer.narrow,
                PanelsOfA(most // tile.rows, lambda p, first, k, i: line[p * tile.rows + i, first + k]),
                PanelOfB(lambda first, k, j: weight[0, panel, first + k, j]),
                Sums(result, lambda p, i, j: (p * tile.rows + i, panel * tile.columns + j)),
            )

        def element(reader: Reader, index: Index) -> T.Expr:
            row = reader.analyzer.simplify(T.convert(index[1] - first))
            computed = _ResultRow(result, row, buffers.get("layer_bias", ()))
            return self.key.element(Reader({**reader.buffers, self.layer.result: computed}, reader.analyzer), index)

        return Rows(replace(self.parts["key"], element=element), buffers["key"], head)


@dataclass(frozen=True)
class _ResultRow:
    """Stands in for the layer's result: every row that is read is the row of the key that is packed.

    Attributes:
        result: Products of the keys of a task, [key, channel].
        row: The key.
        bias: The bias that is added to them, if there is one.
    """

    result: T.Buffer
    row: T.Index
    bias: Sequence[T.Buffer]

    def __getitem__(self, index: tuple[T.Index, ...]) -> T.Expr:
        value: T.Expr = self.result[self.row, index[-1]]
        for bias in self.bias:
            value = value + bias[(*(0 for _ in bias.shape[1:]), index[-1])]
        return value
