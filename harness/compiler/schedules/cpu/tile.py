"""Chooses the register tile of a product by the target's instruction set and the shape of the product."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm
from tvm.target import codegen

SHORTEST_RUN = 4
"""Elements of a vector that is worth being loaded or stored by itself."""


@dataclass(frozen=True)
class Tile:
    """A block of rows × columns of the result that stays in vector registers during the loop over the depth.

    Attributes:
        rows: Rows; each costs one broadcast load per step of depth.
        columns: Columns, a multiple of `lanes`.
        lanes: fp32 numbers in one vector register.
    """

    rows: int
    columns: int
    lanes: int

    @property
    def size(self) -> int:
        """Returns the number of elements in the tile."""
        return self.rows * self.columns

    @property
    def vectors(self) -> int:
        """Returns the vectors of a row."""
        return self.columns // self.lanes

    def run(self, line: int) -> int:
        """Returns the columns of the longest vectors that each lie in one line, where lines have so many elements."""
        return math.gcd(line, self.lanes)


@dataclass(frozen=True)
class VectorUnit:
    """The vector unit of an instruction set: fp32 lanes of one register, and the number of registers."""

    lanes: int
    registers: int


def vector_unit(target: tvm.target.Target) -> VectorUnit:
    """Returns the vector registers of an LLVM target, from its processor name and features."""
    if codegen.llvm_cpu_has_features("avx512f", target):
        return VectorUnit(lanes=16, registers=32)
    if codegen.llvm_cpu_has_features("avx", target):
        return VectorUnit(lanes=8, registers=16)
    if codegen.llvm_cpu_has_features("neon", target):
        return VectorUnit(lanes=4, registers=32)
    return VectorUnit(lanes=4, registers=16)


_SHAPES = {
    32: ((12, 2), (8, 3), (6, 4), (4, 5), (2, 8), (1, 8), (12, 1)),
    16: ((6, 2), (4, 3), (2, 4), (1, 8), (8, 1)),
}
"""Rows and vectors per row by number of registers: accumulators, one row of the right operand, a broadcast must fit.

Of 32 registers one must be left besides: LLVM spills a part of 4 × 6 on AArch64.
"""


def loads(rows: int, vectors: int) -> float:
    """Returns the time of a multiply-add with its loads in such a tile; two loads take as long as two multiply-adds."""
    return 1.0 + 0.25 * (rows + vectors) / (rows * vectors)


def choose_tile(unit: VectorUnit, rows: int, columns: int, shapes: Sequence[tuple[int, int]] | None = None) -> Tile:
    """Chooses the tile with the least work for a product of this many rows and columns, among shapes of fp32 or others.

    The work is that of the padded result, with the loads.
    """

    def work(shape: tuple[int, int]) -> float:
        height, vectors = shape
        width = vectors * unit.lanes
        padded = -(-rows // height) * height * -(-columns // width) * width
        return padded * loads(height, vectors)

    height, vectors = min(shapes or _SHAPES[unit.registers], key=work)
    return Tile(height, vectors * unit.lanes, unit.lanes)


def smallest_tile(shapes: Sequence[tuple[int, int]]) -> Callable[[VectorUnit, int, int], Tile]:
    """Returns the choice of the smallest panels that have all rows of a product, otherwise of the largest.

    Args:
        shapes: Rows of A's panels and columns of B's, the largest first.
    """

    def choose(unit: VectorUnit, rows: int, columns: int) -> Tile:
        fitting = [shape for shape in shapes if shape[0] >= rows]
        return Tile(*(fitting[-1] if fitting else shapes[0]), unit.lanes)

    return choose
